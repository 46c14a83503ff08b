"""Requests leave suspects: a few at a time, the nearest deadline first, only to where there is room."""

import asyncio
import logging

import msgspec
import pytest
from dispatch_rig import System, collect, live
from scripted_engine import expected_output, make_request

from pdkv.config import RecoveryConfig
from pdkv.router.engines.health import IDLE_SILENT_TICKS, SILENT_TICKS, ProbeResult
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.moves import HELD_UP_S, MAX_TRIES, MIN_MOVES_PER_S, STAY_TICKS
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import Grammar
from pdkv.wire.messages import Abort, Beat, Failed, Finished, Submit, Tokens
from pdkv.wire.reports import BlockCounts, LoadReport, SourceCounts


def start_with_beats(system: System) -> None:
    system.dispatcher.connect()
    for name, backend in system.backends.items():
        backend.start(system.card(name, beats="ipc:///beats"))


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


def tick(system: System, *silent: str, ticks: int = SILENT_TICKS) -> None:
    """Time passes in which only the others speak."""
    for _ in range(ticks):
        for name, backend in system.backends.items():
            if name not in silent and backend.up:
                backend.say(Beat("e0", 0.0))
        system.dispatcher.look_after_engines()


@pytest.mark.parametrize("kind", ["pull", "push"])
@pytest.mark.parametrize("stopped", ["prefill-0", "decode-0"])
async def test_requests_of_a_stopped_engine_go_on_on_another(kind: str, stopped: str) -> None:
    """Router 2: nothing moved them, so that each missed its deadline."""
    async with live(System(2, 2, kind=kind), start=False) as system:
        start_with_beats(system)
        system.backends[stopped].held = True
        requests = [make_request(20 + i) for i in range(6)]
        generations = [system.dispatcher.start(request) for request in requests]
        await settle()
        tick(system, stopped)
        for generation, request in zip(generations, requests, strict=True):
            assert (await collect(generation))[0] == expected_output(request)
        assert system.dispatcher.mover.num_moved >= 2
        assert not any(e["ejected"] for e in system.dispatcher.topology()["engines"])
        system.backends[stopped].release()
        await settle()


async def test_what_a_revived_engine_still_says_is_dropped() -> None:
    async with live(System(0, 2), start=False) as system:
        start_with_beats(system)
        stopped = system.backends["any-0"]
        stopped.held = True
        request = make_request(20)
        generation = system.dispatcher.start(request)
        await settle()
        tick(system, "any-0")
        assert (await collect(generation))[0] == expected_output(request)
        assert [type(m) for m in stopped.engine.received[-2:]] == [Submit, Abort], "it will stop when it goes on"
        before = system.dispatcher.counters.dropped_messages
        key = (generation.request_id, 0)
        stopped.say(Tokens(*key, 0, [1, 2]), Finished(*key, "stop", SourceCounts()))
        assert system.dispatcher.counters.dropped_messages == before + 2
        stopped.release()
        await settle()


async def test_a_stopped_engine_whose_requests_have_left_gets_no_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdkv.router.generations.dispatch")
    async with live(System(0, 2), start=False) as system:
        start_with_beats(system)
        stopped = system.backends["any-0"]
        stopped.held = True
        generation = system.dispatcher.start(make_request(20))
        tick(system, "any-0")
        await collect(generation)
        tick(system, "any-0", ticks=1)
        assert system.dispatcher.topology()["engines"][0]["suspicion"] == "has been silent for 0.9 s"
        for _ in range(4):
            await collect(system.dispatcher.start(make_request(30)))
        assert len(stopped.heard(Submit)) == 1
        stopped.release()
        await settle()
        tick(system, ticks=1)
    texts = [record.getMessage() for record in caplog.records if record.name == "pdkv.router.generations.dispatch"]
    assert texts == ["any-0 is a suspect: it has been silent for 0.8 s", "any-0 is no longer a suspect"]


