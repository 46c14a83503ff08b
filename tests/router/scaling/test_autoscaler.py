"""The core: what it decides for loads, engines and failures that are made up. A prompt of 1,000 tokens takes 0.2 s."""

import itertools
import math

import pytest

from pdkv.config import Bounds
from pdkv.router.scaling.attainment import Prompts, erlang_c, ttft
from pdkv.router.scaling.autoscaler import Autoscaler, Decision, Objectives, Observation, Seen, Told

DOWN_S, TOKENS, PROMPT_S = 60.0, 1000, 0.2


class World:
    """Engines that do what was decided, as a launcher would; a start takes START_S."""

    START_S = 10.0

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        bounds = {"prefill": Bounds(1, 4), "decode": Bounds(1, 4)}
        self.core = Autoscaler(bounds, Objectives(1.0, 0.05, 0.95, DOWN_S))
        names = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)]
        self.engines = {f"{role}-{i}": Seen(f"{role}-{i}", role, serves=True) for role, i in names}
        self.starting: dict[str, tuple[str, float]] = {}
        self.leaving: list[str] = []
        self.started = self.failed = 0
        self.now, self.asked, self.count, self.queued, self.decoding = 0.0, 0.0, 0.0, 0.0, 1.0
        self.starts_fail = self.keeps_leaving = False
        self.steps = [(1.0, 0.01), (9.0, 0.018)]
        self.changes: list[Decision] = []

    def roles(self) -> tuple[int, int]:
        """Engines that serve and are not drained."""
        roles = [e.role for e in self.engines.values() if e.serves and not e.draining]
        return roles.count("prefill"), roles.count("decode")

    def pass_s(self, seconds: int, rate: float = 0.0) -> list[Decision]:
        """Let time pass with so many prompts a second; returns the decisions that changed something."""
        found = []
        for _ in range(seconds):
            self.now += 1.0
            self.count += rate
            self.asked += rate * TOKENS
            decision = self.core.decide(self.seen(), self.now)
            assert self.core.next_deadline() == self.now + 1.0
            self.act(decision)
            found += [decision] if decision.changes else []
        self.changes += found
        return found

    def seen(self) -> Observation:
        squares = self.asked * TOKENS
        return Observation(
            [*self.engines.values()],
            Told(
                {n: role for n, (role, _) in self.starting.items()}, [*self.leaving],
                self.started, self.failed, start_s=self.START_S if self.started else 0.0,
            ),
            queued=self.queued, asked=self.asked + self.queued, sizes=(self.count, self.asked, squares),
            prompt_times=[(TOKENS, PROMPT_S)], step_times=self.steps, requests=self.decoding,
        )  # fmt: skip

    def act(self, decision: Decision) -> None:
        for name in decision.keep:
            self.leaving.remove(name)
            self.engines[name] = self.engines[name]._replace(draining=False)
        for name, role in decision.roles.items():
            self.engines[name] = self.engines[name]._replace(role=role)
        for name in decision.stop:
            self.leaving.append(name)
            self.engines[name] = self.engines[name]._replace(draining=True)
        for role, number in decision.start.items():
            for _ in range(number):
                self.failed += self.starts_fail
                if not self.starts_fail:
                    self.starting[f"{role}-{len(self.engines) + len(self.starting)}"] = role, self.now + self.START_S
        for name, (role, at) in [*self.starting.items()]:
            if at <= self.now:
                del self.starting[name]
                self.started += 1
                self.engines[name] = Seen(name, role, serves=True)
        if not self.keeps_leaving:
            for name in self.leaving:
                del self.engines[name]
            self.leaving.clear()


def test_erlang_c_is_that_of_the_tables() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=0.001)


def test_more_engines_never_attain_less() -> None:
    """So that the least sufficient number can be bisected."""
    for load in (0.0, 0.9, 1.7, 3.2):
        for queued in (0.0, 5e3, 1e5):
            found = [ttft(Prompts(queued, load / 2e-4, 2e-4, 0.2, 0.0), num, 2, 1.0, 20.0) for num in range(1, 9)]
            assert found == sorted(found), (load, queued)


def test_an_engine_starts_before_its_role_is_full_and_one_at_a_time() -> None:
    world = World()
    world.pass_s(60, rate=1.0)
    assert world.changes == []
    [decision] = world.pass_s(60, rate=4.4)
    assert (decision.start, decision.desired["decode"]) == ({"prefill": 1}, 1)
    assert decision.figures["tokens_per_s"] < 5000, "of the load that it cannot stand"
    assert world.roles() == (2, 1)


def test_a_queue_alone_starts_engines() -> None:
    world = World()
    world.pass_s(10, rate=1.0)
    world.queued = 60_000.0
    [decision] = world.pass_s(1, rate=1.0)
    assert decision.start["prefill"] >= 2


