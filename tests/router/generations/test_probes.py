"""Probes: idle engines and pairs generate a token now and then; what comes of it ejects engines and heals them."""

import asyncio
from itertools import pairwise

import pytest
from dispatch_rig import System, check_right, live
from scripted_engine import make_request

from pdkv.config import HealthConfig
from pdkv.errors import ConfigError
from pdkv.router.engines.health import TICK_S
from pdkv.router.engines.outliers import HOLD_S
from pdkv.wire.messages import PROBE_SALT, Failed, Submit
from pdkv.wire.reports import BlockCounts, LoadReport

INTERVAL_S = 10.0
A_WHILE = INTERVAL_S + 2 * TICK_S
"""After the tick that saw the engines first."""
BLOCKS = BlockCounts(total=100, free=100, cached=0, active=0, leased=0, quarantined=0)


class Rig(System):
    """Time that only tests move, tick by tick."""

    def __init__(self, num_prefill: int, num_decode: int, *, interval_s: float = INTERVAL_S) -> None:
        self.now = 1000.0
        health = HealthConfig(probe_interval_s=interval_s)
        super().__init__(num_prefill, num_decode, clock=lambda: self.now, health=health)

    async def after(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.dispatcher.look_after_engines()
            await self.settle()

    async def settle(self) -> None:
        for _ in range(40):
            await asyncio.sleep(0)

    def probes(self, name: str) -> list[Submit]:
        return [submit for submit in self.backends[name].heard(Submit) if submit.cache_salt == PROBE_SALT]

    def probe_of(self, name: str) -> dict[str, object] | None:
        (engine,) = [e for e in self.dispatcher.topology()["engines"] if e["name"] == name]
        probe: dict[str, object] | None = engine["last_probe"]
        return probe

    def expire_probe(self) -> None:
        generations = list(self.dispatcher.driver.generations.values())
        self.now = max(generation.expires_at for generation in generations)
        for generation in generations:
            assert generation.flow.request.probe
            self.dispatcher.driver.expire(generation)


async def test_idle_engines_generate_a_token_and_every_pair_is_visited() -> None:
    async with live(Rig(2, 2)) as rig:
        await rig.after(INTERVAL_S - TICK_S)
        assert not any(rig.probes(name) for name in rig.backends)
        await rig.after(6 * INTERVAL_S)
        pairs = set(rig.dispatcher.prober._probed)
        assert pairs == {(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)}
        assert all(5 <= len(rig.probes(name)) <= 8 for name in rig.backends), "about one per interval"
        assert rig.probe_of("decode-1") == {"ok": True, "fault": None, "age_s": pytest.approx(5, abs=6), "took_s": 0.0}
        (submit, *_) = rig.probes("prefill-0")
        assert len(submit.prompt_token_ids) < 16, "less than a block: nothing can be cached"
        counters = rig.dispatcher.counters
        assert (counters.started, counters.finished, rig.dispatcher.prober.num_failed) == (0, 0, 0)
        assert rig.dispatcher.prober.num_ok >= 10


async def test_engines_that_serve_are_not_probed() -> None:
    async with live(Rig(0, 1)) as rig:
        for _ in range(4):
            await rig.after(INTERVAL_S / 2)
            await check_right(rig, make_request())
        rig.backends["any-0"].say(LoadReport(waiting=0, running=1, blocks=BLOCKS))  # another router's
        await rig.after(2 * INTERVAL_S)
        assert not rig.probes("any-0")


async def test_engines_that_hang_take_no_other_engines_probes() -> None:
    """Router A5: two that hung at the front were probed in turns, and no other one ever was."""
    async with live(Rig(0, 4)) as rig:
        rig.backends["any-0"].held = rig.backends["any-1"].held = True
        for _ in range(8):
            await rig.after(A_WHILE)
            if rig.dispatcher.driver.generations:
                rig.expire_probe()
                await rig.settle()
        assert len(rig.probes("any-2")) >= 2
        assert len(rig.probes("any-3")) >= 2
        for name in ("any-0", "any-1"):
            rig.backends[name].release()


async def test_without_an_interval_there_are_no_probes() -> None:
    async with live(Rig(0, 1, interval_s=0.0)) as rig:
        await rig.after(3 * INTERVAL_S)
        assert not rig.probes("any-0")
    with pytest.raises(ConfigError, match="probe_interval_s: a number of seconds of at least 0"):
        HealthConfig(probe_interval_s=-1.0)


async def test_an_engine_that_does_not_answer_its_probe_is_a_suspect_until_it_answers_one() -> None:
    """Router 2: an idle engine that hangs was found out by requests."""
    async with live(Rig(0, 2)) as rig:
        rig.backends["any-0"].held = True
        await rig.after(A_WHILE)
        rig.expire_probe()
        (engine, _) = rig.dispatcher.topology()["engines"]
        assert engine["suspicion"] == "failed its last probe: no answer within 5 s"
        assert rig.dispatcher.prober.num_failed == 1
        for n in range(4):
            assert (await check_right(rig, make_request(20 + n))).decode_engine == "any-1"
        rig.backends["any-0"].release()
        await rig.after(HOLD_S)
        assert rig.dispatcher.topology()["engines"][0]["suspicion"] is None
        assert rig.probe_of("any-0")["ok"]  # type: ignore[index]


async def test_a_probe_is_tried_nowhere_else() -> None:
    async with live(Rig(0, 2)) as rig:
        first = rig.backends["any-0"]
        first.held = True
        await rig.after(A_WHILE)
        (probe,) = rig.probes("any-0")
        first.say(Failed(probe.request_id, 0, "internal_error", "broken", retryable=True))
        assert rig.dispatcher.topology()["engines"][0]["suspicion"] == "failed its last probe: broken"
        assert rig.dispatcher.num_running == 0
        assert rig.dispatcher.counters.retried == 0
        assert not rig.dispatcher.counters.failed
        first.engine.tasks.clear()
        first.held = False


@pytest.mark.parametrize("silent", ["prefill-0", "decode-0"])
async def test_the_side_that_did_not_answer_is_at_fault(silent: str) -> None:
    async with live(Rig(1, 1)) as rig:
        rig.backends[silent].held = True
        await rig.after(A_WHILE)
        rig.expire_probe()
        topology = rig.dispatcher.topology()
        faulty = {e["name"] for e in topology["engines"] if e["suspect"]}
        if silent == "prefill-0":
            assert (faulty, topology["pairs"]) == ({"prefill-0"}, [])
        else:  # it may be the pair: prefill may not have sent
            assert faulty == set()
            assert [(p["prefill"], p["decode"]) for p in topology["pairs"]] == [("prefill-0", "decode-0")]
        rig.backends[silent].release()


async def test_an_ejected_engine_is_tried_by_a_probe_when_its_hold_is_over() -> None:
    async with live(Rig(0, 2)) as rig:
        score = rig.dispatcher.fleet.engines["any-0"].score
        score.eject(rig.now)
        await rig.after(HOLD_S - 2 * TICK_S)
        assert not rig.probes("any-0")
        await rig.after(4 * TICK_S)
        assert len(rig.probes("any-0")) == 1
        assert not score.is_ejected


@pytest.mark.parametrize("loads", [True, False])
async def test_a_bad_pair_is_tried_by_a_probe(loads: bool) -> None:
    """Also by one that answers without a load: such a pair was due again in each tick."""
    async with live(Rig(1, 2)) as rig:
        rig.backends["decode-1"].engine.draw = lambda n: 5 if n == 6 and not loads else 0
        pairs = rig.dispatcher.fleet.pairs
        pairs.loaded("prefill-0", "decode-1", False, rig.now)
        await rig.after(HOLD_S + 4 * TICK_S)
        assert not pairs
        assert len(rig.probes("decode-1")) == 1


async def test_bad_pairs_of_engines_that_are_well_and_idle_engines_are_probed_in_turns() -> None:
    async with live(Rig(2, 4)) as rig:
        fleet, due = rig.dispatcher.fleet, rig.dispatcher.prober.due
        assert due(rig.now) is None
        for n in range(3):
            fleet.pairs.loaded("prefill-0", f"decode-{n}", False, rig.now)
        fleet.engines["decode-0"].score.eject(rig.now + INTERVAL_S)
        routes = [due(rig.now + INTERVAL_S) for _ in range(4)]
        names = [route[:2] for route in routes if route is not None]
        assert [names[0], names[2]] == [("prefill-0", "decode-1"), ("prefill-0", "decode-2")]
        assert ("prefill-1" in names[1], "decode-3" in names[3]) == (True, True)


async def test_a_probe_does_not_end_the_ejection_of_a_crash_loop() -> None:
    async with live(Rig(0, 2)) as rig:
        for crash in range(3):
            rig.backends["any-0"].die()
            rig.backends["any-0"].start(rig.card("any-0", epoch=f"e{crash}"))
        await rig.after(2 * HOLD_S)
        assert rig.probes("any-0")
        assert rig.dispatcher.topology()["engines"][0]["ejected"]
        await rig.after(60.0)
        assert not rig.dispatcher.topology()["engines"][0]["ejected"]


async def test_several_engines_are_probed_at_once_and_those_that_hang_ever_more_rarely() -> None:
    async with live(Rig(0, 3)) as rig:
        for name in ("any-0", "any-1"):
            rig.backends[name].held = True
        await rig.after(A_WHILE + TICK_S)
        assert [len(rig.probes(name)) for name in rig.backends] == [1, 1, 1]
        asked = []
        for _ in range(120):
            before = len(rig.probes("any-0"))
            await rig.after(1.0)
            for generation in list(rig.dispatcher.driver.generations.values()):
                if rig.now >= generation.expires_at:
                    rig.dispatcher.driver.expire(generation)
            asked += [rig.now] * (len(rig.probes("any-0")) - before)
        pauses = [after - before for before, after in pairwise(asked)]
        assert len(pauses) >= 2
        assert pauses == sorted(pauses)
        for backend in rig.backends.values():
            backend.release()
