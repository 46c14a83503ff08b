"""Engines of any number of ranks, driven by hand: a connector's sides without an engine around them.

All ranks of an engine live in this process. A request's KV is the same full tensor everywhere; an engine holds each
rank's heads of it in that rank's blocks.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec
import torch

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import (
    BlockTables,
    Built,
    ConfirmedRange,
    ConnectorConfig,
    Direction,
    KVConnector,
    RequestView,
    SchedulerView,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.connectors.step_done import StepDone
from pdkv.connectors.transfer.planning import rank_heads
from pdkv.errors import KVCorrupted
from pdkv.wire.kv import ChecksumMode, EngineCard, KVHandoff, KVLayout

WAIT_S = 60.0
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 4, 8


def make_layout(tp: int = 1, block_size: int = 16, **changes: Any) -> KVLayout:
    heads = changes.pop("num_heads", NUM_HEADS)
    values: dict[str, Any] = {
        "num_layers": NUM_LAYERS, "num_kv_heads": len(rank_heads(0, tp, heads)), "head_size": HEAD_SIZE,
        "block_size": block_size, "dtype": "float32", "dtype_bytes": 4, "total_kv_heads": heads,
    }  # fmt: skip
    return KVLayout(**(values | changes))


def full_kv(num_tokens: int, layout: KVLayout, seed: int = 0) -> torch.Tensor:
    """KV of a request on all ranks, (tokens, layers, 2, heads, head size)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, layout.num_layers, 2, layout.kv_heads_of_all_ranks, layout.head_size)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


def view(transfer_id: str, *, kv: Any, num_tokens: int, **rest: Any) -> RequestView:
    """A request of which KV of all `num_tokens` tokens is wanted, unless `rest` says other things."""
    values: dict[str, Any] = {
        "request_id": transfer_id, "attempt": 1, "transfer_id": transfer_id, "kv": kv, "num_tokens": num_tokens,
        "num_wanted": num_tokens, "block_keys": (),
    }  # fmt: skip
    return RequestView(**(values | rest))


