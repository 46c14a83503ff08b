"""Engines over `shared_memory`, driven by hand: the connector's two sides without an engine around them."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from push_rig import PullEngine
from push_rig import view as any_view

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import RequestView, TransferOutcome
from pdkv.connectors.shared_memory import worker as shared_memory_worker
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.kernels import pool_copy
from pdkv.wire.kv import KVHandoff, KVLayout

WAIT_S = 60.0


def make_layout(block_size: int = 16, **changes: Any) -> KVLayout:
    values: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "dtype_bytes": 4}
    return KVLayout(block_size=block_size, **(values | changes))


class Engine(PullEngine):
    """One engine's connector, on one rank; its pool is full of something."""

    def __init__(self, name: str, **arguments: Any) -> None:
        values = {"layout": make_layout(), "num_blocks": 48, "kv_checksum": "off", **arguments}
        super().__init__(SharedMemoryConnector, name, **values)
        self.kv.copy_(torch.randn(self.kv.shape))

    def offer(self, block_ids: Sequence[int], num_tokens: int, **changes: Any) -> KVHandoff:
        """A hand-off "h", with `changes` to what is right."""
        return msgspec.structs.replace(self.hand_off("h", block_ids, num_tokens), **changes)

    def start(self, request: RequestView, block_ids: Sequence[int], num_computed: int) -> int:
        """Ask, allocate, hand the orders to the worker; returns the number of tokens under way."""
        request = msgspec.structs.replace(request, num_local_hit=num_computed)
        num_tokens: int = self.scheduler.get_num_new_matched_tokens(request, num_computed).num_tokens
        self.scheduler.update_state_after_alloc(request, [block_ids], num_tokens)
        self.step()
        return num_tokens

    def loaded(self, request: RequestView) -> TransferOutcome:
        """How a load ended, which must be the only thing that did."""
        outcome = self.outcome("receiving", request.transfer_key)
        assert not self.unread
        return outcome

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """A prompt's blocks have content."""
        per_block = self.layout.block_size // HASH_BLOCK_SIZE
        for i, block_id in enumerate(block_ids):
            self.table.publish(block_id, list(keys[i * per_block : (i + 1) * per_block]))


def view(transfer_id: str, *, num_tokens: int, **rest: Any) -> RequestView:
    """A request whose last token is not wanted."""
    return any_view(transfer_id, num_tokens=num_tokens, **{"num_wanted": num_tokens - 1, **rest})


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


Engines = Callable[..., Engine]


@contextmanager
def closing_engines(device: str = "cpu") -> Iterator[Engines]:
    """Makes engines, and closes them at the end."""
    made: list[Engine] = []

    def make(name: str, **arguments: Any) -> Engine:
        made.append(Engine(name, **{"device": device, **arguments}))
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.close()