async def test_only_so_many_move_in_a_second_and_the_nearest_deadlines_first() -> None:
    async with live(System(0, 2), start=False) as system:
        start_with_beats(system)
        stopped, num = system.backends["any-0"], int(3 * MIN_MOVES_PER_S)
        for backend in system.backends.values():
            backend.held = True
        system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
        generations = [system.dispatcher.start(make_request(timeout_s=100.0 - i)) for i in range(num)]
        assert len(stopped.heard(Submit)) == num
        tick(system, "any-0")
        first = int(MIN_MOVES_PER_S)
        moved = [submit.request_id for submit in system.backends["any-1"].heard(Submit)]
        assert moved == [g.request_id for g in generations[::-1][:first]], "those that have the least time left"
        tick(system, "any-0", ticks=5)
        assert 4 <= len(system.backends["any-1"].heard(Submit)) - first <= 6, "a tenth of a second's in each tick"
        for backend in system.backends.values():
            backend.release()
        for generation in generations:
            await collect(generation)


async def test_nothing_moves_to_an_engine_without_free_blocks_nor_to_another_suspect() -> None:
    async with live(System(0, 2), start=False) as system:
        start_with_beats(system)
        for backend in system.backends.values():
            backend.held = True
        system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
        generation = system.dispatcher.start(make_request(20))
        full = BlockCounts(total=100, free=1, cached=1, active=98, leased=0, quarantined=0)
        system.backends["any-1"].say(LoadReport(waiting=0, running=3, blocks=full))
        tick(system, "any-0")
        assert not system.backends["any-1"].heard(Submit)
        free = BlockCounts(total=100, free=2, cached=1, active=97, leased=0, quarantined=0)
        system.backends["any-1"].say(LoadReport(waiting=0, running=3, blocks=free), Beat("e0", 9.0, 0.1))
        system.dispatcher.look_after_engines()
        assert not system.backends["any-1"].heard(Submit), "it is at a step that does not end"
        tick(system, "any-0", ticks=1)
        assert len(system.backends["any-1"].heard(Submit)) == 1
        for backend in system.backends.values():
            backend.release()
        await collect(generation)


async def test_requests_wait_for_a_sole_engine_that_is_stopped_instead_of_being_sent_into_the_void() -> None:
    async with live(System(1, 1), start=False) as system:
        start_with_beats(system)
        stopped = system.backends["decode-0"]
        stopped.held = True
        tick(system, "decode-0", ticks=4 * SILENT_TICKS)
        request = make_request(20)
        generation = system.dispatcher.start(request)
        await settle()
        assert len(system.dispatcher.recovery.parked) == 1
        assert not stopped.heard(Submit)
        stopped.held = False
        tick(system, ticks=1)
        assert (await collect(generation))[0] == expected_output(request)
        assert len(system.dispatcher.recovery.parked) == 0


async def test_a_sole_engine_that_is_late_gets_its_requests_all_the_same() -> None:
    async with live(System(0, 1), start=False) as system:
        start_with_beats(system)
        backend = system.backends["any-0"]
        backend.say(Beat("e0", 9.0, 0.1))
        request = make_request(20)
        generation = system.dispatcher.start(request)
        system.dispatcher.look_after_engines()
        assert (await collect(generation))[0] == expected_output(request)
        assert system.dispatcher.mover.num_moved == 0


async def test_requests_for_which_there_is_no_room_do_not_hold_up_the_others() -> None:
    """More than are looked at in a tick wait for the only prefill engine, and their deadlines are nearer."""
    async with live(System(1, 2), start=False) as system:
        start_with_beats(system)
        prefill, sides = system.backends["prefill-0"], [system.backends["decode-0"], system.backends["decode-1"]]
        for backend in sides:
            backend.held = True
        streams = [system.dispatcher.start(make_request(20 + i, timeout_s=600.0)) for i in range(6)]
        await settle()
        prefill.held = True
        waiting = [system.dispatcher.start(make_request(20, timeout_s=60.0)) for _ in range(MAX_TRIES + 6)]
        tick(system, "prefill-0", "decode-0")
        assert {g.flow.route.decode for g in streams} == {"decode-1"}
        assert system.dispatcher.mover.num_moved == 3
        for backend in (prefill, *sides):
            backend.release()
        for generation in (*streams, *waiting):
            await collect(generation)


