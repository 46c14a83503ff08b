"""Requests whose engines die, fail or are left: they go on elsewhere, wait for an engine, or are given up."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
import pytest
from coroutines import clock
from dispatch_rig import PoisonedBackend, System, check_right, collect, live, until
from scripted_engine import ORDERS_OF, STOP, Task, expected_output, make_request

from pdkv.config import RecoveryConfig
from pdkv.errors import (
    ConfigError,
    EngineDied,
    EngineUnavailable,
    KillsEngines,
    RequestFailed,
    RequestTimeout,
    ServerBusy,
)
from pdkv.router.generations.generation import Generation
from pdkv.router.request import GenerateRequest
from pdkv.testing import VirtualLoop
from pdkv.wire.kv import EngineCard, Order
from pdkv.wire.messages import Abort, Beat, Failed, Loaded, Release, Submit
from pdkv.wire.reports import SourceCounts

event_loop = VirtualLoop

LEGAL: list[tuple[str, Order]] = [(kind, order) for kind, orders in ORDERS_OF.items() for order in orders]


def long_request(num_tokens: int = 8, **changes: object) -> GenerateRequest:
    """A request that no stop token ends early."""
    sizes = range(20, 400)
    size = next(n for n in sizes if STOP not in expected_output(make_request(n, num_tokens)))
    return make_request(size, num_tokens, **changes)


def is_blamed(system: System, engine: str) -> bool:
    """Whether a failure was held against an engine."""
    return system.dispatcher.fleet.engines[engine].score._failing > 0


def stop_where(system: System, stops: Callable[[Task], bool]) -> Callable[[], None]:
    """Engines that decode do nothing for tasks of which this holds, until the returned function is called."""
    gated = [backend for name, backend in system.backends.items() if not name.startswith("prefill")]
    for backend in gated:
        can_step = backend.engine._can_step
        backend.engine._can_step = lambda task, can_step=can_step: can_step(task) and not stops(task)  # type: ignore

    def go_on() -> None:
        for backend in gated:
            vars(backend.engine).pop("_can_step", None)
            backend.pump()

    return go_on


async def kill_at(system: System, generation: Generation, num_tokens: int) -> str:
    """Kill the engine that decodes when so many tokens are out, and not one more; returns its name."""
    go_on = stop_where(system, lambda task: len(task.output) >= num_tokens)
    await until(lambda: len(generation.flow.output_token_ids) == num_tokens and generation.decode_engine != "")
    victim = generation.decode_engine
    system.backends[victim].die()
    go_on()
    return victim


def submits(system: System, request_id: str, kv: str) -> list[Submit]:
    """All Submits of a request that engines now alive have got."""
    return [m for b in system.backends.values() for m in b.heard(Submit) if (m.request_id, m.kv) == (request_id, kv)]


# --- before the first token -------------------------------------------------------------------------------------------


async def test_a_request_is_tried_on_each_engine_once() -> None:
    async with live(System(3, 1)) as system:
        for backend in system.backends.values():
            backend.held = True
        generation = system.dispatcher.start(make_request())
        asked = []
        for attempt in range(3):
            name = generation.flow.route.prefill
            asked.append(name)
            system.backends[name].engine.tasks.clear()
            system.backends[name].say(Failed(generation.request_id, attempt, "overloaded", f"no room on {name}", True))
        assert sorted(asked) == ["prefill-0", "prefill-1", "prefill-2"]
        with pytest.raises(RequestFailed, match=f"no room on {asked[-1]}"):
            await collect(generation)
        assert system.dispatcher.counters.retried == 3  # the last of them found no engine


async def test_engines_that_have_too_much_to_do_are_not_blamed_and_the_client_may_come_again() -> None:
    async with live(System(2, 1)) as system:
        for backend in system.backends.values():
            backend.held = True
        generation = system.dispatcher.start(make_request())
        for attempt in range(2):
            backend = system.backends[generation.flow.route.prefill]
            backend.engine.tasks.clear()
            backend.say(Failed(generation.request_id, attempt, "server_busy", "too many grammars wait", True))
        with pytest.raises(ServerBusy, match="too many grammars wait"):
            await collect(generation)
        assert not is_blamed(system, "prefill-0")
        assert not is_blamed(system, "prefill-1")


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_no_request_is_tried_again_more_often_than_its_limit(limit: int) -> None:
    async with live(System(5, 1, recovery=RecoveryConfig(retry_limit=limit))) as system:
        for backend in system.backends.values():
            backend.held = True
        generation = system.dispatcher.start(make_request())
        for attempt in range(limit + 1):
            assert not generation.flow.ended
            backend = system.backends[generation.flow.route.prefill]
            backend.engine.tasks.clear()
            backend.say(Failed(generation.request_id, attempt, "overloaded", "no room", retryable=True))
            assert system.dispatcher.counters.retried == min(attempt + 1, limit)
        with pytest.raises(RequestFailed, match="no room"):
            await collect(generation)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="migration_limit: a whole number of at least 0 was expected, got -1"):
        RecoveryConfig(migration_limit=-1)


# --- behind it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "order"), LEGAL)
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
async def test_a_stream_goes_on_behind_its_tokens_when_decode_dies(kind: str, order: Order, num_tokens: int) -> None:
    async with live(System(2, 2, kind=kind, orders=[order])) as system:
        request = long_request(8)
        generation = system.dispatcher.start(request)
        victim = await kill_at(system, generation, num_tokens)
        tokens, last = await collect(generation)
        assert tokens == expected_output(request)
        assert last.finish_reason == "length"
        assert generation.decode_engine != victim
        assert system.dispatcher.counters.migrated == 1
        assert system.dispatcher.counters.retried == 0
        assert generation.sources == SourceCounts(computed=len(request.prompt_token_ids))


async def test_an_aggregated_engine_s_streams_go_on_on_another_one() -> None:
    async with live(System(0, 2)) as system:
        requests = [long_request(8) for _ in range(4)]
        generations = [system.dispatcher.start(request) for request in requests]
        await until(lambda: len(generations[0].flow.output_token_ids) >= 3)
        system.backends[generations[0].decode_engine].die()
        for generation, request in zip(generations, requests, strict=True):
            assert (await collect(generation))[0] == expected_output(request)
        assert system.dispatcher.counters.failed == {}


async def test_without_migrations_a_stream_fails_at_once() -> None:
    async with live(System(1, 2, recovery=RecoveryConfig(migration_limit=0))) as system:
        generation = system.dispatcher.start(long_request())
        victim = await kill_at(system, generation, 3)
        with pytest.raises(EngineDied, match=f"engine {victim} died"):
            await collect(generation)
        assert system.dispatcher.counters.migrated == 0


@pytest.mark.parametrize(("kind", "order"), LEGAL)
async def test_a_prompt_that_was_handed_off_is_run_once_although_decode_dies_before_its_load(
    kind: str, order: Order
) -> None:
    async with live(System(1, 2, kind=kind, orders=[order])) as system:
        request = long_request()
        go_on = stop_where(system, lambda task: task.stage == "loading")
        generation = system.dispatcher.start(request)
        flow = generation.flow
        await until(lambda: flow._handoff is not None)
        assert flow.load is None  # it has not been loaded yet
        victim = generation.decode_engine
        system.backends[victim].die()
        go_on()
        assert (await collect(generation))[0] == expected_output(request)
        assert len(submits(system, generation.request_id, "handoff")) == 1
        (heir,) = {"decode-0", "decode-1"} - {victim}
        readers = [m for m in system.backends[heir].heard(Submit) if m.request_id == generation.request_id]
        assert [(m.attempt, m.kv) for m in readers] == [(1, "await_peer")]
        assert readers[0].handoff is not None
        assert readers[0].handoff.attempt == 0


async def test_a_load_that_decode_gives_up_is_tried_on_another_one_from_the_same_hand_off() -> None:
    """Load failure policy "fail"."""
    async with live(System(1, 2)) as system:
        for name in ("decode-0", "decode-1"):
            system.backends[name].held = True
        request = long_request()
        generation = system.dispatcher.start(request)
        await until(lambda: generation.decode_engine != "")
        first = system.backends[generation.decode_engine]
        first.engine.tasks.clear()
        first.say(
            Loaded(generation.request_id, 0, ok=False, code="transfer_timeout"),
            Failed(generation.request_id, 0, "transfer_timeout", "the KV of the prompt could not be loaded", True),
        )
        assert generation.decode_engine not in ("", first.name)
        for name in ("decode-0", "decode-1"):
            system.backends[name].release()
        assert (await collect(generation))[0] == expected_output(request)
        assert len(submits(system, generation.request_id, "handoff")) == 1
        assert [type(m) for m in system.backends["prefill-0"].heard(Release)] == [Release]


async def test_a_bad_decode_engine_costs_prefill_nothing() -> None:
    """Its failures are its own: no mark keeps requests from the prefill engine."""
    async with live(System(1, 2)) as system:
        bad = system.backends["decode-0"]
        bad.held = True
        for _ in range(10):
            generation = system.dispatcher.start(long_request())
            await until(lambda: generation.decode_engine != "")  # noqa: B023
            if generation.decode_engine == "decode-0":
                bad.engine.tasks.clear()
                bad.say(
                    Loaded(generation.request_id, 0, ok=False, code="kv_not_found"),
                    Failed(generation.request_id, 0, "kv_not_found", "nothing is there", True),
                )
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert not is_blamed(system, "prefill-0")
        assert set(system.dispatcher.fleet.pairs) == {("prefill-0", "decode-0")}
        assert system.dispatcher.counters.faults == {"pair": 1}
        assert {generation.flow.prompt_engine for _ in "x"} == {"prefill-0"}


@pytest.mark.parametrize(("kind", "order"), LEGAL)
async def test_who_takes_over_is_chosen_like_any_other_decode_engine(kind: str, order: Order) -> None:
    """Router 14: it was any engine that was ready, whatever its score, its pairs and its orders."""
    async with live(System(2, 4, kind=kind, orders=[order], clock=lambda: 0.0)) as system:
        fleet, request = system.dispatcher.fleet, long_request()
        fleet.engines["decode-0"].score.eject(0.0)
        fleet.pairs.loaded("prefill-0", "decode-1", False, 0.0)
        generation = system.dispatcher.start(request)
        victim = await kill_at(system, generation, 2)
        assert (await collect(generation))[0] == expected_output(request)
        heir, flow = generation.decode_engine, generation.flow
        assert victim in ("decode-2", "decode-3")
        assert heir not in ("decode-0", victim)
        assert (flow.route.prefill, heir) != ("prefill-0", "decode-1")
        assert generation.num_attempts == 2


@pytest.mark.parametrize("kind", ["pull", "store"])
async def test_prompts_that_are_still_being_run_are_no_load_of_decode(kind: str) -> None:
    async with live(System(1, 2, kind=kind)) as system:
        system.backends["prefill-0"].held = True
        generations = [system.dispatcher.start(make_request()) for _ in range(6)]
        in_flight = {e.name: e.books.requests for e in system.dispatcher.engines()}
        assert in_flight == {"prefill-0": 6, "decode-0": 0, "decode-1": 0}
        assert {g.decode_engine for g in generations} == {""}
        system.backends["decode-0"].die()
        system.backends["prefill-0"].release()
        for generation in generations:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
            assert generation.decode_engine == "decode-1"
        assert (system.dispatcher.counters.retried, system.dispatcher.counters.migrated) == (0, 0)


# --- engines that are left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "order"), LEGAL)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_generation_moves_away_from_an_engine_that_hangs(kind: str, order: Order, side: str) -> None:
    async with live(System(2, 2, kind=kind, orders=[order])) as system:
        request = long_request()
        held = [backend for name, backend in system.backends.items() if name.startswith(side)]
        for backend in held:
            backend.held = True
        generation = system.dispatcher.start(request)
        if side == "decode" and order == "prefill_first":
            await until(lambda: generation.decode_engine != "")
        flow = generation.flow
        hanging = flow.route.prefill if side == "prefill" and flow.runs_on(flow.route.prefill) else flow.route.decode
        if side == "prefill" and hanging == flow.route.decode:
            await until(lambda: flow.runs_on(flow.route.prefill))
            hanging = flow.route.prefill
        assert system.dispatcher.driver.move(generation, "silent for 3 s", away_from=hanging)
        assert hanging not in flow.route[:2]
        for backend in held:
            if backend.name != hanging:
                backend.release()
        assert (await collect(generation))[0] == expected_output(request)
        assert len(system.backends[hanging].heard(Abort)) == 1
        assert not is_blamed(system, hanging)  # whose fault it is, health knows
        system.backends[hanging].release()  # what it still says is dropped


async def test_nobody_moves_where_there_is_no_other_engine_or_behind_the_end() -> None:
    async with live(System(1, 1)) as system:
        generation = system.dispatcher.start(long_request())
        assert not system.dispatcher.driver.move(generation, "slow")
        await until(lambda: generation.decode_engine != "")
        assert not system.dispatcher.driver.move(generation, "slow", away_from="decode-0")
        assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert not system.dispatcher.driver.move(generation, "slow")
        assert system.dispatcher.counters.migrated == 0


@pytest.mark.parametrize("why", ["draining", "stuck"])
async def test_an_engine_that_was_left_may_be_asked_again_when_it_is_well(why: str) -> None:
    async with live(System(1, 2)) as system:
        dispatcher = system.dispatcher
        go_on = stop_where(system, lambda task: len(task.output) >= 3)
        generation = dispatcher.start(long_request())
        await until(lambda: len(generation.flow.output_token_ids) == 3)
        left = generation.decode_engine
        (heir,) = {"decode-0", "decode-1"} - {left}
        engine = dispatcher.fleet.engines[left]
        if why == "draining":
            engine.draining = True
        else:
            engine.health.beat(Beat("e0", busy_s=1000.0, predicted_s=0.01))
            assert left in dispatcher.fleet.suspects
        assert dispatcher.driver.move(generation, why, away_from=left, spared=why == "draining")
        await until(lambda: generation.decode_engine == heir)
        system.backends[heir].die()
        await until(lambda: len(dispatcher.recovery.parked) == 1)  # nothing is well
        engine.draining = False
        engine.health.beat(Beat("e0", 0.0))
        dispatcher.driver.engines_changed()
        await until(lambda: generation.decode_engine == left)
        go_on()
        assert (await collect(generation))[0] == expected_output(generation.flow.request)


class UnequalDraws(System):
    """decode-1 draws with another version than all others."""

    def card(self, name: str, **changes: Any) -> EngineCard:
        return super().card(name, draws=1 if name == "decode-1" else 2, **changes)


@pytest.mark.parametrize("how", ["death", "move"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_only_greedy_streams_migrate_to_an_engine_that_draws_otherwise(temperature: float, how: str) -> None:
    async with live(UnequalDraws(1, 2)) as system:
        dispatcher, request = system.dispatcher, long_request()
        params = msgspec.structs.replace(request.params, temperature=temperature)
        request = msgspec.structs.replace(request, params=params)
        dispatcher.fleet.engines["decode-1"].draining = True
        go_on = stop_where(system, lambda task: len(task.output) >= 3)
        generation = dispatcher.start(request)
        await until(lambda: len(generation.flow.output_token_ids) == 3 and generation.decode_engine == "decode-0")
        dispatcher.fleet.engines["decode-1"].draining = False
        if how == "move":
            assert dispatcher.driver.move(generation, "slow", away_from="decode-0") == (temperature == 0.0)
        else:
            system.backends["decode-0"].die()
            await until(lambda: generation.decode_engine == "decode-1" or len(dispatcher.recovery.parked) == 1)
        assert len(dispatcher.recovery.parked) == (how == "death" and temperature > 0.0)
        go_on()
        if len(dispatcher.recovery.parked):
            system.backends["decode-0"].start(system.card("decode-0", epoch="e1"))  # back, and draws as it did
        expected = "decode-1" if temperature == 0.0 else "decode-0"
        await until(lambda: generation.decode_engine == expected)
        assert (await collect(generation))[0] == expected_output(request)


# --- nothing there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "order"), LEGAL)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_wait_for_a_role_that_is_gone(kind: str, order: Order, role: str) -> None:
    async with live(System(2, 2, kind=kind, orders=[order])) as system:
        running = [system.dispatcher.start(long_request()) for _ in range(4)]
        await until(lambda: len(running[0].flow.output_token_ids) >= 2)
        gone = [name for name in system.backends if name.startswith(role)]
        for name in gone:
            system.backends[name].die()
        waiting = [system.dispatcher.start(long_request()) for _ in range(4)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert all(not generation.flow.ended for generation in waiting)
        assert len(system.dispatcher.recovery.parked) >= 4
        for name in gone:
            system.backends[name].start(system.card(name, epoch="e1"))
        for generation in running + waiting:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert system.dispatcher.counters.failed == {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_only_engine_is_asked_again_when_its_connection_was_cut(role: str) -> None:
    """It is the same incarnation, and has failed nobody."""
    async with live(System(1, 1)) as system:
        generation = system.dispatcher.start(long_request())
        if role == "decode":
            await until(lambda: len(generation.flow.output_token_ids) >= 3)
        system.backends[f"{role}-0"].die()
        system.backends[f"{role}-0"].start(system.card(f"{role}-0"))
        assert (await collect(generation))[0] == expected_output(generation.flow.request)


async def test_a_hand_off_waits_for_a_decode_engine_and_is_not_run_again() -> None:
    async with live(System(1, 1)) as system:
        system.backends["prefill-0"].held = True
        generation = system.dispatcher.start(long_request())
        system.backends["decode-0"].die()
        system.backends["prefill-0"].release()
        await until(lambda: generation.flow.awaits_decode)
        assert len(system.dispatcher.recovery.parked) == 1
        assert {e.name: e.books.requests for e in system.dispatcher.engines()} == {"prefill-0": 0, "decode-0": 0}
        system.backends["decode-0"].start(system.card("decode-0", epoch="e1"))
        assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert len(submits(system, generation.request_id, "handoff")) == 1


async def test_who_waits_is_bounded_by_its_deadline_and_may_be_aborted() -> None:
    async with live(System(1, 1)) as system:
        system.backends["decode-0"].die()
        late, aborted = (system.dispatcher.start(make_request(timeout_s=t)) for t in (5.0, 60.0))
        with pytest.raises(RequestTimeout, match="longer than 5 s; it was last waiting for an engine that was gone"):
            await clock().passing(collect(late))
        aborted.abort()
        assert len(system.dispatcher.recovery.parked) == 0


async def test_nobody_waits_for_what_cannot_come() -> None:
    """An engine that failed the request and lives is not coming back."""
    async with live(System(0, 1)) as system:
        system.backends["any-0"].held = True
        generation = system.dispatcher.start(make_request())
        system.backends["any-0"].engine.tasks.clear()
        system.backends["any-0"].say(Failed(generation.request_id, 0, "overloaded", "no room", retryable=True))
        with pytest.raises(RequestFailed, match="no room"):
            await collect(generation)


async def test_a_fleet_that_was_never_ready_is_unavailable() -> None:
    async with live(System(1, 1), start=False) as system:
        system.dispatcher.connect()
        with pytest.raises(EngineUnavailable, match="no prefill engine is ready"):
            system.dispatcher.start(make_request())


@pytest.mark.parametrize("gone", ["prefill", "decode"])
async def test_engines_of_the_other_role_take_over_where_that_is_asked_for(gone: str) -> None:
    async with live(System(1, 1, recovery=RecoveryConfig(take_over=True))) as system:
        running = system.dispatcher.start(long_request())
        await until(lambda: len(running.flow.output_token_ids) >= 2)
        system.backends[f"{gone}-0"].die()
        generation = await check_right(system, long_request())
        assert gone not in generation.decode_engine
        assert generation.prefill_engine == generation.decode_engine
        assert (await collect(running))[0] == expected_output(running.flow.request)
        num_paces = system.dispatcher.fleet.engines["prefill-0"].score.num_paces
        assert num_paces == 1, "its tokens are not compared with prompts"


async def test_a_prefill_engine_decodes_what_it_has_handed_off_where_it_takes_over() -> None:
    async with live(System(1, 1, recovery=RecoveryConfig(take_over=True))) as system:
        system.backends["prefill-0"].held = True
        generation = system.dispatcher.start(long_request())
        system.backends["decode-0"].die()
        system.dispatcher.fleet.engines["decode-0"].num_deaths = 1
        system.backends["prefill-0"].release()
        assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert generation.decode_engine == "prefill-0"
        assert len(system.backends["prefill-0"].heard(Release)) == 1


# --- unequal lengths ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def unequal(num_decode: int, prefill_len: int, *decode_lens: int, **options: Any) -> AsyncIterator[System]:
    """One prefill engine and so many decode engines, of these lengths in tokens; the last one's holds for the rest."""
    async with live(System(1, num_decode, **options), start=False) as system:
        system.dispatcher.connect()
        lengths = {"prefill-0": prefill_len} | {f"decode-{i}": decode_lens[-1] for i in range(num_decode)}
        lengths |= {f"decode-{i}": length for i, length in enumerate(decode_lens)}
        for name, length in lengths.items():
            system.backends[name].start(system.card(name, max_model_len=length))
        yield system


