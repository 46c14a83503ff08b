"""The digests of what is offered follow the offer: it is read meanwhile, and not confirmed before."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from nixl_engines import WAIT_S, Engine, closing, view
from nixl_rig import needs_nixl
from traffic import wait_until_true

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl import receiver
from pdkv.connectors.nixl.wire import OfferDigests, Wire
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.errors import KVCorrupted, TransferCancelled, TransferError
from pdkv.testing import VirtualClock
from pdkv.wire.kv import EngineCard

pytestmark = needs_nixl

SOURCE, TARGET, TOKENS = [3, 1, 7, 5], [9, 2, 4, 6], 64


@pytest.fixture(name="make")
def engines() -> Iterator[Any]:
    with closing() as make:
        yield make


def pair(make: Any, path: str = "arena", clock: Clock = MONOTONIC) -> tuple[Engine, Engine]:
    """(prefill, decode), which know each other; prefill has a prompt. `clock`: decode's."""
    options = {"mode": "push", "path": path, "transfer_timeout_s": "60"}
    prefill, decode = (make(Engine, name, options=options, clock=c) for name, c in (("p", MONOTONIC), ("d", clock)))
    prefill.meet(with_digests(decode))
    decode.meet(with_digests(prefill))
    prefill.fill_seeded(SOURCE, TOKENS, 1)
    return prefill, decode


def with_digests(engine: Engine) -> EngineCard:
    return msgspec.structs.replace(engine.card, kv_checksum="on")


def push(prefill: Engine, decode: Engine, key: str = "t", target: Sequence[int] = TARGET) -> None:
    ticket = decode.load(view(key, kv="await_peer", num_tokens=TOKENS + 1), target)
    prefill.push(key, ticket, SOURCE, 0, TOKENS, last=True)


def tamper(prefill: Engine, change: Callable[[OfferDigests], Sequence[Wire]]) -> None:
    """What prefill says of digests is said otherwise from now on."""
    endpoint = prefill.workers[0].endpoint
    send = endpoint.send

    def said(blob: Any, message: Wire) -> None:
        for other in change(message) if isinstance(message, OfferDigests) else [message]:
            send(blob, other)

    endpoint.send = said


def receiver_of(decode: Engine) -> Any:
    return decode.workers[0]._receiver


@pytest.fixture(name="hold")
def held_digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set no sender has made a digest; own ones are made."""
    go_on, finish = threading.Event(), PieceDigests.finish

    def finish_later(digests: PieceDigests) -> bytes:
        if not threading.current_thread().name.startswith("pdkv-nixl-io") or digests._digests is None:
            assert go_on.wait(WAIT_S)
        return finish(digests)

    monkeypatch.setattr(PieceDigests, "finish", finish_later)
    yield go_on
    go_on.set()


def test_an_offer_is_read_while_its_digests_are_made(make: Any, hold: threading.Event) -> None:
    """All of it is in the blocks before the sender has digested any, and nothing is confirmed."""
    prefill, decode = pair(make)
    push(prefill, decode)
    wait_until_true(lambda: not decode.wrong_tokens(TARGET, 0, TOKENS, 1), "the blocks have been read")
    assert not decode.workers[0].get_finished()
    assert prefill.workers[0].num_open_jobs == 1
    hold.set()
    assert decode.ended("t").code == ""
    assert prefill.ended("t").code == ""
    assert not receiver_of(decode)._senders


def test_a_receive_that_is_cancelled_while_digests_are_awaited_ends_at_once(
    make: Any, hold: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair(make)
    push(prefill, decode)
    wait_until_true(lambda: not decode.wrong_tokens(TARGET, 0, TOKENS, 1), "the blocks have been read")
    decode.workers[0].cancel(TransferKey("t", 1), "receive")
    assert decode.ended("t").code == TransferCancelled.code
    hold.set()
    wait_until_true(lambda: not receiver_of(decode)._senders, "the offer is answered")
    assert "damaged" not in caplog.text


def test_a_send_that_is_cancelled_after_it_was_read_still_says_its_digests(make: Any, hold: threading.Event) -> None:
    """What has been read while the offer stood is right; without digests it would pass for damaged."""
    prefill, decode = pair(make)
    push(prefill, decode)
    wait_until_true(lambda: any(arrival.read for arrival in opened(decode)), "the offer has been read")
    prefill.workers[0].cancel(TransferKey("t", 1), "send")
    hold.set()
    assert decode.ended("t").code == ""
    assert prefill.ended("t").code == TransferCancelled.code


def opened(decode: Engine) -> list[Any]:
    return [arrival for sender in receiver_of(decode)._senders.values() for arrival in sender.arrivals.values()]


LIES: dict[str, tuple[Callable[[OfferDigests], Sequence[Wire]], str]] = {
    "never": (lambda said: [], "came with 0 bytes of digests instead of 32"),
    "of another offer": (lambda said: [OfferDigests(said.offer + 1, said.digests)], "came with 0 bytes of digests"),
    "empty": (lambda said: [OfferDigests(said.offer, b"")], "came with 0 bytes of digests instead of 32"),
    "short": (lambda said: [OfferDigests(said.offer, said.digests[:-8])], "came with 24 bytes"),
    "damaged": (
        lambda said: [OfferDigests(said.offer, said.digests[:8] + b"\0" + said.digests[9:])],
        "1 hash blocks, the first from token 16 on",
    ),
}


@pytest.mark.parametrize(("lie", "path"), [*((lie, "arena") for lie in LIES), ("damaged", "ucx")])
def test_what_comes_without_its_digests_is_damaged(
    make: Any, lie: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where they differ; the next one is sound."""
    change, what = LIES[lie]
    clock = VirtualClock()
    prefill, decode = pair(make, path, clock)
    send = prefill.workers[0].endpoint.send
    tamper(prefill, change)
    with caplog.at_level(logging.WARNING):
        push(prefill, decode)
        if lie in ("never", "of another offer"):
            wait_until_true(lambda: any(arrival.read for arrival in opened(decode)), "the offer has been read")
            clock.advance(60.0)
        assert decode.ended("t").code == KVCorrupted.code
    assert f"transfer t, attempt 1: tokens [0, {TOKENS})" in caplog.text
    assert what in caplog.text
    assert prefill.ended("t").code
    wait_until_true(lambda: not receiver_of(decode)._senders, "the offer is answered")
    prefill.workers[0].endpoint.send = send
    push(prefill, decode, "again")
    assert decode.ended("again").code == ""


