"""`multi` of memory connectors under the random schedules of the hand-off state machine (F1, F2, F4, F9)."""

import logging
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_machine.defects import Pair
from state_machine.host import MULTI_PAIRS, run_schedule

from pdkv.connectors.multi.scheduler import MultiScheduler

NUM_SCHEDULES = 100


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Expired leases and failed loads are what these schedules are about: no log line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("pair", MULTI_PAIRS, ids="-".join)
def test_any_schedule_gives_the_right_tokens_and_returns_every_block(pair: Pair, thoroughness: float) -> None:
    @settings(
        max_examples=int(NUM_SCHEDULES * thoroughness) // len(MULTI_PAIRS),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), length=st.integers(40, 500))
    def check(seed: int, length: int) -> None:
        world = run_schedule(random.Random(seed).randbytes(length), pair)
        for engine in world.engines.values():
            scheduler = engine.core.external.connector
            assert isinstance(scheduler, MultiScheduler)
            assert not len(scheduler.sending), "a hand-off is kept"
            assert not scheduler.num_loads, "a load is kept"

    check()


@pytest.mark.parametrize("pair", MULTI_PAIRS, ids="-".join)
def test_schedules_reach_what_they_are_about(pair: Pair, thoroughness: float) -> None:
    if thoroughness < 1:
        pytest.skip("this is about all schedules together")
    rng = random.Random(7)
    seen = {"remote": 0, "failed loads": 0, "restarts": 0, "aborts": 0, "finished": 0}
    num_fallbacks = 0
    for _ in range(1000):
        world = run_schedule(rng.randbytes(rng.randint(200, 500)), pair)
        for engine in world.engines.values():
            load = engine.core.reports.make_load()
            seen["remote"] += load.sources.remote
            seen["failed loads"] += load.load_failures
            assert isinstance(engine.core.external.connector, MultiScheduler)
            num_fallbacks += engine.core.external.connector.num_fallbacks
        seen["restarts"] += world.num_restarts
        seen["aborts"] += sum(client.aborted for client in world.clients)
        seen["finished"] += sum(client.flow.finish_reason is not None for client in world.clients)
        if all(seen.values()) and (num_fallbacks or pair != ("store+pull", "prefill_first", "async")):
            return
    pytest.fail(f"of {seen} and {num_fallbacks} loads that were taken over something is missing")