@pytest.mark.parametrize("num_out", [9, 10, 30])
async def test_a_stream_beyond_prefill_s_length_is_taken_over_by_another_decode_engine(num_out: int) -> None:
    """A prompt of 20 tokens and so many behind it, with a prefill engine for 30."""
    async with unequal(2, 30, 100) as system:
        assert system.dispatcher.max_model_len == 100
        generation = system.dispatcher.start(long_request(60))
        num_prompt = len(generation.flow.request.prompt_token_ids)
        assert num_prompt == 20
        victim = await kill_at(system, generation, num_out)
        tokens, last = await collect(generation)
        assert (tokens, last.finish_reason) == (expected_output(generation.flow.request), "length")
        assert {generation.decode_engine, victim} == {"decode-0", "decode-1"}
        fits = num_prompt + num_out < 30
        assert len(submits(system, generation.request_id, "handoff")) == 1 + fits
        assert generation.flow.route.aggregated == (not fits)


async def test_a_stream_beyond_prefill_s_length_leaves_engines_that_drain() -> None:
    async with unequal(3, 30, 100) as system:
        generation = system.dispatcher.start(long_request(60))
        engines = []
        for num_out in (20, 30, 40):
            go_on = stop_where(system, lambda task, most=num_out: len(task.output) >= most)  # type: ignore[misc]
            await until(lambda most=num_out: len(generation.flow.output_token_ids) == most)  # type: ignore[misc]
            engines.append(generation.decode_engine)
            system.dispatcher.fleet.engines[generation.decode_engine].draining = True
            assert system.dispatcher.driver.move(generation, "it drains", spared=True) == (num_out < 40)
            go_on()
        assert sorted(engines) == ["decode-0", "decode-1", "decode-2"]
        assert (await collect(generation))[0] == expected_output(generation.flow.request)


