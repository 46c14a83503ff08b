"""Engines that lie, that an own request ends, or that fall silent: what it costs, and what health says."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from coroutines import clock
from dispatch_rig import InProcessBackend, System, check_right, collect, live
from scripted_engine import expected_output, make_request

from pdkv.errors import (
    EngineUnavailable,
    InvalidRequest,
    KillsEngines,
    RequestFailed,
    RequestTimeout,
    UnsendableMessage,
)
from pdkv.router.engines.health import IDLE_SILENT_TICKS, MUTE_TICKS, TICK_S
from pdkv.router.generations.flow import RequestFlow
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.placement import Placement
from pdkv.router.generations.recovery import Recovery
from pdkv.testing import VirtualLoop
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    Beat,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    Loaded,
    PromptLogprobs,
    Submit,
    TokenLogprob,
    Tokens,
)
from pdkv.wire.reports import LoadReport, SourceCounts

event_loop = VirtualLoop


def held_system(num: int) -> System:
    system = System(0, num)
    for backend in system.backends.values():
        backend.held = True
    return system


async def test_a_request_that_two_engines_were_taking_in_when_they_ended_is_not_sent_to_a_third() -> None:
    """Finding 3: the retry ended the second engine, and with it every other request."""
    async with live(held_system(3)) as system:
        poison, innocent = (system.dispatcher.start(make_request(num_prompt=n)) for n in (20, 30))
        first, second = system.backends["any-0"], system.backends["any-1"]
        first.die({(poison.request_id, 0)})
        assert {m.request_id for m in second.heard(Submit)} == {innocent.request_id, poison.request_id}
        second.die({(poison.request_id, 1)})
        with pytest.raises(KillsEngines, match="2 engines died while they ran this request alone") as raised:
            await collect(poison)
        assert not raised.value.retryable
        third = system.backends["any-2"]
        assert {m.request_id for m in third.heard(Submit)} == {innocent.request_id}
        third.release()
        await collect(innocent)
        assert system.dispatcher.counters.retried == 2


@pytest.mark.parametrize(
    ("forged", "text"),
    [
        ({"position": 3}, "sent token 3 before 0"),
        ({"token_ids": [1] * 50}, "sent token 50 of at most 5"),
        ({"logprobs": [TokenLogprob(1, -1.0, 1)] * 3}, "sent 3 logprobs for 1 tokens"),
        ({"prompt_logprobs": PromptLogprobs.of([None])}, "sent 1 prompt logprobs for 20 tokens"),
        ({"sources": SourceCounts(local_hit=10**18)}, "sent sources of 1000000000000000000 prompt tokens for 20"),
    ],
)
async def test_tokens_that_cannot_be_fail_their_request_only(forged: dict[str, object], text: str) -> None:
    async with live(held_system(1)) as system:
        victim = system.dispatcher.start(make_request())
        values = {"position": 0, "token_ids": [1]} | forged
        system.backends["any-0"].say(Tokens(victim.request_id, 0, **values))  # type: ignore[arg-type]
        with pytest.raises(RequestFailed, match=text):
            await collect(victim)
        system.backends["any-0"].release()
        await check_right(system, make_request(num_prompt=33))


@pytest.mark.parametrize(
    "lie",
    [
        lambda name: Finished(name, 0, "stop", SourceCounts(computed=10**18)),
        lambda name: Finished(name, 0, "stop", SourceCounts(), accepted_guesses=10**18),
        lambda name: HandedOff(name, 0, SourceCounts(computed=10**18), KVHandoff(name, 0, "t", "p", "e", 20, b""), 0.1),
    ],
)
async def test_what_a_prefill_engine_cannot_have_done_is_not_put_to_its_credit(
    lie: Callable[[str], EngineToRouter],
) -> None:
    async with live(System(1, 1)) as system:
        prefill = system.backends["prefill-0"]
        prefill.held = True
        victim, fleet = system.dispatcher.start(make_request()), system.dispatcher.fleet
        prefill.say(lie(victim.request_id))
        with pytest.raises(RequestFailed, match=r"sent (sources of 10{18} prompt tokens|\(10{18}, 0\) guesses)"):
            await collect(victim)
        assert fleet.engines["prefill-0"].health.last_good == 0.0
        prefill.engine.tasks.clear()


async def test_messages_of_an_engine_that_has_no_part_in_a_request_are_dropped() -> None:
    async with live(held_system(2)) as system:
        generation = system.dispatcher.start(make_request())
        foreign: list[EngineToRouter] = [
            Tokens(generation.request_id, 0, 0, [9]),
            Failed(generation.request_id, 0, "internal_error", "forged", retryable=False),
            Finished(generation.request_id, 0, "stop", SourceCounts()),
        ]
        system.backends["any-1"].say(*foreign)
        assert system.dispatcher.counters.dropped_messages == 3
        system.backends["any-0"].release()
        tokens, _ = await collect(generation)
        assert len(tokens) == 5


async def test_an_error_in_a_message_s_handling_costs_that_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with live(held_system(1)) as system:
        victim, other = (system.dispatcher.start(make_request(num_prompt=n)) for n in (20, 30))

        def broken(*_: object) -> None:
            raise IndexError("a defect")

        monkeypatch.setattr(victim.flow, "_on_tokens", broken)
        backend = system.backends["any-0"]
        with caplog.at_level(logging.CRITICAL):
            backend.say(Tokens(victim.request_id, 0, 0, [1]), Tokens(other.request_id, 0, 0, [1]))
        with pytest.raises(RequestFailed, match="caused an error in the router: IndexError"):
            await collect(victim)
        assert other.flow.output_token_ids == [1]
        other.abort()


async def test_what_no_frame_can_carry_is_the_client_s_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(System(1, 1)) as system:
        send = InProcessBackend.send

        def picky(self: InProcessBackend, message: object) -> None:
            if isinstance(message, Submit) and len(message.prompt_token_ids) == 99:
                raise UnsendableMessage("Submit has 99 bytes; at most 98 can be sent")
            send(self, message)  # type: ignore[arg-type]

        monkeypatch.setattr(InProcessBackend, "send", picky)
        with pytest.raises(InvalidRequest, match="at most 98"):
            await collect(system.dispatcher.start(make_request(num_prompt=99)))
        await check_right(system, make_request())


async def test_an_engine_s_refusal_names_the_field() -> None:
    async with live(held_system(1)) as system:
        generation = system.dispatcher.start(make_request())
        refusal = Failed(generation.request_id, 0, InvalidRequest.code, "top_k must be less", False, "top_k")
        system.backends["any-0"].say(refusal)
        with pytest.raises(InvalidRequest) as raised:
            await collect(generation)
        assert (raised.value.param, raised.value.status) == ("top_k", 400)
        system.backends["any-0"].engine.tasks.clear()  # which has refused nothing


# --- silence ------------------------------------------------------------------------------------------------------


def start_with_beats(system: System) -> None:
    for name, backend in system.backends.items():
        backend.start(system.card(name, beats="ipc:///beats"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_is_silent_is_a_suspect_until_it_speaks(role: str) -> None:
    async with live(System(1, 1), start=False) as system:
        dispatcher, silent = system.dispatcher, f"{role}-0"
        assert "still waiting for engines" in dispatcher.fault
        dispatcher.connect()
        start_with_beats(system)
        assert dispatcher.fault == ""
        for tick in range(1, IDLE_SILENT_TICKS + 1):
            assert dispatcher.fault == ""
            dispatcher.fleet.tick()
            for name, backend in system.backends.items():
                if name != silent:
                    backend.say(Beat("e0", 0.0))
            assert dispatcher.topology()["engines"][role == "decode"]["silent_for_s"] == round(tick * TICK_S, 3)
        assert dispatcher.fault == f"no {role} engine is live: {silent} has been silent for 3.0 s"
        suspects = {e["name"]: e["suspect"] for e in dispatcher.topology()["engines"]}
        assert [name for name, suspect in suspects.items() if suspect] == [silent]
        system.backends[silent].say(LoadReport(0, 0, system.dispatcher.fleet.engines[silent].blocks))
        assert dispatcher.fault == ""


async def test_a_long_step_is_no_silence_and_one_that_is_too_long_is_a_fault() -> None:
    async with live(System(0, 1), start=False) as system:
        dispatcher, backend = system.dispatcher, system.backends["any-0"]
        dispatcher.connect()
        start_with_beats(system)
        for tick in range(4 * IDLE_SILENT_TICKS):
            dispatcher.fleet.tick()
            backend.say(Beat("e0", tick * TICK_S, 3.0))
            assert dispatcher.fault == ""
        backend.say(Beat("e0", 15.1, 3.0))
        reason = "any-0 has been in one step for 15.1 s, which should take 3 s"
        assert dispatcher.fault == f"no prefill engine is live: {reason}"
        backend.say(Beat("e0", 0.0))
        assert dispatcher.fault == ""


async def test_suspects_get_requests_only_where_nobody_else_is() -> None:
    async with live(System(0, 2), start=False) as system:
        dispatcher = system.dispatcher
        dispatcher.connect()
        start_with_beats(system)
        system.backends["any-0"].say(Beat("e0", 9.0, 0.1))
        for n in range(4):
            await check_right(system, make_request(num_prompt=20 + n))
        assert not system.backends["any-0"].heard(Submit)
        system.backends["any-1"].say(Beat("e0", 9.0, 0.1))
        await check_right(system, make_request())  # all are suspects: better one of them than nobody


async def test_engines_without_beats_are_never_silent() -> None:
    async with live(System(1, 1)) as system:
        for _ in range(10 * IDLE_SILENT_TICKS):
            system.dispatcher.fleet.tick()
        assert system.dispatcher.fault == ""


# --- who is to blame ----------------------------------------------------------------------------------------------


async def time_out(system: System, num: int, timeout_s: float) -> None:
    for _ in range(num):
        with pytest.raises(RequestTimeout):
            await clock().passing(collect(system.dispatcher.start(make_request(timeout_s=timeout_s))))


@pytest.mark.parametrize("evidence", [True, False])
async def test_short_deadlines_eject_an_engine_only_where_the_engine_does_nothing(evidence: bool) -> None:
    """Router 2: a hanging engine was the least loaded one for ever, as no short deadline ever told against it."""
    async with live(System(0, 2)) as system:
        hanging = system.backends["any-0"]
        hanging.held = True
        system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
        if evidence:
            for _ in range(MUTE_TICKS):
                system.dispatcher.fleet.tick()
        else:
            hanging.say(Beat("e0", 0.5, 2.0))  # at a long step
        await time_out(system, 3, 0.01)
        generation = system.dispatcher.start(make_request())
        assert generation.prefill_engine == ("any-1" if evidence else "any-0")
        assert system.dispatcher.topology()["engines"][0]["ejected"] == evidence
        generation.abort()
        hanging.release()
        system.backends["any-1"].release()


@pytest.mark.parametrize("dies", [False, True])
async def test_a_deadline_that_passes_while_decode_waits_for_kv_tells_against_the_pair(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Unless its prefill engine is gone."""
    monkeypatch.setattr("pdkv.router.generations.evidence.TELLING_TIMEOUT_S", 0.0)
    async with live(System(1, 1)) as system:
        system.backends["decode-0"].held = True
        if dies:
            asyncio.get_running_loop().call_later(0.1, system.backends["prefill-0"].die)
        await time_out(system, 1, 0.5)
        pairs = [] if dies else [{"prefill": "prefill-0", "decode": "decode-0"}]
        assert system.dispatcher.topology()["pairs"] == pairs
        assert not any(e["ejected"] for e in system.dispatcher.topology()["engines"])
        system.backends["decode-0"].release()


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_load_that_fails_because_its_prefill_engine_died_tells_nothing_of_the_pair(
    monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """Whether or not the generation had its turn since; it does not return to that engine."""
    if not is_noticed:
        monkeypatch.setattr("pdkv.router.generations.listener.ORPHANS_PER_TURN", 0)
    async with live(System(2, 2)) as system:
        for name in ("decode-0", "decode-1"):
            system.backends[name].held = True
        generation = system.dispatcher.start(make_request())
        await anext(generation)
        while not generation.flow.awaits_kv:
            await asyncio.sleep(0)
        decode = system.backends[generation.flow.route.decode]
        system.backends[generation.flow.route.prefill].die()
        decode.say(Loaded(generation.request_id, 0, ok=False, code="peer_gone"))
        assert system.dispatcher.counters.load_failures == 1
        assert system.dispatcher.topology()["pairs"] == []
        decode.engine.tasks.clear()
        decode.say(Failed(generation.request_id, 0, "peer_gone", "the KV could not be loaded", retryable=True))
        assert system.dispatcher.fleet.is_ready(generation.flow.route.prefill)
        monkeypatch.undo()
        for name in ("decode-0", "decode-1"):
            system.backends[name].release()
        assert (await collect(generation))[0] == expected_output(make_request())[1:]


@pytest.mark.parametrize(("kind", "code", "is_avoided"), [
    ("store", "kv_not_found", False), ("store", "store_timeout", True), ("pull", "kv_not_found", True),
])  # fmt: skip
async def test_what_a_store_no_longer_has_tells_nothing_of_the_pair(kind: str, code: str, is_avoided: bool) -> None:
    """It was evicted, or its time was over."""
    async with live(System(1, 1, kind=kind)) as system:
        decode = system.backends["decode-0"]
        decode.held = True
        generation = system.dispatcher.start(make_request())
        await anext(generation)
        while not generation.flow.awaits_kv:
            await asyncio.sleep(0)
        decode.say(Loaded(generation.request_id, 0, ok=False, code=code))
        assert system.dispatcher.counters.load_failures == 1
        fleet, now = system.dispatcher.fleet, system.dispatcher._clock()
        assert bool(fleet.pairs.avoided(now)) is is_avoided
        decode.release()
        await collect(generation)


async def test_a_client_that_gives_up_on_kv_tells_against_the_pair_and_not_the_engine_that_waits_for_it() -> None:
    async with live(System(1, 1)) as system:
        decode, fleet = system.backends["decode-0"], system.dispatcher.fleet
        decode.held = True
        generation = system.dispatcher.start(make_request())
        await anext(generation)
        while not generation.flow.awaits_kv:
            await asyncio.sleep(0)
        for _ in range(MUTE_TICKS):
            fleet.tick()
            decode.say(Beat("e0", 0.0))
        clock().advance(6.0)
        decode.say(Beat("e0", 0.0))
        score = fleet.engines["decode-0"].score._failing
        generation.abort()
        assert fleet.engines["decode-0"].score._failing == score
        assert fleet.pairs.avoided(system.dispatcher._clock())
        decode.engine.tasks.clear()


async def test_engines_are_looked_after_though_an_error_occurs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(System(1, 1)) as system:
        looked_again = asyncio.Event()
        looks = iter([RuntimeError("a bug"), None])

        def look() -> None:
            if (error := next(looks, None)) is not None:
                raise error
            looked_again.set()

        monkeypatch.setattr(system.dispatcher, "look_after_engines", look)
        await clock().passing(looked_again.wait())


def break_for(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, bad: Generation) -> None:
    """The method raises when it is about this generation."""
    original = getattr(owner, method)

    def broken(self: object, *args: object, **kwargs: object) -> object:
        if bad in args or bad.flow is self:
            raise RuntimeError("a bug")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, broken)


