"""Whose fault a failure is: an engine's that others contradict, a request's that two engines fail, or a client's."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dispatch_rig import InProcessBackend, System, collect, live, until
from scripted_engine import ScriptedEngine, expected_output, make_request

from pdkv.config import RecoveryConfig
from pdkv.errors import LogitsProcessorFailed, RequestFailed, RequestTimeout
from pdkv.router.engines.health import MUTE_TICKS
from pdkv.router.generations.driver import TIMER_SLACK_S
from pdkv.router.generations.generation import Generation
from pdkv.wire.messages import Failed, RouterToEngine, Submit, Tokens

NUM_CLIENTS, NUM_REQUESTS = 8, 500


class FailingBackend(InProcessBackend):
    """An engine that answers Submits with a failure that it says another engine would have, too."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.fails: Callable[[Submit], bool] = lambda submit: False
        self.code = "internal_error"
        self.num_failed = 0

    def send(self, message: RouterToEngine) -> None:
        if isinstance(message, Submit) and self.fails(message):
            self.num_failed += 1
            answer = Failed(message.request_id, message.attempt, self.code, f"{self.name} is broken", retryable=False)
            asyncio.get_running_loop().call_soon(self.say, answer)
        else:
            super().send(message)


def failing(system: System, name: str) -> FailingBackend:
    backend = system.backends[name]
    assert isinstance(backend, FailingBackend)
    return backend


def ejected(system: System) -> set[str]:
    return {e["name"] for e in system.dispatcher.topology()["engines"] if e["ejected"]}


def is_blamed(system: System, name: str) -> bool:
    return system.dispatcher.fleet.engines[name].score._failing > 0


async def serve_many(system: System) -> int:
    """Requests of several clients, each behind the other; returns how many failed."""
    num_lost, numbers = 0, iter(range(NUM_REQUESTS))

    async def client() -> None:
        nonlocal num_lost
        for number in numbers:
            request = make_request(20 + number % 50, 4)
            try:
                assert (await collect(system.dispatcher.start(request)))[0] == expected_output(request)
            except RequestFailed:
                num_lost += 1

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return num_lost


def failing_engines(side: str, **options: Any) -> contextlib.AbstractAsyncContextManager[System]:
    num_prefill, num_decode = (4, 2) if side == "prefill" else (2, 4)
    return live(System(num_prefill, num_decode, backend=FailingBackend, **options))


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_that_fails_everything_costs_no_request_and_is_avoided(side: str) -> None:
    """F41: it failed fast, so it was the least loaded one for ever: 144,004 of 144,953 requests were lost."""
    async with failing_engines(side=side, policy="least_loaded") as system:
        bad = failing(system, f"{side}-0")
        bad.fails = lambda submit: True
        assert await serve_many(system) <= NUM_REQUESTS * 2 // 1000
        assert ejected(system) == {bad.name}
        assert bad.num_failed < NUM_REQUESTS // 10


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_that_fails_one_in_five_costs_no_request(side: str) -> None:
    async with failing_engines(side=side) as system:
        bad, chance = failing(system, f"{side}-0"), random.Random(1)
        bad.fails = lambda submit: chance.random() < 0.2
        assert await serve_many(system) <= NUM_REQUESTS * 2 // 1000
        assert bad.num_failed >= 3


async def test_two_engines_of_four_that_fail_everything_are_avoided() -> None:
    """What both of them refuse is believed, but it tells against them, too: nothing goes well there."""
    async with failing_engines(side="prefill", policy="least_loaded") as system:
        for name in ("prefill-0", "prefill-1"):
            failing(system, name).fails = lambda submit: True
        await serve_many(system)
        assert ejected(system) == {"prefill-0", "prefill-1"}


async def test_what_two_engines_refuse_is_the_request_s_fault_and_is_tried_on_no_third() -> None:
    async with failing_engines(side="prefill") as system:
        for _ in range(12):
            await collect(system.dispatcher.start(make_request()))  # all engines work
        for name in system.backends:
            failing(system, name).fails = lambda submit: len(submit.prompt_token_ids) == 99
            failing(system, name).code = LogitsProcessorFailed.code
        for _ in range(15):
            with pytest.raises(
                LogitsProcessorFailed, match=r"broken \(tried twice: on prefill-\d and on prefill-\d\)$"
            ):
                await collect(system.dispatcher.start(make_request(99)))
        assert sum(failing(system, name).num_failed for name in system.backends) == 2 * 15
        assert not ejected(system)
        assert system.dispatcher.counters.faults == {"engine": 15, "client": 15}


@pytest.mark.parametrize("retry_limit", [0, 3])
async def test_what_no_other_engine_can_try_is_believed_at_once(retry_limit: int) -> None:
    """Also where one is gone that may come back: the client would be who waits."""
    async with live(System(0, 2, backend=FailingBackend, recovery=RecoveryConfig(retry_limit=retry_limit))) as system:
        if retry_limit:
            system.backends["any-1"].die()
        failing(system, "any-0").fails = failing(system, "any-1").fails = lambda submit: True
        with pytest.raises(RequestFailed, match=r"^any-\d is broken$"):
            await collect(system.dispatcher.start(make_request()))