async def test_a_prompt_beyond_prefill_s_length_is_run_by_decode() -> None:
    async with unequal(1, 30, 100) as system:
        for num_prompt, is_alone in ((28, False), (29, False), (30, True), (90, True)):
            generation = await check_right(system, make_request(num_prompt, max_tokens=5))
            assert generation.flow.route.aggregated == is_alone
            assert generation.decode_engine == "decode-0"
        one = await check_right(system, make_request(29, max_tokens=1))
        assert one.flow.route.prefill == "prefill-0"


@pytest.mark.parametrize("take_over", [False, True])
async def test_a_stream_waits_for_an_engine_of_its_length_and_no_shorter_one_cuts_it(take_over: bool) -> None:
    """Neither a shorter decode engine, nor a prefill engine that would take over."""
    async with unequal(2, 30, 100, 40, recovery=RecoveryConfig(take_over=take_over)) as system:
        assert system.dispatcher.max_model_len == 40, "what each of them takes"
        streams = [system.dispatcher.start(long_request(60)) for _ in range(2)]
        assert await kill_at(system, streams[0], 5) == "decode-0"
        await until(lambda: len(system.dispatcher.recovery.parked) == 2)
        await check_right(system, make_request(20, max_tokens=10))
        system.backends["decode-0"].start(system.card("decode-0", epoch="e1", max_model_len=100))
        assert (await collect(streams[0]))[0] == expected_output(streams[0].flow.request)
        assert (await collect(streams[1]))[0] == expected_output(streams[1].flow.request)


