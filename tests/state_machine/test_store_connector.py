"""Random schedules of store connectors on a real model: late, lost and failed calls of the store, evictions, aborts,
restarts. The tokens are those of transformers, and all blocks, buffers and transfers come back (F1, F2, F4, F9, F10).
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from deployments import link_text_model
from state_machine.host import run_schedule
from state_machine.real_model import RealModel
from state_machine.store_world import StoreWorld

GROUPS = {
    "one group": {},
    "two groups": {
        "use_sliding_window": True, "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
FEW, MANY = 5, 60
PAIRS = [(order, load) for order in ("prefill_first", "decode_first") for load in ("async", "layerwise")]
SCHEDULES = [
    ("one group", PAIRS[0], FEW),
    ("two groups", PAIRS[3], FEW),
    *(pytest.param(name, pair, MANY, marks=pytest.mark.slow) for name in GROUPS for pair in PAIRS),
]


class WholeUnits(RealModel):
    """A world's hash blocks are its blocks, a store's are units: both have 16 tokens."""

    block_sizes = (16, 16, 16)


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> WholeUnits:
    path = hf_model("qwen3", initializer_range=0.2, num_hidden_layers=2, head_dim=16, **GROUPS[request.param])
    return WholeUnits(link_text_model(path, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("model", "pair", "num_schedules"), SCHEDULES, indirect=["model"], ids=str)
def test_a_store_may_be_late_lose_and_fail_whatever_it_likes(
    pair: tuple[str, str], num_schedules: int, model: WholeUnits
) -> None:
    rng = random.Random("-".join(pair))
    num_finished = num_loaded = num_failed = 0
    order, load = pair
    for _ in range(num_schedules):
        world = run_schedule(
            rng.randbytes(rng.randint(150, 500)),
            ("store", order, load),  # type: ignore[arg-type]
            partial(StoreWorld, forward=model),
        )
        num_finished += sum(client.flow.finish_reason is not None for client in world.clients)
        for engine in world.engines.values():
            report = engine.core.reports.make_load()
            num_loaded += report.sources.remote + report.sources.store
            num_failed += report.load_failures
    assert num_finished
    assert num_loaded
    assert num_failed
