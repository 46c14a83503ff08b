"""Tiers beside a hand-off: what pools have no room for, and what killed engines had, is found again, and is right."""

import os
import signal
from collections.abc import Callable
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
    greedy_workload,
    run_all,
)
from nixl_rig import needs_nixl
from serving_checks import complete_one, settled_books
from traffic import wait_for_engines

ONE_OF_EACH = ("--prefill", "1", "--decode", "1")
PATIENT = ("--connector-config", "store.lookup_timeout_s=20", "store.min_hit_tokens=1")
"""Where hits are counted: a busy machine makes no miss, and the rest behind a hit in the pool is loaded."""


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


def tier_hits(deployment: Running) -> dict[str, int]:
    """Values read by tier, such as "0-host", over all engines."""
    hits: dict[str, int] = {}
    for line in deployment.get("/metrics").text.splitlines():
        if line.startswith("pdkv_connector_tier_hits_total") and "store/" in line:
            tier = line.partition("store/")[2].partition('"')[0]
            hits[tier] = hits.get(tier, 0) + int(float(line.split()[-1]))
    return hits


def kill_engines(deployment: Running) -> None:
    """All of them at once, by SIGKILL; returns when others are there and nothing is counted."""
    killed = [*deployment.pids().values()]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for_engines(deployment, killed)
    settled_books(deployment, lambda now: now.total("prefill") == now.total("decode") == 0)


@pytest.mark.parametrize(
    ("connector", "below"), [("shared_memory", "1-file"), pytest.param("nixl", "", marks=needs_nixl)]
)
def test_evicted_and_killed_kv_is_found_in_host_memory(
    workload: Workload, tmp_path: Path, connector: str, below: str
) -> None:
    store = ["--kv-store", f"file://{tmp_path}/kv"] if below else []
    flags = [*ONE_OF_EACH, *SMALL_PREFILL_POOL, *CHUNKED, "--connector", connector, *store, *PATIENT]
    with deployed(workload, *flags, "--kv-host-memory", "64MiB") as deployment:
        passes = [run_all(deployment, workload) for _ in range(2)]
        kill_engines(deployment)
        passes.append(run_all(deployment, workload))
        (engine, _) = deployment.get("/topology").json()["engines"]
        assert f"connector {connector}, 64 MiB of host memory each" in deployment.log
        hits = tier_hits(deployment)
    assert {f"multi/0-{connector}", "multi/1-store"} <= set(engine["connector_parts"])
    assert not below or hits["0-host"] > 0 == hits[below], "what host memory has is not looked for below it"
    for books in passes:
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    whole = sum((len(e.prompt) - 1) // 64 * 64 for e in workload.expected)
    for books in passes[1:]:
        sources = books.sources("prefill")
        assert sources["store"] > 0, books
        assert sources["store"] + sources["local_hit"] >= whole, "no whole value is computed a second time"


def test_a_turn_finds_what_the_other_engine_wrote_when_both_have_died(workload: Workload) -> None:
    prompt = list(workload.expected[0].prompt[:100])
    with deployed(workload, *ONE_OF_EACH, "--kv-host-memory", "64MiB", *PATIENT) as deployment:
        output, _ = complete_one(deployment, prompt=prompt, max_tokens=160)
        turn = [*prompt, *output, *workload.expected[1].prompt, 7, 8, 9]
        kill_engines(deployment)
        answer, books = complete_one(deployment, prompt=turn, max_tokens=8)
        assert books.sources("prefill")["store"] == 256  # whole values of 259 tokens; the answer's are decode's
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
