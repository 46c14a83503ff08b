"""Every other model family over prefill and decode engines says what transformers says (F1, F2)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    PREEMPTING,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
    run_until_preempted,
)
from small_models import FEATURES

FAMILIES = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen2", "phi3")), "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
def workload(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Workload:
    model = hf_model(request.param, initializer_range=0.2, **FEATURES[request.param])
    return greedy_workload(model, tmp_path_factory.mktemp(request.param))


def test_first_pass_and_replay(workload: Workload) -> None:
    with deployed(workload, *TOPOLOGIES["2P4D"]) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)


def test_preemption_on_both_sides(workload: Workload) -> None:
    with deployed(workload, *TOPOLOGIES["1P1D"], *PREEMPTING) as deployment:
        run_until_preempted(deployment, workload)
