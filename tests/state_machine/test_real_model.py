"""Random schedules of the hand-off state machine on a real model: the tokens are those of transformers (F1, F2)."""

import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from state_machine.host import PAIRS, World, run_schedule
from state_machine.real_model import RealModel

NUM_SCHEDULES_PER_PAIR = 12


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Expired leases and failed loads are what these schedules are about: no log line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path]) -> RealModel:
    return RealModel(hf_model("qwen3", initializer_range=0.2, num_hidden_layers=2, head_dim=16))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_real_model_says_the_right_tokens_in_any_schedule(pair: tuple[str, str, str], model: RealModel) -> None:
    rng = random.Random("-".join(pair))
    num_finished = num_loaded = 0
    for _ in range(NUM_SCHEDULES_PER_PAIR):
        world = run_schedule(rng.randbytes(rng.randint(150, 500)), pair, partial(World, forward=model))  # type: ignore[arg-type]
        num_finished += sum(client.flow.finish_reason is not None for client in world.clients)
        for engine in world.engines.values():
            sources = engine.core._make_load().sources
            num_loaded += sources.remote + sources.store
    assert num_finished
    assert num_loaded
