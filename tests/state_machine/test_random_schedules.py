"""The hand-off state machine under random schedules, in every legal mode and order (F1, F2, F4, F9, F10, F11)."""

import logging
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_machine.defects import DEFECTS, Pair, Patch
from state_machine.host import PAIRS, run_schedule

from pdkv.engine.request import Request

NUM_SCHEDULES = 10_080
NUM_SHARDS = 2
"""Shards of one pair can run on different cores."""

MAX_SCHEDULES_PER_DEFECT = 1500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Expired leases and failed loads are what these schedules are about: no log line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_schedule_gives_the_right_tokens_and_returns_every_block(
    pair: Pair, shard: int, thoroughness: float
) -> None:
    @settings(
        max_examples=int(NUM_SCHEDULES * thoroughness) // len(PAIRS) // NUM_SHARDS,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), length=st.integers(40, 500))
    def check(seed: int, length: int) -> None:
        run_schedule(random.Random(seed * NUM_SHARDS + shard).randbytes(length), pair)

    check()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_schedules_reach_what_they_are_about(pair: Pair, thoroughness: float, monkeypatch: Patch) -> None:
    if thoroughness < 1:
        pytest.skip("this is about all schedules together")
    rng = random.Random(7)
    seen = {"preemptions": 0, "remote": 0, "failed loads": 0, "restarts": 0, "retries": 0, "aborts": 0, "finished": 0}
    num_parts = 0
    resume = Request.resume

    def counted(self: Request, num_tokens: int) -> None:
        nonlocal num_parts
        num_parts += 1
        resume(self, num_tokens)

    monkeypatch.setattr(Request, "resume", counted)
    for _ in range(180):
        world = run_schedule(rng.randbytes(rng.randint(200, 500)), pair)
        for engine in world.engines.values():
            load = engine.core._make_load()
            seen["preemptions"] += load.preemptions
            seen["remote"] += load.sources.remote
            seen["failed loads"] += load.load_failures
        seen["restarts"] += world.num_restarts
        seen["retries"] += sum(client.flow.attempt > 0 for client in world.clients)
        seen["aborts"] += sum(client.aborted for client in world.clients)
        seen["finished"] += sum(client.flow.finish_reason is not None for client in world.clients)
    assert all(seen.values()), seen
    assert num_parts or pair[0] != "store", "no load came in part"


@pytest.mark.parametrize(("defect", "pair"), DEFECTS, ids=[defect.__name__ for defect, _ in DEFECTS])
def test_schedules_find_the_defect(defect: object, pair: Pair, monkeypatch: Patch) -> None:
    assert callable(defect)
    defect(monkeypatch)
    rng = random.Random(11)
    for _ in range(MAX_SCHEDULES_PER_DEFECT):
        try:
            run_schedule(rng.randbytes(rng.randint(100, 500)), pair)
        except Exception:  # any: a wrong token, a broken book, or the engine falling over it
            return
    pytest.fail(f"{MAX_SCHEDULES_PER_DEFECT} schedules did not notice: {defect.__doc__}")
