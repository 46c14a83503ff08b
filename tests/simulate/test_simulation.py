"""Simulated deployments: exact times, equal runs, runs of steps, transfers, failures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.report import Run
from pdkv.bench.serve import Pace
from pdkv.bench.workload import Session, one_turn
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.scheduler import Scheduler
from pdkv.errors import ConfigError
from pdkv.simulate.deployment import Failure, Simulation, Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.testing.paced import read_profile

PROFILE = read_profile(Path("paced:h100"))
Event = tuple[float, str, str]


def options(**fields: Any) -> EngineOptions:
    return EngineOptions(PROFILE, kv_tokens=32_768, hop_s=0.0)._replace(**fields)


def sessions(count: int = 30, *, data: str = "random", **shape: Any) -> Sequence[Session]:
    values = {"num_prompts": count, "input_len": 200, "output_len": 20, "range_ratio": 0.5, **shape}
    return load(data, None, Shape(**values), Maker(1, as_text=False))


def simulated(topology: Topology, load: Sequence[Session], rate: float = 40.0) -> tuple[Run, list[Event]]:
    events: list[Event] = []
    simulation = Simulation(topology, seed=3, on_event=lambda *event: events.append(event))
    return simulation.run(load, Pace(rate=rate, seed=2)), events


KINDS = {
    "aggregated": Topology(options(), 0, 2),
    "2P2D": Topology(options(), 2, 2),
    "pushes": Topology(options(push=True), 2, 2),
    "host memory": Topology(options(kv_tokens=2048, host_tokens=16_384), 0, 2),
    "pushes, host memory": Topology(options(kv_tokens=2048, host_tokens=16_384, push=True), 2, 2),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def topology(request: pytest.FixtureRequest) -> Topology:
    assert isinstance(request.param, Topology)
    return request.param


def times(run: Run) -> list[list[float]]:
    return [list(sent.reply.stamps) for sent in run.requests]


def test_one_request_takes_what_the_curve_says() -> None:
    run, _ = simulated(Topology(options(hop_s=0.001), 0, 1), [one_turn([5] * 100, 3)])
    [sent] = run.requests
    assert sent.reply.ttft == pytest.approx(0.004 + PROFILE.seconds(0, 100, 100))
    assert sent.reply.gaps == pytest.approx([PROFILE.seconds(1, 0, 101), PROFILE.seconds(1, 0, 102)])


def test_a_hand_off_takes_its_time_on_the_link() -> None:
    slow = options(profile=PROFILE.__class__(**{**vars(PROFILE), "transfer_s": 0.25, "transfer_token_s": 0.001}))
    run, _ = simulated(Topology(slow, 1, 1), [one_turn([5] * 100, 3)])
    [sent] = run.requests
    assert sent.reply.gaps[0] == pytest.approx(0.25 + 0.1 + PROFILE.seconds(1, 0, 101))


def test_a_push_ends_after_the_step_with_its_last_layer() -> None:
    made = PROFILE.__class__(**{**vars(PROFILE), "transfer_s": 0.25, "transfer_token_s": 0.0001})
    run, _ = simulated(Topology(options(profile=made, push=True), 1, 1), [one_turn([5] * 100, 3)])
    [sent] = run.requests
    last_layer_s = 100 * 0.0001 / PROFILE.num_layers
    assert sent.reply.gaps[0] == pytest.approx(0.25 + last_layer_s + PROFILE.seconds(1, 0, 101))


def test_host_memory_keeps_what_the_pool_has_lost() -> None:
    first, other = [5] * 640, [7] * 1900
    load = [one_turn(prompt, 4, at_s) for prompt, at_s in ((first, 0.0), (other, 1.0), (first, 2.0))]
    cached = []
    for host_tokens in (0, 8192):
        made = PROFILE.__class__(**{**vars(PROFILE), "host_token_s": 0.001})
        engine = options(profile=made, kv_tokens=2048, host_tokens=host_tokens)
        run = Simulation(Topology(engine, 0, 1)).run(load, Pace(speed=1.0))
        *_, last = run.requests
        cached.append((last.reply.num_cached_tokens, last.reply.ttft > 0.57))
    assert cached == [(144, False), (624, True)]  # of 640 tokens, blocks of 16: the last value ends behind the prompt


@pytest.mark.parametrize("kind", ["stop", "slow"])
@pytest.mark.parametrize("push", [False, True], ids=["pulls", "pushes"])
@pytest.mark.parametrize("engine", ["prefill-0", "decode-0"])
def test_an_engine_in_trouble_is_left_and_holds_no_other_up(kind: str, push: bool, engine: str) -> None:
    failures = [Failure(engine, 0.3, 5.0, kind, 200.0)]
    run, events = simulated(Topology(options(push=push), 2, 2, failures=failures), sessions(60), 10.0)
    assert [sent.reply.error for sent in run.requests] == [None] * 60
    assert max(sent.reply.latency for sent in run.requests) < 4.0
    assert [name for _, name, what in events if what == "back"] == [engine]


def test_equal_seeds_and_loads_make_equal_events(topology: Topology) -> None:
    load = sessions(data="conversations", turns=3)
    first, second = simulated(topology, load), simulated(topology, load)
    assert first[1] == second[1]
    assert times(first[0]) == times(second[0])


def test_steps_taken_at_once_end_when_single_ones_do(topology: Topology) -> None:
    load = sessions()
    whole = simulated(topology, load)
    single = simulated(topology._replace(engine=topology.engine._replace(runs=False)), load)
    assert times(whole[0]) == [pytest.approx(stamps) for stamps in times(single[0])]


def test_what_was_asked_before_is_cached() -> None:
    run, _ = simulated(Topology(options(), 0, 1), sessions(data="conversations", turns=3, range_ratio=0.0))
    turns = {sent.turn: sent.reply for sent in run.requests}
    assert (turns[0].num_cached_tokens, turns[1].num_cached_tokens) == (0, 208)  # of 220, in blocks of 16


def test_no_request_is_lost_if_engines_die(topology: Topology) -> None:
    last, first = topology.roles[-1][0], topology.roles[0][0]
    failing = topology._replace(failures=[Failure(last, 0.3, 0.2), Failure(first, 0.5)])
    run, events = simulated(failing, sessions(60))
    assert [sent.reply.error for sent in run.requests] == [None] * 60
    assert {sent.reply.num_tokens - len(sent.reply.stamps) for sent in run.requests} == {0}
    assert [what for _, _, what in events if what in ("killed", "back")] == ["killed", "killed", "back"]


def test_schedulers_and_pools_are_the_engines_own(topology: Topology) -> None:
    simulation = Simulation(topology)
    for engine in simulation.engines.values():
        assert type(engine.core.scheduler) is Scheduler
        assert type(engine.core.scheduler.kv.pool) is BlockPool


def test_an_unknown_engine_cannot_be_killed() -> None:
    with pytest.raises(ConfigError, match=r"--kill decode-9: .*engine-0"):
        Simulation(Topology(options(), 0, 1, failures=[Failure("decode-9", 1.0)]))