@pytest.mark.parametrize(("owner", "method"), [(RequestFlow, "engine_died"), (Recovery, "after_failure")])
async def test_an_error_over_one_request_of_a_dead_engine_costs_no_other(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = held_system(2)
    system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
    async with live(system):
        first, second = system.backends["any-0"], system.backends["any-1"]
        bad, good = (system.dispatcher.start(make_request(num_prompt=n)) for n in (20, 30))
        break_for(monkeypatch, owner, method, bad)
        first.die()
        with pytest.raises(RequestFailed, match="the end of any-0 caused an error in the router: RuntimeError"):
            await collect(bad)
        second.release()
        await collect(good)


async def test_who_ended_an_engine_may_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    system = held_system(2)
    system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
    async with live(system):
        generation = system.dispatcher.start(make_request())
        monkeypatch.setattr(system.dispatcher.recovery, "engine_died", lambda *args: next(iter(())))
        system.backends["any-0"].die()
        system.backends["any-1"].release()
        await collect(generation)


async def test_an_error_over_one_request_that_waits_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(held_system(1)) as system:
        backend = system.backends["any-0"]
        backend.die()
        bad, good = (system.dispatcher.start(make_request(num_prompt=n)) for n in (20, 30))
        assert len(system.dispatcher.recovery.parked) == 2
        break_for(monkeypatch, Placement, "place", bad)
        backend.held = False
        backend.start(system.card("any-0", epoch="e1"))
        await collect(good)
        with pytest.raises(RequestFailed, match="placing it caused an error in the router: RuntimeError"):
            await collect(bad)


async def test_an_error_over_one_request_does_not_keep_the_router_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(held_system(1)) as system:
        bad, good = (system.dispatcher.start(make_request(num_prompt=n)) for n in (20, 30))
        break_for(monkeypatch, Recovery, "track", bad)
        system.dispatcher.close()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(good)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(bad)
        for backend in system.backends.values():
            assert backend.listener is None