async def test_no_stream_waits_where_all_engines_are_too_short_for_it() -> None:
    async with unequal(1, 30, 100) as system:
        stream = system.dispatcher.start(long_request(60))
        await kill_at(system, stream, 5)
        system.backends["decode-0"].start(system.card("decode-0", epoch="e1", max_model_len=40))
        with pytest.raises(EngineDied):
            await collect(stream)


async def hand_off_to_nobody(system: System) -> tuple[list[Generation], list[Generation]]:
    """Four prompts in a fleet whose only decode engine is gone; returns those of prefill-0 and those of prefill-1."""
    generations = [system.dispatcher.start(long_request()) for _ in range(4)]
    system.backends["decode-0"].die()
    await until(lambda: all(g.flow.awaits_decode for g in generations))
    by_engine = [[g for g in generations if g.flow.route.prefill == name] for name in ("prefill-0", "prefill-1")]
    assert [len(found) for found in by_engine] == [2, 2]
    return by_engine[0], by_engine[1]


async def test_a_hand_off_of_an_engine_that_now_decodes_alone_is_run_elsewhere() -> None:
    async with live(System(2, 1)) as system:
        own, others = await hand_off_to_nobody(system)
        flipped = system.dispatcher.fleet.engines["prefill-0"]
        flipped.role = flipped.assigned = "decode"
        system.dispatcher.driver.engines_changed()
        for generation in own + others:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
            assert generation.decode_engine == "prefill-0"
        assert len(submits(system, others[0].request_id, "handoff")) == 1
        assert len(submits(system, own[0].request_id, "handoff")) == 2


