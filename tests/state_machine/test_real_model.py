"""Random schedules of the hand-off state machine on a real model, at every level of compiled kernels and with every
proposer: the tokens are those of transformers (F1, F2).
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from deployments import link_text_model
from isas import kernels_of
from random_proposer import RandomProposer
from state_machine.host import PAIRS, World, run_schedule
from state_machine.real_model import METHODS, RealModel

from pdkv.engine.proposers.registry import PROPOSERS
from pdkv.kernels.compiled import levels

FEW, MANY = 6, 60
"""Each number of steps ahead with and without a proposer in six; more until each has had steps ahead."""

SCHEDULES = [
    *(pytest.param(PAIRS[i], FEW, id="-".join(PAIRS[i])) for i in (0, 2, 5)),
    *(pytest.param(pair, MANY, marks=pytest.mark.slow, id="-".join(pair) + "-many") for pair in PAIRS),
]
LAGS = 3


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    path = hf_model("qwen3", initializer_range=0.2, num_hidden_layers=2, head_dim=16)
    return RealModel(link_text_model(path, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("pair", "num_schedules"), SCHEDULES)
def test_a_real_model_says_the_right_tokens_in_any_schedule(
    pair: tuple[str, str, str], num_schedules: int, model: RealModel
) -> None:
    rng = random.Random("-".join(pair))
    num_finished = num_loaded = 0
    ahead, guessed = set(), set()
    wanted = {(lag, guesses) for lag in range(1, LAGS) for guesses in (False, True)}
    kinds = {PROPOSERS.load(method) if method else RandomProposer for method in METHODS}
    all_kinds = {(lag, kind) for lag in range(LAGS) for kind in kinds} if num_schedules == MANY else set()
    for i in range(10 * num_schedules):
        if i >= num_schedules and ahead == wanted and guessed >= all_kinds:
            break
        make_world = partial(World, forward=model, lag=i % LAGS, num_drafts=3 * (i % 2))
        with kernels_of(levels()[(i + i // 6) % len(levels())]) if levels() else nullcontext():
            world = run_schedule(rng.randbytes(rng.randint(150, 500)), pair, make_world)  # type: ignore[arg-type]
        ahead |= {(i % LAGS, world.num_drafts > 0)} if world.most_ahead else set()
        num_finished += sum(client.flow.finish_reason is not None for client in world.clients)
        for engine in world.engines.values():
            load = engine.core.reports.make_load()
            num_loaded += load.sources.remote + load.sources.store
            guessed |= {(i % LAGS, type(engine.core.executor._proposer))} if load.drafts.tokens else set()
    assert ahead == wanted
    assert guessed >= all_kinds
    assert num_finished
    assert num_loaded
