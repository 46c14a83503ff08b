"""A push is sent anew for every ticket while its lease lives: to a later attempt's reader, on whatever engine."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from nixl_rig import needs_nixl
from push_rig import PushEngine, full_kv, view

from pdkv.connectors.base import RequestView, TransferKey
from pdkv.connectors.nixl.connector import NixlConnector
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.errors import TransferCancelled
from pdkv.wire.kv import KVHandoff

SOURCE, TARGET = [9, 3, 1], [0, 1, 2]
NUM_TOKENS = 40

MakeEngine = Callable[[str], PushEngine]
TRANSPORTS: list[Any] = [
    pytest.param((P2PConnector, {}), id="p2p"),
    pytest.param((NixlConnector, {"mode": "push"}), id="nixl", marks=needs_nixl),
]


@pytest.fixture(name="make_engine", params=TRANSPORTS)
def engines(request: pytest.FixtureRequest, keep: Callable[..., Any]) -> MakeEngine:
    def make(name: str) -> PushEngine:
        connector, options = request.param
        return keep(PushEngine(connector, name, **options))

    return make


def reader(attempt: int) -> RequestView:
    """The request in an attempt to which attempt 1 handed it off."""
    handoff = KVHandoff("t", 1, "t", "p", "1", NUM_TOKENS, b"")
    return msgspec.structs.replace(view("t", kv="await_peer", num_tokens=NUM_TOKENS), attempt=attempt, handoff=handoff)


def serve(prefill: PushEngine, ticket: bytes | None) -> None:
    """The lease is shown with a ticket."""
    prefill.give(view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), SOURCE, NUM_TOKENS)


def test_each_ticket_is_served_from_the_same_blocks(make_engine: MakeEngine) -> None:
    prefill, first, second = (make_engine(name) for name in ("p", "d", "e"))
    prefill.meet(first.card, second.card)
    kv = full_kv(NUM_TOKENS, prefill.layout, seed=1)
    prefill.fill(SOURCE, kv)
    for attempt, decode in ((1, first), (2, second), (5, first)):
        decode.meet(prefill.card)
        decode.fill(TARGET, kv * 0 - 1)
        serve(prefill, decode.want(reader(attempt), TARGET))
        assert decode.outcome("receiving", TransferKey("t", attempt)).code == ""
        decode.check(TARGET, kv)
        assert prefill.outcome("sending", TransferKey("t", 1)).code == ""  # by the name that the engine knows
        prefill.collect()


def test_a_ticket_that_fails_does_not_spoil_the_next_one(make_engine: MakeEngine) -> None:
    """F5: the first reader is gone; what was meant for it is given up and not told as the second one's end."""
    prefill, first, second = (make_engine(name) for name in ("p", "d", "e"))
    prefill.meet(second.card)
    second.meet(prefill.card)
    first.meet(prefill.card)
    kv = full_kv(NUM_TOKENS, prefill.layout, seed=1)
    prefill.fill(SOURCE, kv)
    serve(prefill, first.want(reader(1), TARGET))
    serve(prefill, second.want(reader(2), TARGET))
    assert second.outcome("receiving", TransferKey("t", 2)).code == ""
    second.check(TARGET, kv)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""
    prefill.collect()
    assert not any(kind == "sending" and key == TransferKey("t", 1) for kind, key in prefill.unread)
    first.cancel(TransferKey("t", 1), "receive")
    assert first.outcome("receiving", TransferKey("t", 1)).code == TransferCancelled.code


def test_a_release_ends_what_is_under_way_for_the_last_ticket(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    prefill.fill(SOURCE, full_kv(NUM_TOKENS, prefill.layout, seed=1))
    serve(prefill, decode.want(reader(1), TARGET))
    assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""
    serve(prefill, decode.want(reader(2), TARGET))
    prefill.step(aborted=[TransferKey("t", 1)])
    prefill.collect()
    assert not prefill.scheduler._sending
    outcome = prefill.outcome("sending", TransferKey("t", 1, part=3))
    assert outcome.code in ("", TransferCancelled.code)  # its blocks come free
    decode.cancel(TransferKey("t", 2), "receive")
    decode.collect()