async def test_who_can_run_does_not_wait_behind_one_who_cannot() -> None:
    async with live(System(2, 1)) as system:
        own, others = await hand_off_to_nobody(system)
        engines = system.dispatcher.fleet.engines
        engines["prefill-0"].role = engines["prefill-0"].assigned = "decode"
        engines["prefill-1"].draining = True  # and so nobody runs the prompts of prefill-0 once more
        system.dispatcher.driver.engines_changed()
        for generation in others:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
        assert len(system.dispatcher.recovery.parked) == len(own)
        engines["prefill-1"].draining = False
        system.dispatcher.driver.engines_changed()
        for generation in own:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)


# --- requests that kill engines ---------------------------------------------------------------------------------------

POISON = 41
"""Length of a prompt that ends the engine that computes it."""


def poisoned(num_prefill: int, num_decode: int, is_poison: Callable[[Task], bool], **options: Any) -> System:
    system = System(num_prefill, num_decode, backend=PoisonedBackend, **options)
    for backend in system.backends.values():
        cast(PoisonedBackend, backend).is_poison = is_poison
    return system


def deaths(system: System) -> dict[str, int]:
    return {name: cast(PoisonedBackend, b).num_deaths for name, b in system.backends.items()}


@pytest.mark.parametrize(
    ("num_prefill", "num_decode"), [(0, 2), (0, 3), (2, 2), (1, 1)], ids=["2 alike", "3 alike", "2P2D", "1P1D"]
)
async def test_of_a_poison_prompt_and_50_innocents_it_alone_fails(num_prefill: int, num_decode: int) -> None:
    """F28."""
    async with live(
        poisoned(num_prefill, num_decode, lambda task: len(task.submit.prompt_token_ids) == POISON)
    ) as system:
        innocents = [system.dispatcher.start(make_request(50 + i, 12)) for i in range(25)]
        await asyncio.sleep(0)
        poison = system.dispatcher.start(make_request(POISON, 4))
        innocents += [system.dispatcher.start(make_request(80 + i, 12)) for i in range(25)]
        results = await asyncio.gather(*[collect(g) for g in innocents], return_exceptions=True)
        for generation, result in zip(innocents, results, strict=True):
            assert not isinstance(result, BaseException), result
            assert result[0] == expected_output(generation.flow.request)
        with pytest.raises(KillsEngines, match="2 engines died while they ran this request alone"):
            await collect(poison)
        assert system.dispatcher.counters.failed == {"kills_engines": 1}
        assert sum(deaths(system).values()) == 3  # once among others, twice alone


