"""Any backend between any engines: the tokens are those of transformers; decode computes none of the prompt (F20)."""

import asyncio
import itertools
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Running, launches
from equality import (
    AMPLE_POOL_BLOCKS,
    CHUNKED,
    PREEMPTING,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_replies,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
    run_until_preempted,
)
from faults.replies import STREAM, ask_all_and_move
from kills import KILLS_BOUND_S, check_that_no_client_notices, num_migrations, right_answers
from matrix_rows import BACKENDS, FAMILIES, Row, all_rows, cover, family_rows, latent_rows, window_cover, window_rows
from oracle import check_departures
from serving_checks import complete_all, serve_directory, settled_books
from small_models import FEATURES
from traffic import wait_until_true

from pdkv.host.processor import emulates_bfloat16
from pdkv.launch.router_admin import RouterAdmin

RESULTS = "MATRIX_RESULTS"
"""Names a file that each passed row is appended to. Not PDKV_…: a launcher refuses options that it does not know."""

HOST_BYTES = 24 * (64 << 10)
"""Of each engine's host memory: pages for fewer blocks than its prompts have."""

FOUND_AGAIN = 129
"""Tokens of the prompt that is to be found in host memory: two values, and one token."""

EVERY_FAMILY = ("llama", "mistral", "qwen2", "qwen3", *FAMILIES, "deepseek_v3")

MOVE_AT = 200
"""The event, over all forty streams, from which on those of an engine go on elsewhere."""


@pytest.fixture(scope="session")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Four KV heads, so that two ranks of one side share a rank of the other."""
    model = hf_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=16, initializer_range=0.2)
    return greedy_workload(model, tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="session")
def windows(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """One layer that sees all, and two with a window of two blocks: three KV groups."""
    model = hf_model(
        "qwen3", num_attention_heads=8, num_key_value_heads=4, head_dim=16, initializer_range=0.2, **FEATURES["qwen3"]
    )
    return greedy_workload(model, tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="session")
def latent(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """One row for each token and layer, which both of two ranks have."""
    return greedy_workload(hf_model("deepseek_v3", initializer_range=0.2), tmp_path_factory.mktemp("latent"))


def check_row(row: Row, workload: Workload, directory: Path, flags: tuple[str, ...] = ()) -> None:
    """First pass and replay; noted for the table."""
    started = time.monotonic()
    memory = str(max(row.ranks) * AMPLE_POOL_BLOCKS * workload.block_bytes)  # ranks may hold the same
    with (
        BACKENDS[row.backend](directory=directory) as chosen,
        deployed(workload, *row.flags, *chosen.flags, "--kv-cache-memory", memory, *flags) as deployment,
    ):
        first, replay = (run_all(deployment, workload) for _ in range(2))
    for books in (first, replay):
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    if results := os.environ.get(RESULTS):
        with open(results, "a") as file:
            file.write(f"{row}: passed in {time.monotonic() - started:.0f} s\n")


@pytest.mark.parametrize("row", cover(), ids=str)
def test_cover(row: Row, workload: Workload, tmp_path: Path) -> None:
    check_row(row, workload, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in all_rows() if row not in cover()], ids=str)
def test_whole_matrix(row: Row, workload: Workload, tmp_path: Path) -> None:
    check_row(row, workload, tmp_path)


@pytest.mark.parametrize("row", window_cover(), ids=str)
def test_cover_of_windows(row: Row, windows: Workload, tmp_path: Path) -> None:
    check_row(row, windows, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in window_rows() if row not in window_cover()], ids=str)
def test_windows_over_every_backend(row: Row, windows: Workload, tmp_path: Path) -> None:
    check_row(row, windows, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", family_rows(), ids=str)
def test_families_over_each_kind_of_connector(row: Row, hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """With chunks of prompts."""
    workload = greedy_workload(hf_model(row.model, initializer_range=0.2), tmp_path / "model")
    check_row(row, workload, tmp_path, CHUNKED)


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_families_in_pools_that_are_too_small_and_under_kills(
    family: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Preempted, found again in host memory that evicts, and moved amid streams."""
    workload = greedy_workload(hf_model(family, initializer_range=0.2), tmp_path / "model")
    memory = ("--kv-host-memory", str(HOST_BYTES), "--connector-config", "store.lookup_timeout_s=20")
    alone, others = (
        replace(workload, expected=[e for e in workload.expected if (len(e.prompt) == FOUND_AGAIN) == is_alone])
        for is_alone in (True, False)
    )
    with deployed(workload, *TOPOLOGIES["2P2D"], *PREEMPTING, *memory) as deployment:
        run_until_preempted(deployment, others)
        assert "evictions" in tier_events(deployment)
        wait_until_true(lambda: is_found_in_host_memory(deployment, alone), "a hit in host memory", KILLS_BOUND_S)
        check_that_no_client_notices(deployment, right_answers(deployment), "decode-0")


def is_found_in_host_memory(deployment: Running, alone: Workload) -> bool:
    """Whether host memory ever had it, as it must when it was asked for alone on either engine: no pool has it then."""
    check_replies(complete_all(deployment, alone.bodies), alone.expected)
    asyncio.run(RouterAdmin(deployment.run_dir).order_cache("clear", {"tier": "pool"}))
    return "hits" in tier_events(deployment)


def tier_events(deployment: Running) -> set[str]:
    """What host memory counted, "hits" or "evictions", over all engines."""
    return set(re.findall(r"tier_(hits|evictions)_total{.*0-host.*} [1-9]", deployment.get("/metrics").text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"), list(zip(EVERY_FAMILY, itertools.cycle(("p2p", "store redis")), strict=False))
)
def test_families_moved_in_mid_stream(family: str, backend: str, hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """With chunks of prompts, off an engine that is drained."""
    workload = greedy_workload(hf_model(family, initializer_range=0.2), tmp_path / "model")
    common = {"return_token_ids": True, "allowed_token_ids": None, **STREAM}
    cases = {str(i): {**body, **common} for i, body in enumerate(workload.bodies)}
    flags = ("--prefill", "1", "--decode", "2", *CHUNKED)
    with BACKENDS[backend](directory=tmp_path) as chosen, deployed(workload, *flags, *chosen.flags) as deployment:

        def move_some() -> int:
            replies = ask_all_and_move(deployment, cases, "moved", "decode-0", MOVE_AT)
            assert [reply.token_ids[0] for reply in replies.values()] == [e.output for e in workload.expected]
            return num_migrations(deployment)

        wait_until_true(move_some, "streams that move", KILLS_BOUND_S)
        check_decode_computed_nothing(settled_books(deployment, lambda now: True))


@pytest.mark.slow
@pytest.mark.skipif(emulates_bfloat16(), reason="the processor has no products of bfloat16")
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_bfloat16_departs_where_its_rounding_decides(
    family: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, rng = hf_model(family, "bfloat16", initializer_range=0.2), random.Random(0)
    prompts = [rng.choices(range(2, 384), k=length) for length in (300, 1, 17, 130, 64, 200, 33, 90)]
    bodies = [{"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0} for prompt in prompts]
    with launches(serve_directory(model, tmp_path)) as launch:
        replies = complete_all(launch("--dtype", "bfloat16", *TOPOLOGIES["1P1D"], *CHUNKED), bodies)
    check_departures(model, prompts, [reply["choices"][0]["token_ids"] for reply in replies])


@pytest.mark.slow
@pytest.mark.parametrize("row", latent_rows(), ids=str)
def test_latent_rows_over_every_backend(row: Row, latent: Workload, tmp_path: Path) -> None:
    check_row(row, latent, tmp_path)