def test_what_one_sender_makes_a_receiver_keep_is_bounded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair(make)
    monkeypatch.setattr(receiver, "MAX_OPEN_BYTES", 40)
    push(prefill, decode)
    assert decode.ended("t").code == KVCorrupted.code
    monkeypatch.setattr(receiver, "MAX_OPEN_BYTES", 1)
    push(prefill, decode, "u")
    assert prefill.ended("u").code == TransferError.code
    decode.workers[0].cancel(TransferKey("u", 1), "receive")
    wait_until_true(lambda: not receiver_of(decode)._senders, "nothing is kept")


def test_digests_of_another_transfer_are_not_this_ones(make: Any) -> None:
    """Of the same tokens in the same places."""
    prefill, decode = pair(make)
    said: list[OfferDigests] = []

    def exchange(message: OfferDigests) -> list[Wire]:
        said.append(message)
        if len(said) < 2:
            return []
        return [OfferDigests(said[i].offer, said[1 - i].digests) for i in range(2)]

    tamper(prefill, exchange)
    push(prefill, decode, "t")
    push(prefill, decode, "u", [20, 21, 22, 23])
    codes: dict[tuple[str, int], str] = {}
    while len(codes) < 2:
        codes |= {key: outcome.code for found in decode.next_results() for key, outcome in found.items()}
    assert codes == {TransferKey("t", 1): KVCorrupted.code, TransferKey("u", 1): KVCorrupted.code}


def test_digests_that_come_twice_count_once(make: Any) -> None:
    """And what nobody has offered, or somebody else has, is nobody's."""
    prefill, decode = pair(make)
    other = make(Engine, "o", options={"mode": "push"})
    decode.meet(with_digests(prefill), with_digests(other))
    other.meet(with_digests(decode))
    to_decode = next(iter(prefill.workers[0].endpoint.peers.ranks_of("d", "1")))
    foreign = other.workers[0].endpoint

    def say_more(said: OfferDigests) -> list[Wire]:
        foreign.send(to_decode, OfferDigests(said.offer, bytes(32)))
        return [OfferDigests(said.offer + 7, bytes(32)), said, OfferDigests(said.offer, bytes(32))]

    tamper(prefill, say_more)
    push(prefill, decode)
    assert decode.ended("t").code == ""
    assert decode.wrong_tokens(TARGET, 0, TOKENS, 1) == []
    wait_until_true(lambda: not receiver_of(decode)._senders, "the offer is answered")


def test_an_offer_that_is_made_twice_is_read_once(make: Any, hold: threading.Event) -> None:
    prefill, decode = pair(make)
    endpoint, offers = prefill.workers[0].endpoint, []
    send = endpoint.send

    def note(blob: Any, message: Wire) -> None:
        offers.append((blob, message))
        send(blob, message)

    endpoint.send = note
    push(prefill, decode)
    wait_until_true(lambda: any(arrival.read for arrival in opened(decode)), "the offer has been read")
    send(*offers[0])
    inbox = decode.workers[0].endpoint._inbox
    wait_until_true(lambda: inbox.num_bad_messages == 1, "the second one is refused")
    hold.set()
    assert decode.ended("t").code == ""


def test_a_sender_that_is_gone_leaves_nothing_behind(make: Any, hold: threading.Event) -> None:
    """What was read and had no digests yet."""
    prefill, decode = pair(make)
    push(prefill, decode)
    wait_until_true(lambda: any(arrival.read for arrival in opened(decode)), "the offer has been read")
    decode.meet()
    assert not receiver_of(decode)._senders
    hold.set()
    decode.workers[0].cancel(TransferKey("t", 1), "receive")
    assert decode.ended("t").code == TransferCancelled.code