@pytest.mark.parametrize("seed", [0, 1, 4, 7, 25])
@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "kind"), [(0, 2, "pull"), (2, 2, "pull"), (1, 1, "store"), (2, 2, "push")]
)
async def test_of_several_poison_prompts_and_30_innocents_they_alone_fail(
    num_prefill: int, num_decode: int, kind: str, seed: int
) -> None:
    """Up to 10 prompts, each of which ends engines at a token of its own; they come whenever."""
    chance = random.Random(seed)
    num_poisons = chance.choice([2, 4, 8, 10])
    sizes = [n for n in range(POISON, 100) if STOP not in expected_output(make_request(n, 8))]
    fatal = {n: chance.choice([0, 0, 1, 2, 3, 6]) for n in sizes[:num_poisons]}  # prompt length -> token

    def is_poison(task: Task) -> bool:
        return len(task.output) >= fatal.get(len(task.submit.prompt_token_ids), 1000)

    orders = ["prefill_first"] if kind != "push" else ["needs_peer_first"]
    async with live(poisoned(num_prefill, num_decode, is_poison, kind=kind, orders=orders)) as system:
        requests = [make_request(size, 8) for size in fatal]
        requests += [make_request(100 + i, chance.choice([1, 4, 12])) for i in range(30)]
        chance.shuffle(requests)
        generations = []
        for request in requests:
            generations.append(system.dispatcher.start(request))
            for _ in range(chance.choice([0, 0, 1, 5])):
                await asyncio.sleep(0)
        results = await asyncio.gather(*map(collect, generations), return_exceptions=True)
        for request, result in zip(requests, results, strict=True):
            if len(request.prompt_token_ids) in fatal:
                assert isinstance(result, KillsEngines | EngineDied), result  # by its trials, or by its limits
            else:
                assert not isinstance(result, BaseException), result
                assert result[0] == expected_output(request)
        assert system.dispatcher.counters.failed["kills_engines"] >= num_poisons - 1
        assert sum(deaths(system).values()) <= 5 * num_poisons


