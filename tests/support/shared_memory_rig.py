"""Engines over `shared_memory`, driven by hand: the connector's two sides without an engine around them."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConfirmedRange, ConnectorConfig, RequestView, SchedulerView, TransferOutcome
from pdkv.connectors.shared_memory import worker as shared_memory_worker
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.connectors.step_done import StepDone
from pdkv.kernels import pool_copy
from pdkv.wire.messages import ChecksumMode, EngineCard, KVHandoff, KVLayout

WAIT_S = 60.0


def make_layout(block_size: int = 16, **changes: Any) -> KVLayout:
    values: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "dtype_bytes": 4}
    return KVLayout(block_size=block_size, **(values | changes))


class Engine:
    """One engine's connector, driven by hand."""

    def __init__(
        self,
        name: str,
        *,
        epoch: str = "1",
        layout: KVLayout | None = None,
        device: str = "cpu",
        kv_checksum: ChecksumMode = "off",
        **options: str,
    ) -> None:
        self.layout = layout or make_layout()
        self._woken = threading.Semaphore(0)
        self.step_id = 0
        self.earlier_steps: StepDone | None = None
        config = ConnectorConfig(
            engine=name, epoch=epoch, layout=self.layout, num_blocks=48, options=options, model="m", device=device,
            kv_checksum=kv_checksum,
        )  # fmt: skip
        self.connector = SharedMemoryConnector(config, self._woken.release)
        self.table = self.connector.make_block_table()
        self.kv = self.connector.allocate_kv_cache()
        self.kv.copy_(torch.randn(self.kv.shape))
        self.scheduler = self.connector.make_scheduler_side()
        self.worker = self.connector.make_worker_side(0)
        self.worker.register_kv_caches(self.kv)
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=os.getpid(), connector="shared_memory", kind="pull",
            content_addressed=True, orders=[], model="m", layout=self.layout, hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=48, max_model_len=1024, max_num_seqs=8, rank_blobs=[self.worker.handshake()],
            kv_checksum=kv_checksum,
        )  # fmt: skip
        self._peers: list[EngineCard] = []

    def meet(self, *cards: EngineCard) -> None:
        self.scheduler.update_peers(cards)
        removed = [card for card in self._peers if card not in cards]
        self.worker.update_peers([card for card in cards if card not in self._peers], removed)
        self._peers = list(cards)

    def hand_off(self, block_ids: Sequence[int], num_tokens: int, **changes: Any) -> KVHandoff:
        request = view("h", kv="handoff", num_tokens=num_tokens + 1, num_wanted=num_tokens)
        finished = self.scheduler.request_finished(request, [block_ids])
        assert finished.hold_blocks
        if self.card.kv_checksum != "off":
            self.step([ConfirmedRange(request, 0, num_tokens, [block_ids], True)])
        values: dict[str, Any] = {
            "request_id": "h", "attempt": 1, "transfer_id": "h", "engine": self.card.engine,
            "epoch": self.card.epoch, "num_tokens": num_tokens, "payload": finished.payload,
        }  # fmt: skip
        return KVHandoff(**(values | changes))

    def start(self, request: RequestView, block_ids: Sequence[int], num_computed: int) -> int:
        """Ask, allocate, hand the orders to the worker; returns the number of tokens under way."""
        request = msgspec.structs.replace(request, num_local_hit=num_computed)
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, num_computed).num_tokens
        self.scheduler.update_state_after_alloc(request, [block_ids], num_tokens)
        self.step()
        return num_tokens

    def step(self, confirmed: Sequence[ConfirmedRange] = ()) -> None:
        self.step_id += 1
        meta = self.scheduler.build_connector_meta(SchedulerView(self.step_id, [], confirmed, [], [], [], []))
        meta.earlier_steps = self.earlier_steps
        self.worker.start_load_kv(meta)

    def outcome(self, request: RequestView) -> TransferOutcome:
        """The next result, which must be this request's and no other."""
        while not (results := self.worker.get_finished()):
            assert self._woken.acquire(timeout=WAIT_S), "no result"
        self.scheduler.update_connector_output(results)
        (outcome,) = [*results.finished_receiving.values(), *results.failed_receiving.values()]
        assert request.transfer_key in (results.failed_receiving if outcome.code else results.finished_receiving)
        return outcome

    def tokens(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """KV of a request's tokens [start, stop), (tokens, layers, 2, heads, head size)."""
        return self.kv[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[start:stop].clone()

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        per_block = self.layout.block_size // HASH_BLOCK_SIZE
        for i, block_id in enumerate(block_ids):
            self.table.publish(block_id, list(keys[i * per_block : (i + 1) * per_block]))

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.worker.shutdown()
        self.connector.shutdown()
        self.connector.shutdown()


def view(transfer_id: str, *, kv: Any, num_tokens: int, num_wanted: int | None = None, **rest: Any) -> RequestView:
    wanted = num_tokens - 1 if num_wanted is None else num_wanted
    keys = rest.pop("block_keys", ())
    return RequestView(transfer_id, 1, transfer_id, kv, num_tokens, wanted, keys, **rest)


def chain(num_keys: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(num_keys)]


class Gate:
    """Holds every copy of whole blocks until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()
        self.num_copies = 0
        for module in (shared_memory_worker, pool_copy):  # in host memory and on devices
            monkeypatch.setattr(module, "copy_pieces", self._gated(module.copy_pieces))

    def _gated(self, real: Callable[..., None]) -> Callable[..., None]:
        def copy(*arguments: Any) -> None:
            self.num_copies += 1
            self.reached.release()
            assert self.opened.wait(WAIT_S)
            real(*arguments)

        return copy

    def wait(self) -> None:
        assert self.reached.acquire(timeout=WAIT_S)


class Engines:
    """Makes engines, and closes them at the end."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: list[Engine] = []

    def __call__(self, name: str, **arguments: Any) -> Engine:
        self._made.append(Engine(name, **{"device": self._device, **arguments}))
        return self._made[-1]

    def close(self) -> None:
        for engine in self._made:
            engine.close()


@contextmanager
def closing_engines(device: str = "cpu") -> Iterator[Engines]:
    engines = Engines(device)
    try:
        yield engines
    finally:
        engines.close()