async def test_a_stream_leaves_an_engine_that_was_given_another_role() -> None:
    """What counts is what the engine is to the stream: there is room to decode, although prefill has none."""
    async with live(System(1, 2), start=False) as system:
        start_with_beats(system)
        for name in ("decode-0", "decode-1"):
            system.backends[name].held = True
        generation = system.dispatcher.start(request := make_request(20, timeout_s=600.0))
        await settle()
        first = generation.flow.route.decode
        system.dispatcher.fleet.engines[first].role = "prefill"
        system.dispatcher.driver.engines_changed()
        full = BlockCounts(total=100, free=0, cached=0, active=100, leased=0, quarantined=0)
        system.backends["prefill-0"].say(LoadReport(waiting=0, running=3, blocks=full))
        tick(system, first)
        await settle()
        assert generation.flow.route.decode not in ("", first)
        for name in ("decode-0", "decode-1"):
            system.backends[name].release()
        assert (await collect(generation))[0] == expected_output(request)


async def start_on_the_last_engine(system: System) -> Generation:
    """A request that decode-0 has failed, on decode-1; decode-2 is not up."""
    system.dispatcher.connect()
    for name in ("prefill-0", "decode-0", "decode-1"):
        system.backends[name].start(system.card(name, beats="ipc:///beats"))
    system.backends["decode-0"].held = system.backends["decode-1"].held = True
    system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
    generation = system.dispatcher.start(make_request(20, timeout_s=600.0))
    await settle()
    first = system.backends["decode-0"]
    first.engine.tasks.clear()
    first.say(Failed(generation.request_id, generation.flow.attempt, "overloaded", "full", True))
    await settle()
    assert generation.flow.route.decode == "decode-1"
    return generation


async def test_a_request_that_could_not_be_moved_is_moved_when_another_engine_comes() -> None:
    async with live(System(1, 3, await_all=False), start=False) as system:
        generation = await start_on_the_last_engine(system)
        tick(system, "decode-1", ticks=2 * SILENT_TICKS)
        assert generation.flow.route.decode == "decode-1", "nobody else may have it"
        system.backends["decode-2"].start(system.card("decode-2", beats="ipc:///beats"))
        tick(system, "decode-1", ticks=1)
        assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert generation.flow.route.decode == "decode-2"
        system.backends["decode-0"].release()
        system.backends["decode-1"].release()
        await settle()


async def test_a_request_that_could_not_be_moved_is_tried_again_after_a_while() -> None:
    async with live(System(1, 3, await_all=False), start=False) as system:
        generation = await start_on_the_last_engine(system)
        tick(system, "decode-1", ticks=2 * SILENT_TICKS)
        assert generation.failures is not None
        generation.failures.failed.clear()  # which nobody tells
        tick(system, "decode-1", ticks=STAY_TICKS)
        assert generation.flow.route.decode == "decode-0"
        system.backends["decode-0"].release()
        system.backends["decode-1"].release()
        await collect(generation)


async def test_requests_that_could_not_be_moved_are_forgotten_when_they_have_ended() -> None:
    async with live(System(1, 3, await_all=False), start=False) as system:
        generation = await start_on_the_last_engine(system)
        tick(system, "decode-1", ticks=2 * SILENT_TICKS)
        assert set(system.dispatcher.mover._staying) == {generation.request_id}
        generation.abort()
        tick(system, "decode-1", ticks=STAY_TICKS)
        assert not system.dispatcher.mover._staying, "although decode-1 is silent as before"
        system.backends["decode-1"].release()
        await settle()


@pytest.mark.parametrize("takes_over", [True, False])
@pytest.mark.parametrize("stopped", ["prefill-0", "decode-0"])
async def test_requests_of_the_only_engine_of_a_role_move_to_those_that_take_over(
    stopped: str, takes_over: bool
) -> None:
    async with live(System(1, 1, recovery=RecoveryConfig(take_over=takes_over)), start=False) as system:
        start_with_beats(system)
        backend = system.backends[stopped]
        backend.held = True
        generation = system.dispatcher.start(request := make_request(20))
        await settle()
        assert generation.flow.depends_on(stopped)
        tick(system, stopped)
        await settle()
        assert system.dispatcher.mover.num_moved == takes_over
        if not takes_over:
            backend.release()
        assert (await collect(generation))[0] == expected_output(request)
        assert (generation.decode_engine == generation.prefill_engine != stopped) == takes_over
        backend.release()
        await settle()


