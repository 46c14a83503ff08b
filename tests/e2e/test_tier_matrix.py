"""Tiers beside every hand-off: pools and tiers that are too small, engines and servers killed; the tokens stay."""

from collections.abc import Callable
from pathlib import Path

import pytest
from deployments import Running
from equality import (
    CHUNKED,
    SMALL_PREFILL_POOL,
    Workload,
    check_decode_computed_nothing,
    deployed,
    greedy_workload,
    run_all,
)
from kills import kill_engines
from nixl_rig import needs_nixl
from prometheus_client.parser import text_string_to_metric_families
from serving_checks import Books
from small_models import FEATURES
from tier_rows import TIERS, TierRow, Tiers, all_pairs, pairs_of, tier_rows

DECODE_BLOCKS = 120
"""A decode engine evicts, too, but seldom preempts."""


@pytest.fixture(scope="module")
def workloads(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    """A model whose layers see all, and one of which half have a window of two blocks: two KV groups."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    models = {
        "one group": hf_model("llama", initializer_range=0.2),
        "windows": hf_model("qwen3", head_dim=16, initializer_range=0.2, **(FEATURES["qwen3"] | layers)),
    }
    return {name: greedy_workload(path, tmp_path_factory.mktemp("tiers")) for name, path in models.items()}


def count_by_tier(deployment: Running, tiers: Tiers, name: str) -> dict[str, int]:
    """A counter's sum over all engines, for each tier."""
    counts = dict.fromkeys(tiers.names, 0)
    for family in text_string_to_metric_families(deployment.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and (tier := sample.labels["connector"].rpartition("/")[2]) in counts:
                counts[tier] += int(sample.value)
    return counts


def check_pass(deployment: Running, workload: Workload) -> Books:
    """The right tokens, each prompt counted once by source on either side, and nothing that was read was damaged."""
    books = run_all(deployment, workload)
    check_decode_computed_nothing(books)
    assert not any(books.of("kv_damaged_values", role) for role in books.roles), books
    return books


def check_row(row: TierRow, workload: Workload, directory: Path) -> None:
    """Compute and write; find again what the pools have lost; and once more behind the death of all but host memory.

    A server that hands prompts over is left alive: host memory may lose what only it has before it is handed over.
    """
    decode_pool = ("--decode-kv-cache-memory", str(DECODE_BLOCKS * workload.block_bytes))
    with (
        TIERS[row.tiers](row, directory) as tiers,
        deployed(workload, *row.flags, *SMALL_PREFILL_POOL, *decode_pool, *CHUNKED, *tiers.flags) as deployment,
    ):
        check_pass(deployment, workload)
        again = check_pass(deployment, workload)
        hits = count_by_tier(deployment, tiers, "pdkv_connector_tier_hits_total")
        evicted = count_by_tier(deployment, tiers, "pdkv_tier_evictions_total")
        if tiers.server is not None and row.handoff != "store":
            tiers.server.restart()
        kill_engines(deployment)
        behind_deaths = check_pass(deployment, workload)
        later_hits = count_by_tier(deployment, tiers, "pdkv_connector_tier_hits_total")
    for books in (again, behind_deaths):
        assert books.sources("prefill")["store"] > 0, books
    for tier in tiers.names:
        assert hits[tier] + later_hits[tier] > 0, (tier, hits, later_hits)
    assert later_hits["0-host"] > 0, "host memory is kept by the launcher"
    assert evicted["0-host"] > 0 or (row.tiers, row.handoff) == ("host", "store"), evicted


def needs(row: TierRow) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a row."""
    return (pytest.mark.slow, *([needs_nixl] if row.handoff.startswith("nixl") else []))


@pytest.mark.parametrize("row", [pytest.param(row, marks=needs(row), id=str(row)) for row in tier_rows()])
def test_tokens_over_tiers_beside_hand_offs(row: TierRow, workloads: dict[str, Workload], tmp_path: Path) -> None:
    check_row(row, workloads[row.model], tmp_path)


def test_every_pair_is_in_a_row() -> None:
    assert set().union(*map(pairs_of, tier_rows())) == all_pairs()


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in tier_rows() if row.model == "windows"][:4], ids=str)
def test_latent_rows_over_tiers(
    row: TierRow, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a model with one group; the row names the topology."""
    model = hf_model("deepseek_v3", initializer_range=0.2)
    check_row(row, greedy_workload(model, tmp_path_factory.mktemp("latent")), tmp_path_factory.mktemp("tiers"))