def test_engines_go_when_they_were_not_needed_for_long_enough() -> None:
    world = World(prefill=3)
    world.pass_s(int(DOWN_S), rate=1.0)
    assert world.changes == []
    [decision] = world.pass_s(20, rate=1.0)
    assert decision.stop == ["prefill-2", "prefill-1"], "the newest first"


@pytest.mark.parametrize(("seconds", "num_decode"), [(0.2, 4), (0.04, 1)])
def test_steps_of_one_size_alone_say_whether_they_are_too_long(seconds: float, num_decode: int) -> None:
    world = World()
    world.steps, world.decoding = [(40.0, seconds)], 40.0
    world.pass_s(30, rate=1.0)
    assert world.roles() == (1, num_decode)


def test_a_role_changes_before_an_engine_starts_and_what_is_idlest_changes() -> None:
    world = World(decode=2)
    world.engines["decode-1"] = world.engines["decode-1"]._replace(requests=3)
    world.decoding = 50.0  # more than one engine can have
    world.pass_s(100, rate=1.0)
    world.decoding = 1.0
    [decision] = world.pass_s(40, rate=4.0)
    assert (decision.roles, decision.start) == ({"decode-0": "prefill"}, {})
    world.decoding = 50.0
    [decision] = world.pass_s(30, rate=1.0)
    assert (decision.roles, decision.start) == ({}, {"decode": 1}), "an engine's new role lasts for a while"


def test_an_engine_that_leaves_is_kept_in_the_other_role() -> None:
    world = World(decode=2)
    world.keeps_leaving = True
    world.pass_s(int(DOWN_S) + 1, rate=1.0)
    assert world.leaving == ["decode-1"]
    [decision] = world.pass_s(40, rate=4.0)
    assert (decision.keep, decision.roles, decision.start) == (["decode-1"], {"decode-1": "prefill"}, {})


def test_a_leaving_engine_is_kept_if_it_is_needed_again() -> None:
    world = World(prefill=2)
    world.keeps_leaving = True
    world.pass_s(int(DOWN_S) + 1, rate=1.0)
    assert world.leaving == ["prefill-1"]
    decisions = world.pass_s(30, rate=4.4)
    assert (decisions[0].keep, decisions[0].start) == (["prefill-1"], {})


@pytest.mark.parametrize("period_s", [10, 40, 100])
def test_a_load_that_crosses_a_limit_again_and_again_changes_little(period_s: int) -> None:
    world = World()
    for second in range(1200):
        world.pass_s(1, rate=3.6 + 1.2 * math.sin(second * math.tau / period_s))
    assert [(d.start, d.stop) for d in world.changes] == [({"prefill": 1}, [])], world.changes


def test_after_a_failed_start_it_waits_twice_as_long_each_time() -> None:
    world = World()
    world.starts_fail = True
    world.pass_s(20, rate=1.0)
    decisions = world.pass_s(100, rate=4.4)
    gaps = [b.at - a.at for a, b in itertools.pairwise(decisions)]
    assert gaps == [11.0, 21.0], "ten seconds and twenty, from when the failure was told"
    world.starts_fail = False
    [decision] = world.pass_s(60, rate=4.4)
    assert decision.start == {"prefill": 1}
    assert world.roles() == (2, 1)


def test_a_dead_engine_is_expected_back_for_a_while_and_then_replaced() -> None:
    world = World(prefill=2)
    world.pass_s(30, rate=5.5)
    world.engines["prefill-0"] = world.engines["prefill-0"]._replace(serves=False)
    assert world.pass_s(25, rate=5.5) == []
    [decision] = world.pass_s(60, rate=5.5)
    assert decision.start == {"prefill": 1}


def test_bounds_hold_whatever_the_load() -> None:
    world = World()
    world.queued, world.decoding = 1e9, 1e6
    world.pass_s(60, rate=500.0)
    assert world.roles() == (4, 4)
    world.queued = world.decoding = 0.0
    world.pass_s(600)
    assert world.roles() == (1, 1)


def test_what_an_operator_has_drained_is_neither_kept_nor_ended() -> None:
    world = World(prefill=2)
    world.engines["prefill-1"] = world.engines["prefill-1"]._replace(draining=True)
    world.pass_s(200, rate=1.0)
    decisions = world.pass_s(40, rate=4.4)
    assert [(d.keep, d.stop, d.start) for d in decisions] == [([], [], {"prefill": 1})]


def test_a_router_that_has_just_begun_changes_nothing_while_engines_come_back() -> None:
    world = World(prefill=3)
    world.engines = {name: engine._replace(serves=False) for name, engine in world.engines.items()}
    assert world.pass_s(20) == []


def test_an_objective_that_no_number_attains_does_not_take_all_engines() -> None:
    world = World()
    world.core.objectives = Objectives(0.05, 0.001, 0.95, DOWN_S)
    world.pass_s(60, rate=1.0)
    assert world.changes == []