async def test_of_several_suspects_on_one_engine_none_is_taken_for_the_one_that_killed_it() -> None:
    """Pushes whose decode engine dies are suspects, and their prompts go on together on one prefill engine."""
    async with live(System(1, 1, kind="push", orders=["needs_peer_first"])) as system:
        system.backends["prefill-0"].held = True
        generations = [system.dispatcher.start(make_request(50 + i, 4)) for i in range(3)]
        await until(lambda: all(g.flow.runs_on("prefill-0") for g in generations))
        for name in ("decode-0", "prefill-0"):
            system.backends[name].die()
        assert [g.failures and (g.failures.num_deaths, g.failures.num_deaths_alone) for g in generations] == [
            (2, 0)
        ] * 3
        for name in ("decode-0", "prefill-0"):
            system.backends[name].held = False
            system.backends[name].start(system.card(name, epoch="e1"))
        for generation in generations:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)


async def test_a_request_that_kills_engines_at_some_token_is_found_too() -> None:
    """It has brought tokens before, as all the others; none of them is taken for it."""

    def is_poison(task: Task) -> bool:
        return len(task.submit.prompt_token_ids) == POISON and len(task.submit.output_token_ids) >= 1

    async with live(poisoned(2, 2, is_poison)) as system:
        poison = system.dispatcher.start(make_request(POISON, 12))
        others = [system.dispatcher.start(make_request(50 + i, 12)) for i in range(10)]
        for generation in others:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
        with pytest.raises(KillsEngines):
            await collect(poison)


