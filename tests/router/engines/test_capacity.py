"""What engines are given at once: enough to work on, and what is more waits in the router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dispatch_rig import System, collect, live
from scripted_engine import make_card, make_request

from pdkv.router.admission.admission_queue import Admission
from pdkv.router.engines.books import Entry
from pdkv.router.engines.capacity import LATELY_S, SEQS_AHEAD, Capacity
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.state import STEPS_AHEAD
from pdkv.router.generations.generation import Generation
from pdkv.wire.messages import Tokens
from pdkv.wire.reports import BlockCounts, LoadReport


def make_room(**card: Any) -> Any:
    fleet = Fleet()
    for role in ("prefill", "decode"):
        for i in range(2):
            fleet.add(f"{role}-{i}", role)
            fleet.came_up(f"{role}-{i}", make_card(f"{role}-{i}", role, max_num_batched_tokens=1000, **card))
    return fleet, Capacity(fleet)


def test_a_prefill_engine_is_given_two_steps_and_a_prompt_of_any_length_behind_them() -> None:
    fleet, room = make_room()
    room.enter(1)
    for name in ("prefill-0", "prefill-1"):
        assert room.free
        Entry(fleet.engines[name].books, STEPS_AHEAD * 1000 - 1, 0).enter()
    assert room.free
    for name in ("prefill-0", "prefill-1"):
        Entry(fleet.engines[name].books, 1, 0).enter()
    assert not room.free


def test_all_generations_need_no_more_kv_than_the_decode_engines_have() -> None:
    fleet, room = make_room()
    room.enter(2 * 100 * 16 - 1)
    assert room.free
    room.enter(1)
    assert not room.free
    fleet.went_down("decode-1", 0.0)
    room.leave(1)
    assert not room.free
    blocks = BlockCounts(total=100, free=0, cached=0, active=100, leased=0, quarantined=0)
    fleet.reported("decode-0", LoadReport(waiting=0, running=0, blocks=blocks))
    room.leave(2 * 100 * 16 - 1)
    room.enter(50 * 16)
    assert room.free
    quarantined = BlockCounts(total=100, free=50, cached=0, active=0, leased=0, quarantined=50)
    fleet.reported("decode-0", LoadReport(waiting=0, running=0, blocks=quarantined))
    assert not room.free


def test_where_prompts_share_their_kv_an_engine_that_says_so_is_given_more() -> None:
    """128 choices of one prompt need it once: what each would need alone says nothing."""
    fleet, room = make_room(max_num_seqs=1000)
    room.enter(10 * 100 * 16)
    assert not room.free
    for waiting, free, cached, expected in ((0, 30, 21, True), (1, 30, 21, False), (0, 30, 20, False)):
        blocks = BlockCounts(total=100, free=free, cached=cached, active=100 - free - cached, leased=0, quarantined=0)
        fleet.reported("decode-1", LoadReport(waiting=waiting, running=9, blocks=blocks))
        assert room.free is expected


def test_decode_engines_are_given_twice_what_fits_into_their_batches() -> None:
    _, room = make_room(max_num_seqs=3)
    for _ in range(SEQS_AHEAD * 2 * 3):
        assert room.free
        room.enter(1)
    assert not room.free


def test_a_tenant_with_many_generations_leaves_places_in_the_batches_to_those_with_few() -> None:
    """F38. Of eight places: "few" lately had two, so all others together have six, and none waits in an engine."""
    now = 0.0
    fleet, _ = make_room(max_num_seqs=4)
    room = Capacity(fleet, clock=lambda: now)
    room.enter(0)  # a probe
    for _ in range(12):
        room.enter(1, "many")
        assert not room.held_back()  # it is alone
    for _ in range(2):
        room.enter(1, "few")
        room.leave(1, "few")
        room.enter(1, "few")
    for number in range(12, 6, -1):
        assert list(room.held_back()) == ["many"], number
        room.leave(1, "many")
    assert list(room.held_back()) == ["many"]
    room.leave(1, "many")
    assert not room.held_back()  # five of its own, two, and one that is free
    room.enter(1, "many")
    for _ in range(2):
        room.leave(1, "few")
    assert list(room.held_back()) == ["many"]
    now += LATELY_S + 0.1
    assert not room.held_back()  # the other one has gone
    for _ in range(5):
        room.enter(1, "few")
    assert not room.held_back()  # both have many: turns decide
    room.leave(0, "few")


def test_what_comes_alone_has_room_whatever_it_needs() -> None:
    fleet, room = make_room()
    blocks = BlockCounts(total=100, free=0, cached=0, active=0, leased=0, quarantined=100)
    for name in ("decode-0", "decode-1"):
        fleet.reported(name, LoadReport(waiting=0, running=0, blocks=blocks))
    assert room.free
    room.enter(1)
    assert not room.free


def test_nothing_leaves_twice() -> None:
    """It would pass for room that is not there; nothing clamps the count."""
    _, room = make_room()
    room.enter(5)
    room.leave(5)
    with pytest.raises(AssertionError, match="more generations ended than began"):
        room.leave(0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_an_engine_of_a_role_there_is_no_room(role: str) -> None:
    fleet, room = make_room()
    for i in range(2):
        assert room.free
        fleet.went_down(f"{role}-{i}", 0.0)
    assert not room.free


@contextlib.asynccontextmanager
async def waiting_for_decode(system: System) -> AsyncIterator["asyncio.Future[Generation]"]:
    """A request that has begun to wait, since the only decode engine is gone."""
    admission = Admission(system.dispatcher)
    system.backends["decode-0"].die()
    with admission.arrive(admission.anonymous) as visit:
        visit.hold([20], 1, 5, stream=False)
        waiting = asyncio.ensure_future(visit.start(make_request(), lambda _: None))
        while not admission.num_waiting:
            await asyncio.sleep(0)
        yield waiting


async def test_requests_wait_for_the_return_of_a_role_that_is_gone() -> None:
    async with live(System(1, 1)) as system, waiting_for_decode(system) as waiting:
        system.backends["decode-0"].start(system.card("decode-0", epoch="e1"))
        await collect(await waiting)


async def test_engines_never_have_more_than_they_can_take_and_everything_is_served() -> None:
    """100 prompts of 500 tokens on an engine whose step has 1,000: never more than two steps and the prompt behind."""

    class Large(System):
        def card(self, name: str, **changes: Any) -> Any:
            sizes = {"max_num_batched_tokens": 1000, "num_blocks": 10_000, "max_num_seqs": 64}
            return super().card(name, **(sizes | changes))

    async with live(Large(1, 1)) as system:
        admission = Admission(system.dispatcher)
        books = system.dispatcher.fleet.engines["prefill-0"].books
        most = 0

        async def one() -> None:
            nonlocal most
            with admission.arrive(admission.anonymous) as visit:
                request = make_request(500, max_tokens=3)
                visit.hold([500], 1, 3, stream=False)
                generation = await visit.start(request, lambda _: None)
                most = max(most, books.prefill_tokens)
                await collect(generation)

        await asyncio.gather(*[one() for _ in range(100)])
        assert 2000 <= most < 2500
        assert system.dispatcher.counters.finished == 100
        assert (admission.num_pending, admission.pending_tokens, admission.num_waiting) == (0, 0, 0)
        assert (system.dispatcher.room.kv_tokens, system.dispatcher.room.num_generations) == (0, 0)


async def test_a_router_that_ends_tells_those_who_wait() -> None:
    async with live(System(1, 1)) as system, waiting_for_decode(system) as waiting:
        system.dispatcher.close()
        with pytest.raises(Exception, match="the router is shutting down"):
            await waiting


async def test_more_is_kept_free_for_an_output_that_is_longer_than_expected() -> None:
    async with live(System(1, 1)) as system:
        request = make_request(20, max_tokens=1000)
        system.backends["decode-0"].held = True
        generation = system.dispatcher.start_on("decode-0", request)
        room, books = system.dispatcher.room, system.dispatcher.fleet.engines["decode-0"].books
        assert (room.kv_tokens, books.kv_tokens) == (276, 276)
        number, attempt = generation.flow.request_id, generation.flow.attempt
        system.backends["decode-0"].say(Tokens(number, attempt, 0, list(range(300))))
        assert (room.kv_tokens, books.kv_tokens) == (532, 532)
        system.backends["decode-0"].say(Tokens(number, attempt, 300, list(range(600))))
        assert (room.kv_tokens, books.kv_tokens) == (1020, 1020)
        generation.abort()
        assert room.kv_tokens == 0
        system.backends["decode-0"].release()
