"""Engines over `nixl`, driven by hand: the connector's two sides without a model, in this process or one of its own.

What a token's KV must be is a function of its number, so that any process can say whether it is right.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import torch
from nursery import Forked, run_nursery

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.clock import MONOTONIC, Clock
from pdkv.connectors.base import (
    ConfirmedRange,
    ConnectorConfig,
    RequestView,
    SchedulerView,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.registry import make_connector
from pdkv.connectors.step_done import StepDone
from pdkv.wire.messages import ChecksumMode, EngineCard, KVHandoff, KVLayout

WAIT_S = 60.0
NUM_BLOCKS = 64
HEADS = 4


def make_layout(block_size: int = 16, tp: int = 1, **changes: Any) -> KVLayout:
    """A rank's layout."""
    values: dict[str, Any] = {
        "num_layers": 3, "num_kv_heads": HEADS // tp, "head_size": 8, "dtype": "float32", "dtype_bytes": 4,
        "total_kv_heads": HEADS,
    }  # fmt: skip
    return KVLayout(block_size=block_size, **(values | changes))


class Rank:
    """One rank of an engine: its connector, pool and results."""

    def __init__(
        self,
        name: str,
        *,
        epoch: str = "1",
        layout: KVLayout | None = None,
        rank: int = 0,
        tp: int = 1,
        num_blocks: int = NUM_BLOCKS,
        options: dict[str, str] | None = None,
        own_pool: bool = True,
        kv_checksum: ChecksumMode = "on",
        clock: Clock = MONOTONIC,
    ) -> None:
        """`own_pool`: the connector may allocate it."""
        self.name, self.epoch, self.rank = name, epoch, rank
        self.layout = layout or make_layout()
        self._woken = threading.Semaphore(0)
        config = ConnectorConfig(
            engine=name, epoch=epoch, layout=self.layout, num_blocks=num_blocks, options=options or {}, model="m",
            rank=rank, tp=tp, kv_checksum=kv_checksum, clock=clock,
        )  # fmt: skip
        self.num_blocks = num_blocks
        self.connector = make_connector("nixl", config, self._woken.release)
        self.table = self.connector.make_block_table()
        self.scheduler = self.connector.make_scheduler_side() if rank == 0 else None
        layout = self.layout
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_size)
        pool = self.connector.allocate_kv_cache() if own_pool else None
        self.kv = torch.zeros(shape, dtype=getattr(torch, layout.dtype)) if pool is None else pool
        self.worker: Any = self.connector.make_worker_side(rank)
        self.worker.register_kv_caches(self.kv)
        self.blob: bytes = self.worker.handshake()
        self.peers: list[EngineCard] = []

    def fill(self, block_ids: Sequence[int], num_tokens: int, seed: int) -> None:
        """Compute a prompt: the KV of tokens [0, num_tokens) lies in these blocks."""
        layout = self.layout
        for token in range(num_tokens):
            block = self.kv[block_ids[token // layout.block_size]]
            block[:, :, :, token % layout.block_size] = self._expected(seed, token)

    def wrong_tokens(self, block_ids: Sequence[int], start: int, stop: int, seed: int) -> list[int]:
        """Which of tokens [start, stop) are not as computed; block_ids[0] holds token 0."""
        layout = self.layout
        return [
            token
            for token in range(start, stop)
            if not torch.equal(
                self.kv[block_ids[token // layout.block_size]][:, :, :, token % layout.block_size],
                self._expected(seed, token),
            )
        ]

    def _expected(self, seed: int, token: int) -> torch.Tensor:
        """(layers, 2, heads of this rank, head size)."""
        layout = self.layout
        first = self.rank * layout.num_kv_heads
        heads = torch.arange(first, first + layout.num_kv_heads)
        layers = torch.arange(layout.num_layers * 2).view(layout.num_layers, 2, 1, 1)
        values = seed * 1009.0 + token + layers * 0.125 + heads.view(1, 1, -1, 1) * 0.03125
        return values.expand(-1, -1, -1, layout.head_size).to(self.kv.dtype)

    def meet(self, cards: Sequence[EngineCard]) -> None:
        """These peers are there and no others."""
        others = [card for card in cards if card.engine != self.name]
        if self.scheduler is not None:
            self.scheduler.update_peers(others)
        removed = [card for card in self.peers if card not in others]
        self.worker.update_peers([card for card in others if card not in self.peers], removed)
        self.peers = others

    def results(self) -> TransferResults:
        """The next results."""
        while not (results := self.worker.get_finished()):
            assert self._woken.acquire(timeout=WAIT_S), "no result"
        if self.scheduler is not None:
            self.scheduler.update_connector_output(results)
        return results

    def close(self) -> None:
        """Shut both sides down, twice."""
        for _ in range(2):
            if self.scheduler is not None:
                self.scheduler.shutdown()
            self.worker.shutdown()
            self.connector.shutdown()
        for name in ("kv", "table"):  # the last references to the arena
            self.__dict__.pop(name, None)


class Engine:
    """The ranks of an engine, all in one process."""

    def __init__(self, name: str, *, block_size: int = 16, tp: int = 1, epoch: str = "1", **arguments: Any) -> None:
        layout = arguments.pop("layout", None) or make_layout(block_size, tp)
        self.ranks = [Rank(name, epoch=epoch, layout=layout, rank=r, tp=tp, **arguments) for r in range(tp)]
        self.name, self.epoch, self.layout = name, epoch, layout
        self.step_id = 0
        self.earlier_steps: StepDone | None = None  # of the next steps
        first = self.ranks[0]
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=os.getpid(), connector="nixl", kind=first.connector.kind,
            content_addressed=False, orders=first.connector.orders(), model="m", layout=layout,
            hash_block_size=HASH_BLOCK_SIZE, num_blocks=first.num_blocks, max_model_len=1024, max_num_seqs=8, tp=tp,
            rank_blobs=[rank.blob for rank in self.ranks],
        )  # fmt: skip

    @property
    def scheduler(self) -> Any:
        """Rank 0's."""
        return self.ranks[0].scheduler

    def meet(self, *cards: EngineCard) -> None:
        """These peers are there and no others."""
        for rank in self.ranks:
            rank.meet(cards)

    def fill(self, block_ids: Sequence[int], num_tokens: int, seed: int) -> None:
        """Compute a prompt on all ranks."""
        for rank in self.ranks:
            rank.fill(block_ids, num_tokens, seed)

    def wrong_tokens(self, block_ids: Sequence[int], start: int, stop: int, seed: int) -> list[int]:
        """Tokens that are wrong on any rank."""
        return sorted({t for rank in self.ranks for t in rank.wrong_tokens(block_ids, start, stop, seed)})

    def step(self, confirmed: Sequence[ConfirmedRange] = (), aborted: Sequence[tuple[str, int]] = ()) -> Any:
        """One step's orders, to all ranks."""
        self.step_id += 1
        view = SchedulerView(self.step_id, [], confirmed, [], [], aborted, [])
        meta = self.scheduler.build_connector_meta(view)
        meta.earlier_steps = self.earlier_steps
        for rank in self.ranks:
            rank.worker.start_load_kv(meta)
        return meta

    def hand_off(self, transfer_id: str, block_ids: Sequence[int], num_tokens: int) -> KVHandoff:
        """Pull: what prefill says of a prompt in these blocks."""
        request = view(transfer_id, kv="handoff", num_tokens=num_tokens + 1)
        finished = self.scheduler.request_finished(request, [block_ids])
        assert finished.hold_blocks
        assert finished.payload is not None
        return KVHandoff(transfer_id, 1, transfer_id, self.name, self.epoch, num_tokens, finished.payload)

    def load(self, request: RequestView, block_ids: Sequence[int], num_local_hit: int = 0) -> bytes | None:
        """Ask, allocate, begin; returns the ticket of a push."""
        request = msgspec.structs.replace(request, num_local_hit=num_local_hit)
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, num_local_hit).num_tokens
        ticket: bytes | None = self.scheduler.update_state_after_alloc(request, [block_ids], num_tokens)
        self.step()
        return ticket

    def push(
        self, transfer_id: str, ticket: bytes | None, block_ids: Sequence[int], start: int, stop: int, *, last: bool
    ) -> None:
        """Confirm tokens [start, stop) of a prompt that is to be pushed."""
        request = view(transfer_id, kv="handoff", num_tokens=stop + 1, ticket=ticket)
        self.step([ConfirmedRange(request, start, stop, [block_ids], last)])

    def outcomes(self, transfer_id: str) -> list[TransferOutcome]:
        """How a transfer ended, per rank."""
        return [self._outcome(rank, (transfer_id, 1)) for rank in self.ranks]

    def outcome(self, transfer_id: str) -> TransferOutcome:
        """The first rank's failure, or how rank 0 ended."""
        outcomes = self.outcomes(transfer_id)
        return next((outcome for outcome in outcomes if outcome.code), outcomes[0])

    def _outcome(self, rank: Rank, key: tuple[str, int]) -> TransferOutcome:
        while True:
            results = rank.results()
            for found in results:
                if key in found:
                    return found[key]

    def close(self) -> None:
        """Shut down."""
        for rank in self.ranks:
            rank.close()


def view(transfer_id: str, *, kv: Any, num_tokens: int, **rest: Any) -> RequestView:
    """A request; all tokens but the last are wanted."""
    return RequestView(transfer_id, 1, transfer_id, kv, num_tokens, num_tokens - 1, (), **rest)


def awaiting(handoff: KVHandoff) -> RequestView:
    """The request that reads a hand-off."""
    return view(handoff.transfer_id, kv="await_peer", num_tokens=handoff.num_tokens + 1, handoff=handoff)


# --- in a process of its own --------------------------------------------------------------------------------------


class RemoteEngine(Forked):
    """An Engine in a process of its own: calls by name, arguments and answers as JSON."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(__file__, {"name": name, **arguments})
        self.name = name
        self.card = msgspec.msgpack.decode(bytes.fromhex(self.said), type=EngineCard)
        self.epoch = self.card.epoch

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the engine; arguments are plain values."""
        return self.ask(method, arguments, named)

    def meet(self, *cards: EngineCard) -> None:
        """These peers are there and no others."""
        self.call("meet", *[msgspec.msgpack.encode(card).hex() for card in cards])

    def hand_off(self, transfer_id: str, block_ids: Sequence[int], num_tokens: int) -> KVHandoff:
        """Pull: what prefill says of a prompt in these blocks."""
        data = bytes.fromhex(self.call("hand_off", transfer_id, list(block_ids), num_tokens))
        return msgspec.msgpack.decode(data, type=KVHandoff)

    def push(
        self, transfer_id: str, ticket: bytes | None, block_ids: Sequence[int], start: int, stop: int, *, last: bool
    ) -> None:
        """Confirm tokens [start, stop) of a prompt that is to be pushed."""
        self.call("push", transfer_id, (ticket or b"").hex(), list(block_ids), start, stop, last=last)


def _obey(engine: Engine, method: str, arguments: list[Any], named: dict[str, Any]) -> Any:
    worker = engine.ranks[0].worker
    match method:
        case "meet":
            engine.meet(*[msgspec.msgpack.decode(bytes.fromhex(card), type=EngineCard) for card in arguments])
        case "hand_off":
            return msgspec.msgpack.encode(engine.hand_off(*arguments)).hex()
        case "push":
            transfer_id, ticket, *rest = arguments
            engine.push(transfer_id, bytes.fromhex(ticket), *rest, **named)
        case "await_push":
            transfer_id, block_ids, num_tokens = arguments
            request = view(transfer_id, kv="await_peer", num_tokens=num_tokens + 1)
            return (engine.load(request, block_ids) or b"").hex()
        case "cancel":
            worker.cancel((arguments[0], 1), "receive")
        case "reuse":
            for block_id in arguments:
                engine.ranks[0].table.reuse(block_id)
        case "free_slots":
            return [rank.worker.rank.source.num_free_slots for rank in engine.ranks]
        case _:
            return getattr(engine, method)(*arguments, **named)
    return None


def _live(wanted: dict[str, Any], lines: TextIO, say: Callable[[Any], None]) -> None:
    """Obey lines until they end."""
    if "layout" in wanted:
        wanted["layout"] = msgspec.convert(wanted["layout"], KVLayout)
    engine = Engine(**wanted)
    say(msgspec.msgpack.encode(engine.card).hex())
    for line in lines:
        say(_obey(engine, *json.loads(line)))
    engine.close()


@contextmanager
def closing() -> Iterator[Any]:
    """make(kind, name, **arguments) -> Engine or RemoteEngine; all are closed at the end."""
    made: list[Any] = []

    def make(kind: type[Any], name: str, **arguments: Any) -> Any:
        made.append(kind(name, **arguments))
        return made[-1]

    try:
        yield make
    finally:
        for engine in reversed(made):
            engine.close()


if __name__ == "__main__":
    run_nursery(_live)
