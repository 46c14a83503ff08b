"""Tiers beside a hand-off: what pools have no room for, and what killed engines had, is found again, and is right."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Running
from equality import (
    CHUNKED,
    SMALL_PREFILL_POOL,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    run_all,
)
from kills import kill_engines
from nixl_rig import needs_nixl
from serving_checks import complete_one

ONE_OF_EACH = ("--prefill", "1", "--decode", "1")
PATIENT = ("--connector-config", "store.lookup_timeout_s=20", "store.min_hit_tokens=1")
"""Where hits are counted: a busy machine makes no miss, and the rest behind a hit in the pool is loaded."""


def tier_hits(deployment: Running) -> dict[str, int]:
    """Values read by tier, such as "0-host", over all engines."""
    hits: dict[str, int] = {}
    for line in deployment.get("/metrics").text.splitlines():
        if line.startswith("pdkv_connector_tier_hits_total") and "store/" in line:
            tier = line.partition("store/")[2].partition('"')[0]
            hits[tier] = hits.get(tier, 0) + int(float(line.split()[-1]))
    return hits


@pytest.fixture(scope="module", params=["shared_memory", pytest.param("nixl", marks=[needs_nixl, pytest.mark.slow])])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deployment(workload: Workload, connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Beside shared memory files lie below host memory; its engines are killed again and again."""
    store = ["--kv-store", f"file://{tmp_path_factory.mktemp('tiers')}/kv"] if connector == "shared_memory" else []
    flags = [*ONE_OF_EACH, *SMALL_PREFILL_POOL, *CHUNKED, "--connector", connector, *store, *PATIENT]
    with deployed(workload, *flags, "--kv-host-memory", "64MiB") as running:
        yield running


def test_evicted_and_killed_kv_is_found_in_host_memory(workload: Workload, deployment: Running, connector: str) -> None:
    passes = [run_all(deployment, workload) for _ in range(2)]
    kill_engines(deployment)
    passes.append(run_all(deployment, workload))
    (engine, _) = deployment.get("/topology").json()["engines"]
    assert f"connector {connector}, 64 MiB of host memory each" in deployment.log
    hits = tier_hits(deployment)
    assert {f"multi/0-{connector}", "multi/1-store"} <= set(engine["connector_parts"])
    assert hits["0-host"] > 0 == hits.get("1-file", 0), "what host memory has is not looked for below it"
    for books in passes:
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    whole = sum((len(e.prompt) - 1) // 64 * 64 for e in workload.expected)
    for books in passes[1:]:
        sources = books.sources("prefill")
        assert sources["store"] > 0, books
        assert sources["store"] + sources["local_hit"] >= whole, "no whole value is computed a second time"


def test_a_turn_finds_what_the_other_engine_wrote_when_both_have_died(workload: Workload, deployment: Running) -> None:
    prompt = list(workload.expected[0].prompt[100::-1])  # of no other test
    output, _ = complete_one(deployment, prompt=prompt, max_tokens=160)
    turn = [*prompt, *output, 7, 8, 9]
    kill_engines(deployment)
    answer, books = complete_one(deployment, prompt=turn, max_tokens=8)
    assert books.sources("prefill")["store"] == 256  # whole values of 264 tokens; the answer's are decode's
    assert books.total("prefill") == books.total("decode") == len(turn)
    computed, books = complete_one(deployment, prompt=turn, max_tokens=8, cache_salt="other")
    assert books.sources("prefill")["computed"] == len(turn)
    assert answer == computed


@pytest.mark.slow  # that a hit is copied upwards is a test of stores, too
def test_what_a_lower_tier_has_is_found_there_once_and_then_in_host_memory(workload: Workload, tmp_path: Path) -> None:
    """Two launches: the second one's host memory is empty. Pools of peers, which p2p does not find, have no part."""
    store = ["--connector", "p2p", "--kv-host-memory", "64MiB", "--kv-store", f"file://{tmp_path}/kv"]
    flags = [*ONE_OF_EACH, *SMALL_PREFILL_POOL, *CHUNKED, *store, *PATIENT]
    with deployed(workload, *flags) as deployment:
        run_all(deployment, workload)
    with deployed(workload, *flags) as deployment:
        first, after_first = run_all(deployment, workload), tier_hits(deployment)
        second, after_second = run_all(deployment, workload), tier_hits(deployment)
    assert after_first["1-file"] > 0
    assert after_second["1-file"] == after_first["1-file"], "promoted by its hit"
    assert after_second["0-host"] > after_first["0-host"]
    for books in (first, second):
        assert books.sources("prefill")["store"] > 0
        check_decode_computed_nothing(books)