async def test_a_stream_that_decode_fails_goes_on_on_another_engine_and_tells_against_the_first() -> None:
    async with live(System(1, 2)) as system:
        request = next(r for n in range(20, 400) if len(expected_output(r := make_request(n, 8))) == 8)
        generation: Generation = system.dispatcher.start(request)
        await until(lambda: len(generation.flow.output_token_ids) >= 3)
        bad = system.backends[generation.decode_engine]
        bad.engine.tasks.clear()
        bad.say(Failed(generation.request_id, 0, "non_finite_logits", "NaN", retryable=False))
        assert not is_blamed(system, bad.name)  # no other engine has contradicted it
        assert (await collect(generation))[0] == expected_output(request)
        assert is_blamed(system, bad.name)
        assert generation.decode_engine != bad.name


class Streams:
    """Streams with a deadline of 10 s on an engine that does what the test says, by the test's clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.system = System(0, 2, clock=lambda: self.now)
        self.system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]

    def start(self) -> Generation:
        for backend in self.system.backends.values():
            backend.held = True
        return self.system.dispatcher.start(make_request(max_tokens=200, timeout_s=10.0))

    def say_tokens(self, generation: Generation, num: int) -> None:
        position = len(generation.flow.output_token_ids)
        backend = self.system.backends[generation.flow.route.decode]
        backend.say(Tokens(generation.request_id, generation.flow.attempt, position, [1] * num))

    async def expire(self, generation: Generation) -> None:
        """Its deadline passes now."""
        self.now = generation.flow.deadline
        self.system.dispatcher.driver.expire(generation)
        with pytest.raises(RequestTimeout, match=r"^the request took longer than 10 s$"):
            await collect(generation)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with live(self.system):
            yield
            for backend in self.system.backends.values():
                backend.engine.tasks.clear()


async def test_a_client_s_own_deadline_is_not_held_against_an_engine_that_still_sends() -> None:
    """F42: one tenant with a short deadline and long answers moved everybody's requests off a well engine."""
    streams = Streams()
    async with streams.running():
        for _ in range(10):
            generation = streams.start()
            for _ in range(10):
                streams.now += 0.99
                streams.say_tokens(generation, 10)
            await streams.expire(generation)
        assert not is_blamed(streams.system, "any-0")


@pytest.mark.parametrize(("gap_s", "num_gaps", "blamed"), [(0.1, 40, True), (0.1, 60, False), (1.5, 2, False)])
async def test_an_engine_that_stops_sending_is_blamed(gap_s: float, num_gaps: int, blamed: bool) -> None:
    """After 5 s, or five times the usual gap: the first stream is silent for 6 s, the second for 4, the third for 7."""
    streams = Streams()
    async with streams.running():
        generation = streams.start()
        streams.say_tokens(generation, 1)
        for _ in range(num_gaps):
            streams.now += gap_s
            streams.say_tokens(generation, 1)
        await streams.expire(generation)
        assert is_blamed(streams.system, "any-0") == blamed


async def test_an_engine_that_was_asked_at_the_last_moment_is_not_blamed_for_the_deadline() -> None:
    streams = Streams()
    async with streams.running():
        generation = streams.start()
        streams.now += 9.0
        streams.system.backends["any-0"].die()
        assert generation.flow.route.decode == "any-1"
        await streams.expire(generation)
        assert not is_blamed(streams.system, "any-1")


@pytest.mark.parametrize(
    ("waited_s", "prompt_s", "is_mute", "blamed"),
    [
        (1.5, 0.1, True, True),
        (0.9, 0.1, True, False),  # too soon to say anything
        (1.5, 0.4, True, False),  # such prompts take that long
        (1.5, 0.1, False, False),  # it sends to others
        (1.5, 0.0, True, False),  # what is usual is not known
        (6.0, 0.0, True, True),
    ],
)
async def test_a_client_that_gives_up_tells_against_an_engine_that_does_nothing(
    waited_s: float, prompt_s: float, is_mute: bool, blamed: bool
) -> None:
    """A server of another engine that hung while its health was well had each second request for ever."""
    streams = Streams()
    async with streams.running():
        streams.system.dispatcher.fleet.speeds.worked("any-1", 2, prompt_s, streams.now)
        generation = streams.start()
        generation.asked_work = 2
        for _ in range(MUTE_TICKS * is_mute):
            streams.system.dispatcher.fleet.tick()
        streams.now += waited_s
        generation.abort()
        assert is_blamed(streams.system, "any-0") == blamed
        assert streams.system.dispatcher.counters.faults == {"engine" if blamed else "client": 1}


async def test_a_client_that_leaves_a_stream_tells_nothing_against_an_engine_that_still_sends() -> None:
    streams = Streams()
    async with streams.running():
        generation = streams.start()
        streams.system.dispatcher.fleet.speeds.worked("any-1", generation.asked_work, 0.1, streams.now)
        for _ in range(4):
            streams.now += 0.99
            streams.say_tokens(generation, 1)
        for _ in range(MUTE_TICKS):
            streams.system.dispatcher.fleet.tick()
        streams.now += 0.99
        generation.abort()
        assert not is_blamed(streams.system, "any-0")


async def test_a_deadline_that_is_seen_a_little_early_is_named() -> None:
    """Event loops round their timers: 504s said that no token had come for 600 s, of a request of a millisecond."""
    streams = Streams()
    async with streams.running():
        generation = streams.start()
        streams.now = generation.flow.deadline - TIMER_SLACK_S / 2
        streams.system.dispatcher.driver.expire(generation)
        with pytest.raises(RequestTimeout, match=r"^the request took longer than 10 s$"):
            await collect(generation)