class RankedEngine:
    """One engine; `connector` is the class, its name with `options`, or the plan."""

    def __init__(
        self,
        connector: type[KVConnector] | str | ConnectorPlan,
        name: str,
        *,
        epoch: str = "1",
        tp: int = 1,
        kv_shards: int = 1,
        layout: KVLayout | None = None,
        num_blocks: int = 64,
        model: str = "m",
        device: str = "cpu",
        kv_checksum: ChecksumMode = "on",
        clock: Clock = MONOTONIC,
        own_pool: bool = True,
        **options: str,
    ) -> None:
        """`own_pool`: the connector may allocate it."""
        self.name, self.epoch, self.tp = name, epoch, tp
        self.layout = layout or make_layout(tp)
        self.step_id = 0
        self.earlier_steps: StepDone | None = None  # of the next steps
        self.woken = threading.Semaphore(0)
        if isinstance(connector, type):
            connector = f"{connector.__module__}:{connector.__qualname__}"
        plan = connector if isinstance(connector, ConnectorPlan) else plan_connector(connector, options)
        config = ConnectorConfig(
            engine=name, epoch=epoch, layout=self.layout, num_blocks=num_blocks, plan=plan, model=model, tp=tp,
            device=device, kv_checksum=kv_checksum, kv_shards=max(kv_shards, tp), clock=clock,
            block_table=LocalBlockTable(num_blocks),
        )  # fmt: skip
        self.connectors = [
            build_connector(msgspec.structs.replace(config, rank=rank), self.woken.release) for rank in range(tp)
        ]
        first = self.connectors[0]
        self.table = first.block_table or config.block_table
        self.pools = [self._allocate(c, num_blocks, own_pool) for c in self.connectors]
        self.scheduler: Any = first.scheduler()
        self.workers: list[Any] = [connector.worker() for connector in self.connectors]
        for worker, pool in zip(self.workers, self.pools, strict=True):
            worker.register_kv_caches(pool)
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=os.getpid(), connector="rig", kind=plan.kind,
            content_addressed=plan.content_addressed, orders=list(plan.orders), model=model, layout=self.layout,
            hash_block_size=HASH_BLOCK_SIZE, num_blocks=num_blocks, max_model_len=4096, max_num_seqs=8, tp=tp,
            rank_blobs=[worker.handshake() for worker in self.workers], kv_checksum=kv_checksum,
        )  # fmt: skip
        self._peers: list[EngineCard] = []
        self._reports: dict[tuple[str, TransferKey], list[TransferOutcome]] = {}

    @property
    def worker(self) -> Any:
        """Of the first rank."""
        return self.workers[0]

    @property
    def kv(self) -> torch.Tensor:
        """The first rank's pool."""
        return self.pools[0]

    def meet(self, *cards: EngineCard) -> None:
        """These peers are known and no others."""
        self.scheduler.update_peers(cards)
        added = [card for card in cards if card not in self._peers]
        removed = [card for card in self._peers if card not in cards]
        for worker in self.workers:
            worker.update_peers(added, removed)
        self._peers = list(cards)

    def fill(self, block_ids: Sequence[int], kv: torch.Tensor, start: int = 0) -> None:
        """Put tokens [start, len(kv)) of a request into its blocks on all ranks."""
        for t in range(start, len(kv)):
            block, offset = divmod(t, self.layout.block_size)
            for rank, pool in enumerate(self.pools):
                heads = rank_heads(rank, self.tp, self.layout.kv_heads_of_all_ranks)
                pool[block_ids[block], :, :, :, offset] = kv[t, :, :, heads.start : heads.stop]

    def check(self, block_ids: Sequence[int], kv: torch.Tensor, start: int = 0) -> None:
        """Check that tokens [start, len(kv)) are in the blocks on all ranks."""
        assert torch.equal(self.tokens(block_ids, start, len(kv)), kv[start:])

    def tokens(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """KV of a request's tokens [start, stop), (tokens, layers, 2, heads, head size), as the ranks have it."""
        layout = self.layout
        shape = (stop - start, layout.num_layers, 2, layout.kv_heads_of_all_ranks, layout.head_size)
        kv = torch.empty(shape, dtype=self.kv.dtype)
        for rank, pool in enumerate(self.pools):
            heads = rank_heads(rank, self.tp, layout.kv_heads_of_all_ranks)
            found = pool[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[start:stop]
            kv[:, :, :, heads.start : heads.stop] = found
        return kv

    def step(self, **news: Any) -> Any:
        """One step; the orders reach the ranks as msgpack. Returns them."""
        self.step_id += 1
        empty: dict[str, Any] = dict.fromkeys(SchedulerView.__struct_fields__[1:], ())
        meta = self.scheduler.build_connector_meta(SchedulerView(self.step_id, **(empty | news)))
        encoded = msgspec.msgpack.encode(meta)
        for worker in self.workers:
            orders = msgspec.msgpack.decode(encoded, type=worker.metadata_type)
            orders.earlier_steps = self.earlier_steps
            worker.start_load_kv(orders)
        return meta

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        for worker in self.workers:
            worker.cancel(key, direction)

    def outcome(self, kind: str, key: TransferKey, timeout_s: float = WAIT_S) -> TransferOutcome:
        """What all ranks reported about a transfer: `kind` is "sending" or "receiving"."""
        deadline = time.monotonic() + timeout_s
        while len(self._reports.get((kind, key), ())) < self.tp:
            assert time.monotonic() < deadline, f"no outcome of {kind} {key}: {self._reports}"
            self.collect()
            if len(self._reports.get((kind, key), ())) < self.tp:
                self.woken.acquire(timeout=deadline - time.monotonic())
        outcomes = self._reports.pop((kind, key))
        assert len(outcomes) == self.tp, "a rank reported twice"
        failed = sorted(
            (o for o in outcomes if o.code), key=lambda o: o.code != KVCorrupted.code
        )  # as an engine has it
        return failed[0] if failed else TransferOutcome("", sum(o.num_bytes for o in outcomes))

    def collect(self) -> None:
        """Take all ranks' results."""
        for worker in self.workers:
            results = worker.get_finished()
            if results:
                self._note(worker, results)

    def _note(self, worker: WorkerConnector, results: TransferResults) -> None:
        resolved = self.scheduler.resolve_results(results)
        for name, found in resolved._asdict().items():
            for key, outcome in found.items():
                assert bool(outcome.code) == name.startswith("failed")
                self._reports.setdefault((name.split("_")[1], key), []).append(outcome)
        self.scheduler.update_connector_output(resolved)

    @property
    def unread(self) -> dict[tuple[str, TransferKey], list[TransferOutcome]]:
        """Outcomes that nobody asked for."""
        self.collect()
        return self._reports

    def _allocate(self, connector: Built, num_blocks: int, own_pool: bool) -> torch.Tensor:
        """One rank's pool, filled with -1."""
        layout = self.layout
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_size)
        pool = connector.kv_cache() if own_pool else None
        pool = torch.empty(shape, dtype=getattr(torch, layout.dtype)) if pool is None else pool
        return pool.fill_(-1)

    def close(self) -> None:
        """Shut all sides down, twice: that is idempotent."""
        for _ in range(2):
            self.scheduler.shutdown()
            for end in (*self.workers, *self.connectors):
                end.shutdown()


class PushEngine(RankedEngine):
    """Over a pushing connector."""

    def want(self, request: RequestView, block_ids: Sequence[int], start: int = 0) -> bytes | None:
        """Allocate for tokens [start, …) and register; returns the ticket."""
        request = msgspec.structs.replace(request, num_local_hit=start)
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, start).num_tokens
        ticket = self.scheduler.update_state_after_alloc(request, [block_ids], num_tokens)
        self.step()
        return ticket

    def give(self, request: RequestView, block_ids: Sequence[int], stop: int, *, last: bool = True) -> list[Any]:
        """Tokens [0, stop) are confirmed; returns the holds that were taken."""
        return self.step(confirmed=[ConfirmedRange(request, 0, stop, [list(block_ids)], last)]).holds


