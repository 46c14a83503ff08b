"""Engines over `multi`: shared memory hands prompts over, a store keeps them beyond their engines' lives."""

from pathlib import Path

import pytest
from equality import (
    CHUNKED,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    run_all,
    run_twice,
)
from kills import kill_engines


def multi(*names: str, **options: str) -> list[str]:
    """Flags for a multi of these connectors."""
    pairs = [
        f"connectors={','.join(names)}",
        *(f"{name.replace('__', '.')}={value}" for name, value in options.items()),
    ]
    return ["--connector", "multi", "--connector-config", *pairs]


@pytest.mark.slow  # tests/e2e/test_kv_tiers.py has such a pair, whose engines are killed, in every run
def test_tokens_over_shared_memory_and_a_store(workload: Workload, tmp_path: Path) -> None:
    """Two passes, then other engines: what they find is the store's, and it is right."""
    flags = multi("shared_memory", "shared_storage", shared_storage__path=f"{tmp_path}/kv")
    with deployed(workload, *TOPOLOGIES["1P1D"], "--decode-tp", "2", *CHUNKED, *flags) as deployment:
        first, _ = run_twice(deployment, workload)
        kill_engines(deployment)
        later = run_all(deployment, workload)
    check_decode_computed_nothing(later)
    check_undisturbed(later)
    assert later.sources("prefill")["store"] > first.sources("prefill")["store"]


@pytest.mark.slow  # the conformance kit and the state machine have such pairs in every run
@pytest.mark.parametrize("other", ["shared_memory", "shared_storage"])
def test_tokens_over_a_push_and_what_finds_content(workload: Workload, tmp_path: Path, other: str) -> None:
    """Hand-offs go by the push; what was computed before is found by the other one."""
    own = {"shared_storage__path": f"{tmp_path}/kv"} if other == "shared_storage" else {}
    with deployed(workload, *TOPOLOGIES["1P1D"], *CHUNKED, *multi("p2p", other, **own)) as deployment:
        run_twice(deployment, workload)
