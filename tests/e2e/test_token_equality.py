"""Whatever the model's family, topology, chunking, preemption and cache: the tokens are those of transformers, and none
of the prompt is computed by decode (F1, F2). Other files do the same with other connectors and models.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    CHUNKED,
    PREEMPTING,
    TOPOLOGIES,
    Workload,
    deployed,
    greedy_workload,
    run_twice,
    run_until_preempted,
)
from small_models import FEATURES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", *FEATURES])
def workload(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Workload:
    model = hf_model(request.param, initializer_range=0.2, **FEATURES.get(request.param, {}))
    return greedy_workload(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("topology", "chunks"), [("1P1D", CHUNKED), ("2P4D", ())], ids=["1P1D-chunked", "2P4D-whole"])
def test_first_pass_and_replay(workload: Workload, topology: str, chunks: tuple[str, ...]) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *chunks) as deployment:
        first, replay = run_twice(deployment, workload)
    # Each prompt's full blocks are in some cache now.
    assert replay.sources("prefill")["computed"] < first.sources("prefill")["computed"] / 2


def test_preemption_on_both_sides(workload: Workload) -> None:
    """F9, F12."""
    with deployed(workload, *TOPOLOGIES["1P1D"], *PREEMPTING) as deployment:
        run_until_preempted(deployment, workload)