@contextmanager
def pushing(connector: Any, **arguments: Any) -> Iterator[tuple[PushEngine, PushEngine]]:
    """A prefill and a decode engine that know each other, until the end of the block."""
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(closing(PushEngine(connector, name, **arguments))) for name in ("p", "d")
        )
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        yield prefill, decode


def tables_of(block_ids: Sequence[int] | BlockTables) -> BlockTables:
    """One group's blocks as tables; tables as they are."""
    return block_ids if isinstance(block_ids[0], Sequence) else [block_ids]  # type: ignore[list-item, return-value]


class PullEngine(RankedEngine):
    """Over a pulling connector."""

    def hand_off(self, name: str, block_ids: Sequence[int] | BlockTables, num_tokens: int) -> KVHandoff:
        """What prefill says about the KV in its blocks, of one group or of several."""
        request = view(name, kv="handoff", num_tokens=num_tokens)
        finished = self.scheduler.request_finished(request, tables_of(block_ids))
        assert finished.hold_blocks
        assert finished.payload is not None
        if self.scheduler.observes.confirmed:
            self.step(confirmed=[ConfirmedRange(request, 0, num_tokens, tables_of(block_ids), True)])
        return KVHandoff(name, 1, name, self.card.engine, self.card.epoch, num_tokens, finished.payload)

    def load(self, handoff: KVHandoff, block_ids: Sequence[int] | BlockTables, start: int = 0) -> int:
        """Begin to load tokens [start, …); returns their number."""
        request = view(
            handoff.transfer_id, kv="await_peer", num_tokens=handoff.num_tokens, handoff=handoff, num_local_hit=start
        )
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, start).num_tokens
        self.scheduler.update_state_after_alloc(request, tables_of(block_ids), num_tokens)
        self.step()
        return num_tokens
