"""Engines over `nixl`, driven by hand: the connector's two sides without a model, in this process or one of its own.

What a token's KV must be is a function of its number, so that any process can say whether it is right.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import torch
from nursery import Forked, run_nursery
from push_rig import WAIT_S, RankedEngine
from push_rig import make_layout as rank_layout
from push_rig import view as any_view

from pdkv.connectors.base import ConfirmedRange, RequestView, TransferKey, TransferOutcome, TransferResults
from pdkv.wire.kv import EngineCard, KVHandoff, KVLayout

NUM_BLOCKS = 64
HEADS = 4


def make_layout(block_size: int = 16, tp: int = 1, **changes: Any) -> KVLayout:
    """A rank's layout."""
    return rank_layout(tp, block_size, **{"num_layers": 3, "num_kv_heads": HEADS // tp, **changes})


class Engine(RankedEngine):
    """The ranks of an engine, all in one process."""

    def __init__(
        self,
        name: str,
        *,
        block_size: int = 16,
        tp: int = 1,
        layout: KVLayout | None = None,
        options: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        layout = layout or make_layout(block_size, tp)
        super().__init__("nixl", name, tp=tp, layout=layout, **arguments, **options or {})
        self.card = msgspec.structs.replace(self.card, kv_checksum="off")  # nothing awaits what a test has not ordered

    def fill_seeded(self, block_ids: Sequence[int], num_tokens: int, seed: int) -> None:
        """Compute a prompt on all ranks: the KV of tokens [0, num_tokens) lies in these blocks."""
        self.fill(block_ids, self._expected(num_tokens, seed))

    def wrong_tokens(self, block_ids: Sequence[int], start: int, stop: int, seed: int) -> list[int]:
        """Which of tokens [start, stop) are not as computed, on any rank; block_ids[0] holds token 0."""
        found, expected = self.tokens(block_ids, start, stop), self._expected(stop, seed)[start:]
        return [start + i for i in (found != expected).flatten(1).any(1).nonzero().flatten().tolist()]

    def _expected(self, num_tokens: int, seed: int) -> torch.Tensor:
        """(tokens, layers, 2, heads, head size)."""
        layout = self.layout
        tokens = torch.arange(num_tokens).view(-1, 1, 1, 1, 1)
        layers = torch.arange(layout.num_layers * 2).view(layout.num_layers, 2, 1, 1)
        heads = torch.arange(layout.kv_heads_of_all_ranks).view(-1, 1)
        values = seed * 1009.0 + tokens + layers * 0.125 + heads * 0.03125
        return values.expand(-1, -1, -1, -1, layout.head_size).to(self.kv.dtype)

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
        self.step(confirmed=[ConfirmedRange(request, start, stop, [block_ids], last)])

    def outcomes(self, transfer_id: str, part: int = 0) -> list[TransferOutcome]:
        """How a transfer, or a part of one, ended on all ranks."""
        key = TransferKey(transfer_id, 1, part=part)
        while True:
            for kind in ("sending", "receiving"):
                if len(self.unread.get((kind, key), ())) == self.tp:
                    return self._reports.pop((kind, key))
            assert self.woken.acquire(timeout=WAIT_S), f"no outcome of {key}: {self.unread}"

    def ended(self, transfer_id: str, part: int = 0) -> TransferOutcome:
        """How a transfer ended: a rank's failure, or how rank 0 ended."""
        outcomes = self.outcomes(transfer_id, part)
        return next((outcome for outcome in outcomes if outcome.code), outcomes[0])

    def next_results(self) -> TransferResults:
        """The first rank's next results."""
        results: TransferResults
        while not (results := self.worker.get_finished()):
            assert self.woken.acquire(timeout=WAIT_S), "no result"
        self.scheduler.update_connector_output(results)
        return results

    def close(self) -> None:
        """Shut down, twice, and drop the last references to the arenas."""
        super().close()
        self.pools.clear()
        self.__dict__.pop("table", None)


def view(transfer_id: str, *, kv: Any, num_tokens: int, **rest: Any) -> RequestView:
    """A request; all tokens but the last are wanted."""
    return any_view(transfer_id, kv=kv, num_tokens=num_tokens, num_wanted=num_tokens - 1, **rest)


def awaiting(handoff: KVHandoff) -> RequestView:
    """The request that reads a hand-off."""
    return view(handoff.transfer_id, kv="await_peer", num_tokens=handoff.num_tokens + 1, handoff=handoff)


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
    worker = engine.worker
    match method:
        case "meet":
            engine.meet(*[msgspec.msgpack.decode(bytes.fromhex(card), type=EngineCard) for card in arguments])
        case "hand_off":
            return msgspec.msgpack.encode(engine.hand_off(*arguments)).hex()
        case "push":
            transfer_id, ticket, *rest = arguments
            engine.push(transfer_id, bytes.fromhex(ticket), *rest, **named)
        case "fill":
            engine.fill_seeded(*arguments)
        case "await_push":
            transfer_id, block_ids, num_tokens = arguments
            request = view(transfer_id, kv="await_peer", num_tokens=num_tokens + 1)
            return (engine.load(request, block_ids) or b"").hex()
        case "cancel":
            worker.cancel(TransferKey(arguments[0], 1), "receive")
        case "reuse":
            for block_id in arguments:
                engine.table.reuse(block_id)
        case "free_slots":
            return [len(worker.source._free) for worker in engine.workers]
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
