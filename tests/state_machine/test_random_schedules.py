"""The hand-off state machine under random schedules, in every legal mode and order (F1, F2, F4, F9, F10, F11)."""

import logging
import random
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS
from state_machine.defects import DEFECTS, DRAFT_DEFECTS, LATE_DEFECTS, Pair, Patch
from state_machine.host import PAIRS, World, run_schedule
from state_machine.standin import StandIn

from pdkv.engine.request import Request
from pdkv.wire.messages import KVGroup

NUM_SCHEDULES = 1_000  # `make soak` runs more
LAGS = range(3)
"""Steps that are planned ahead of the oldest one that has not ended."""

NUM_SCHEDULES_WITH_WINDOWS = 24
"""Of each pair and each shape of groups."""

MAX_SCHEDULES_PER_DEFECT = 1500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Expired leases and failed loads are what these schedules are about: no log line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_schedule_gives_the_right_tokens_and_returns_every_block(pair: Pair, lag: int, thoroughness: float) -> None:
    @settings(
        max_examples=int(NUM_SCHEDULES * thoroughness) // len(PAIRS) // len(LAGS),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), length=st.integers(40, 500))
    def check(seed: int, length: int) -> None:
        data = random.Random(seed * len(LAGS) + lag).randbytes(length)
        run_schedule(data, pair, partial(World, lag=lag))

    check()


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS], ids=["full+window", "window", "two"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] != "store"], ids="-".join)
def test_any_schedule_of_a_model_with_windows(pair: Pair, groups: tuple[KVGroup, ...], thoroughness: float) -> None:
    rng = random.Random(f"{pair} {groups}")
    num_loaded = 0
    for number in range(NUM_SCHEDULES_WITH_WINDOWS):
        if number >= NUM_SCHEDULES_WITH_WINDOWS * thoroughness and num_loaded:
            break
        world = run_schedule(rng.randbytes(rng.randint(40, 500)), pair, partial(World, forward=StandIn(groups)))
        num_loaded += sum(engine.core._make_load().sources.remote for engine in world.engines.values())
    assert num_loaded


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_schedules_reach_what_they_are_about(pair: Pair, thoroughness: float, monkeypatch: Patch) -> None:
    if thoroughness < 1:
        pytest.skip("this is about all schedules together")
    rng = random.Random(11)
    seen = {
        "preemptions": 0,
        "remote": 0,
        "failed loads": 0,
        "restarts": 0,
        "retries": 0,
        "second readers": 0,
        "aborts": 0,
        "finished": 0,
        "late masks": 0,
    }
    num_parts, most_ahead = 0, set[tuple[int, int]]()
    resume = Request.resume

    def counted(self: Request, num_tokens: int) -> None:
        nonlocal num_parts
        num_parts += 1
        resume(self, num_tokens)

    monkeypatch.setattr(Request, "resume", counted)
    for number in range(1000):
        if number >= 100 and (num_parts or pair[0] != "store"):  # few loads come in part
            break
        world = run_schedule(rng.randbytes(rng.randint(200, 500)), pair)
        for engine in world.engines.values():
            load = engine.core._make_load()
            seen["preemptions"] += load.preemptions
            seen["remote"] += load.sources.remote
            seen["failed loads"] += load.load_failures
        most_ahead.add((world.max_lag, world.most_ahead))
        seen["restarts"] += world.num_restarts
        seen["retries"] += sum(client.flow.attempt > 0 for client in world.clients)
        seen["second readers"] += world.num_resumed
        seen["late masks"] += world.num_late
        seen["aborts"] += sum(client.aborted for client in world.clients)
        seen["finished"] += sum(client.flow.finish_reason is not None for client in world.clients)
    assert all(seen.values()), seen
    assert most_ahead >= {(lag, lag) for lag in LAGS}, "steps were not planned as far ahead as they might"
    assert num_parts or pair[0] != "store", "no load came in part"


PLANTED = [(*planted, lag, None) for planted in DEFECTS for lag in LAGS]
PLANTED += [(*planted, lag, None) for planted in LATE_DEFECTS for lag in LAGS if lag]
PLANTED += [(*planted, lag, 3) for planted in DRAFT_DEFECTS for lag in LAGS]


@pytest.mark.parametrize(
    ("defect", "pair", "lag", "num_drafts"),
    PLANTED,
    ids=[f"{defect.__name__}-{lag}" for defect, _, lag, _ in PLANTED],
)
def test_schedules_find_the_defect(
    defect: object, pair: Pair, lag: int, num_drafts: int | None, thoroughness: float, monkeypatch: Patch
) -> None:
    if thoroughness < 1 and lag != LAGS[-1]:
        pytest.skip("the others are for the whole suite")
    assert callable(defect)
    defect(monkeypatch)
    rng = random.Random(11)
    for _ in range(MAX_SCHEDULES_PER_DEFECT):
        try:
            run_schedule(rng.randbytes(rng.randint(100, 500)), pair, partial(World, lag=lag, num_drafts=num_drafts))
        except Exception:  # any: a wrong token, a broken book, or the engine falling over it
            return
    pytest.fail(f"{MAX_SCHEDULES_PER_DEFECT} schedules did not notice: {defect.__doc__}")