async def test_engines_that_die_by_themselves_cost_no_request() -> None:
    """Twice in a row, the one to which its requests have just moved, too: chance, and no request is to blame."""
    async with live(System(0, 2, backend=PoisonedBackend)) as system:
        generations = [system.dispatcher.start(make_request(50 + i, 12)) for i in range(12)]
        await until(lambda: sum(len(g.flow.output_token_ids) for g in generations) >= 20)
        for name in ("any-0", "any-1"):
            system.backends[name].die()
        for name in ("any-0", "any-1"):
            system.backends[name].start(system.card(name, epoch="e1"))
        for generation in generations:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)


async def test_suspects_run_one_per_engine_at_a_time() -> None:
    async with live(System(0, 2)) as system:
        first = [system.dispatcher.start(make_request(50 + i, 12)) for i in range(8)]
        most = 0
        system.backends["any-0"].die()
        system.backends["any-0"].start(system.card("any-0", epoch="e1"))
        while not all(g.flow.ended for g in first):
            for backend in system.backends.values():
                suspects = [
                    g for g in first
                    if g.failures is not None and g.failures.is_suspect and g.flow.runs_on(backend.name)
                ]  # fmt: skip
                most = max(most, len(suspects))
            await asyncio.sleep(0)
        assert most == 1
        for generation in first:
            assert (await collect(generation))[0] == expected_output(generation.flow.request)