async def test_requests_that_wait_for_a_silent_engine_begin_when_it_speaks_though_it_stays_a_suspect() -> None:
    async with live(System(1, 1), start=False) as system:
        start_with_beats(system)
        system.dispatcher.fleet.engines["prefill-0"].health.last_probe = ProbeResult(0.0, 5.0, "no answer within 5 s")
        tick(system, "prefill-0", ticks=IDLE_SILENT_TICKS)
        generation = system.dispatcher.start(request := make_request(20))
        await settle()
        assert len(system.dispatcher.recovery.parked) == 1
        tick(system, ticks=1)
        await settle()
        assert len(system.dispatcher.recovery.parked) == 0
        assert (await collect(generation))[0] == expected_output(request)


# --- grammars that hold engines up ------------------------------------------------------------------------------------


def shaped_request(pattern: str, num_prompt: int = 20) -> GenerateRequest:
    params = SamplingParams(max_tokens=8, seed=1, grammar=Grammar("regex", pattern))
    return msgspec.structs.replace(make_request(num_prompt), params=params)


class LateEngine:
    """Three engines, of which the first has all requests; then its step takes ever longer."""

    def __init__(self, system: System, *requests: GenerateRequest) -> None:
        self.system = system
        self.dispatcher = system.dispatcher
        start_with_beats(self.system)
        for backend in self.system.backends.values():
            backend.held = True
        policy, self.dispatcher.routes.policy = self.dispatcher.routes.policy, lambda snapshot: snapshot.engines[0]
        self.generations = [self.dispatcher.start(request) for request in requests]
        self.dispatcher.routes.policy = policy

    def be_late(self, *names: str, busy_s: float = 3.0, ticks: int = 10) -> None:
        for _ in range(ticks):
            for name, backend in self.system.backends.items():
                backend.say(Beat("e0", busy_s if name in names else 0.0, 0.1))
            self.dispatcher.look_after_engines()

    def submits(self, generation: Generation, *names: str) -> list[Submit]:
        """What these engines were asked of it."""
        heard = [m for name in names for m in self.system.backends[name].heard(Submit)]
        return [m for m in heard if m.request_id == generation.request_id]

    async def finish(self) -> None:
        """The engines go on, and all is answered."""
        self.be_late()
        for backend in self.system.backends.values():
            backend.release()
        for generation in self.generations:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)


async def test_a_grammar_that_holds_up_its_engine_is_not_carried_to_the_next() -> None:
    """F45: one request stopped every engine in turn, as it was moved off each that was late by its mask."""
    async with live(System(0, 3), start=False) as system:
        late = LateEngine(system, shaped_request("a+"), shaped_request("a+", 21), make_request(22))
        late.be_late("any-0")
        for shaped in late.generations[:2]:
            assert late.submits(shaped, "any-1", "any-2") == []
        assert len(late.submits(late.generations[2], "any-1", "any-2")) == 1
        await late.finish()


async def test_of_several_grammars_each_runs_alone_and_the_one_that_is_late_again_stays() -> None:
    async with live(System(0, 3), start=False) as system:
        late = LateEngine(system, *(shaped_request(f"{letter}+", 20 + i) for i, letter in enumerate("abc")))
        late.be_late("any-0")
        asked = [late.submits(generation, "any-1", "any-2") for generation in late.generations]
        assert [[m.trial_tokens for m in submits] for submits in asked] == [[2], [2], []]  # one for each engine
        late.be_late("any-0", "any-1")
        first = next(g for g in late.generations if g.flow.route.decode == "any-1")
        assert len(late.submits(first, "any-1", "any-2")) == 1
        await late.finish()


async def test_a_grammar_leaves_an_engine_that_is_late_for_longer_than_any_grammar_takes() -> None:
    async with live(System(0, 3), start=False) as system:
        late = LateEngine(system, shaped_request("a+"))
        late.be_late("any-0", busy_s=HELD_UP_S - 1.0)
        assert late.submits(late.generations[0], "any-1", "any-2") == []
        late.be_late("any-0", busy_s=HELD_UP_S + 1.0)
        assert [m.trial_tokens for m in late.submits(late.generations[0], "any-1", "any-2")] == [2]
        await late.finish()
