"""The hand-off state machine under random schedules, in every legal mode, order and mixture (F1, F2, F4, F9 to F11)."""

import random
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS
from state_machine.defects import DEFECTS, DRAFT_DEFECTS, LATE_DEFECTS, Pair, Patch
from state_machine.host import MULTI_PAIRS, PAIRS, World, run_schedule
from state_machine.standin import StandIn

from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.engine.request import Request
from pdkv.wire.kv import KVGroup

NUM_SCHEDULES = 12
"""Of each pair; `make soak` runs more."""

ALL_PAIRS = (*PAIRS, *MULTI_PAIRS)
LAGS = range(3)
"""Steps that are planned ahead of the oldest one that has not ended."""

NUM_SCHEDULES_WITH_WINDOWS = 5
"""Of each pair and each shape of groups."""

SEEDS = {("store", "prefill_first", "layerwise"): 12, ("store", "decode_first", "layerwise"): 18}
"""Which reach soon what is rare for the pair: loads in part that are taken up."""

REACHING = (*PAIRS[:1], *PAIRS[2:4], PAIRS[7], *MULTI_PAIRS[1:2], *MULTI_PAIRS[4:5])
"""A pull, pushes in two orders, a store by layers, and mixtures of a store with both."""

MAX_SCHEDULES_PER_DEFECT = 1500


@pytest.mark.parametrize("pair", ALL_PAIRS, ids="-".join)
def test_any_schedule_gives_the_right_tokens_and_returns_every_block(pair: Pair, thoroughness: float) -> None:
    @settings(
        max_examples=max(int(NUM_SCHEDULES * thoroughness), len(LAGS)),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), length=st.integers(40, 500), lag=st.sampled_from(LAGS))
    def check(seed: int, length: int, lag: int) -> None:
        world = run_schedule(random.Random(seed).randbytes(length), pair, partial(World, lag=lag))
        for engine in world.engines.values():
            scheduler = engine.core.external.connector
            assert isinstance(scheduler, MultiScheduler) == (pair in MULTI_PAIRS)
            if isinstance(scheduler, MultiScheduler):
                assert not len(scheduler.sending), "a hand-off is kept"
                assert not scheduler._loads, "a load is kept"

    check()


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS], ids=["full+window", "window", "two"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] != "store"], ids="-".join)
def test_any_schedule_of_a_model_with_windows(pair: Pair, groups: tuple[KVGroup, ...], thoroughness: float) -> None:
    rng = random.Random(f"{pair} {groups}")
    num_loaded = 0
    for number in count():
        if number >= NUM_SCHEDULES_WITH_WINDOWS * thoroughness and num_loaded:
            break
        world = run_schedule(rng.randbytes(rng.randint(40, 500)), pair, partial(World, forward=StandIn(groups)))
        num_loaded += sum(engine.core.reports.make_load().sources.remote for engine in world.engines.values())


@pytest.mark.parametrize(
    "pair",
    [pair if pair in REACHING else pytest.param(pair, marks=pytest.mark.slow) for pair in ALL_PAIRS],
    ids="-".join,
)
def test_schedules_reach_what_they_are_about(pair: Pair, thoroughness: float, monkeypatch: Patch) -> None:
    if thoroughness < 1:
        pytest.skip("this is about all schedules together")
    rng = random.Random(SEEDS.get(pair, 11))
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
    num_parts, num_fallbacks, most_ahead = 0, 0, set[tuple[int, int]]()
    resume = Request.resume

    def counted(self: Request, num_tokens: int) -> None:
        nonlocal num_parts
        num_parts += 1
        resume(self, num_tokens)

    monkeypatch.setattr(Request, "resume", counted)
    for _ in range(1000):
        world = run_schedule(rng.randbytes(rng.randint(200, 500)), pair)
        for engine in world.engines.values():
            load = engine.core.reports.make_load()
            seen["preemptions"] += load.preemptions
            seen["remote"] += load.sources.remote
            seen["failed loads"] += load.load_failures
            if isinstance(engine.core.external.connector, MultiScheduler):
                num_fallbacks += engine.core.external.connector._num_fallbacks.total()
        most_ahead.add((world.max_lag, world.most_ahead))
        seen["restarts"] += world.num_restarts
        seen["retries"] += sum(client.flow.attempt > 0 for client in world.clients)
        seen["second readers"] += world.num_resumed
        seen["late masks"] += world.num_late
        seen["aborts"] += sum(client.aborted for client in world.clients)
        seen["finished"] += sum(client.flow.finish_reason is not None for client in world.clients)
        ahead = most_ahead >= {(lag, lag) for lag in LAGS}
        rare = {"store": num_parts, "store+pull": num_fallbacks or pair[1:] != ("prefill_first", "async")}
        if all(seen.values()) and ahead and rare.get(pair[0], True):
            return
    pytest.fail(
        f"of {seen}, {most_ahead} steps ahead, {num_parts} loads in part and {num_fallbacks} that were taken over "
        "something is missing"
    )


PLANTED = [(defect, pair, lag, None, first[lag]) for defect, pair, first in DEFECTS for lag in LAGS]
PLANTED += [(defect, pair, lag, None, first[lag]) for defect, pair, first in LATE_DEFECTS for lag in LAGS if lag]
PLANTED += [(defect, pair, lag, 3, first[lag]) for defect, pair, first in DRAFT_DEFECTS for lag in LAGS]


@pytest.mark.parametrize(
    ("defect", "pair", "lag", "num_drafts", "first"),
    PLANTED,
    ids=[f"{defect.__name__}-{lag}" for defect, _, lag, *_ in PLANTED],
)
def test_schedules_find_the_defect(
    defect: Callable[[Patch], None], pair: Pair, lag: int, num_drafts: int | None, first: int, monkeypatch: Patch
) -> None:
    """The schedule that is known to find it, or one of those behind."""
    defect(monkeypatch)
    for number in range(first, first + MAX_SCHEDULES_PER_DEFECT):
        rng = random.Random(number)
        try:
            run_schedule(rng.randbytes(rng.randint(100, 500)), pair, partial(World, lag=lag, num_drafts=num_drafts))
        except Exception:  # any: a wrong token, a broken book, or the engine falling over it
            return
    pytest.fail(f"{MAX_SCHEDULES_PER_DEFECT} schedules did not notice: {defect.__doc__}")
