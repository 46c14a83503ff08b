"""`make gpu` without a GPU: its parts run, each in a process of its own, and what one does leaves the others alone."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from traffic import wait_until_true

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import families, host_gaps, launch
from benchmarks.gpu.dry_run import dry_run
from benchmarks.models import FAMILIES
from benchmarks.report import Claim
from pdkv.models.family import FAMILIES as SERVED

ROOT = Path(__file__).parent.parent.parent


def run(out: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--scale", "tiny", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def claims_of(out: Path) -> dict[str, list[Any]]:
    (path,) = out.glob("gpu-on-cpu-*.json")
    return {part: outcome["claims"] for part, outcome in json.loads(path.read_text())["benchmarks"].items()}


def is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("GPU_TEST") == mark
    except psutil.Error:  # it has ended, or is not ours
        return False


@pytest.mark.slow
def test_parts_write_one_table(tmp_path: Path) -> None:
    done = run(tmp_path, "tokens", "engine")
    claims = claims_of(tmp_path)
    assert set(claims) == {"tokens", "engine"}, done.stderr
    assert all(claim["better"] == "lower" and claim["ratio"] <= claim["limit"] for claim in claims["tokens"])
    names = [claim["name"].split(":")[0] for claim in claims["engine"]]
    assert names == [
        *2 * ["8B shape, 1 x 64"],
        *2 * ["8B shape, 64 x 64"],
        "8B shape, 64 decodes and 24 of a prompt",
        "tiny, 32 x 16 in, 4 out",
        "tiny, 4 decode",
        "tiny, 8 decode",
    ]
    (table,) = tmp_path.glob("gpu-on-cpu-*.md")
    assert "| tokens | float32" in table.read_text()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_kernels_are_right(tmp_path: Path) -> None:
    run(tmp_path, "kernels")
    ends = ("error over bound", "other tokens than on a CPU")
    errors = [claim for claim in claims_of(tmp_path)["kernels"] if claim["name"].endswith(ends)]
    assert len(errors) == 20
    assert all(claim["met"] for claim in errors)


@pytest.mark.slow
def test_the_parts_that_do(tmp_path: Path) -> None:
    done = run(tmp_path, "launch", "transfer")
    claims = claims_of(tmp_path)
    assert [claim["met"] for claim in claims["launch"]] == [True] * 3, done.stderr
    names = [claim["name"].split(":")[0] for claim in claims["transfer"]]
    assert names[1:] == ["nixl"] * 4 + ["shared_memory"] * 4


def test_how_long_a_device_waits_between_what_it_does() -> None:
    """Microseconds: half of the trace is left out, and so is its end; gaps as between kernels do not count."""
    steps = [(100.0 * i, 100.0 * i + 60.0 + 30.0 * (i % 2)) for i in range(100)]  # 40 and 10 in between
    found = host_gaps.gaps([*steps, (6000.0, 6099.0)])
    assert found == {"ms": pytest.approx(3.996), "waits ms": pytest.approx(0.04 * 19), "waits": 19, "longest ms": 0.04}


def test_what_a_device_did_is_read_from_a_trace(tmp_path: Path) -> None:
    ran = [("kernel", "gemm", 0, 10), ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 6, 8),
           ("cpu_op", "aten::mm", 0, 40)]  # fmt: skip
    events = [{"cat": cat, "name": name, "ts": start, "dur": duration} for cat, name, start, duration in ran]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert host_gaps.spans_of_trace(path) == [(0.0, 10.0), (6.0, 14.0)]


def test_a_part_that_is_not_done_in_time_ends_with_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no time left is not begun."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "_LEAST_S", 1.0)
    monkeypatch.setenv("GPU_TEST", str(tmp_path))
    assert (
        gpu.main(["launch", "engine", "--device", "cpu", "--scale", "tiny", "--out", str(tmp_path), "--seconds", "3"])
        == 1
    )

    def all_are_gone() -> bool:  # who was killed as a group may take a moment
        return not any(p.pid != os.getpid() and is_marked(p, str(tmp_path)) for p in psutil.process_iter())

    wait_until_true(all_are_gone, "the end of what the part started")
    said = capsys.readouterr().out
    assert said.splitlines()[-3:] == ["failed:", "launch: FAILED: not done in 3 s", "engine: not begun"]


def test_a_figure_that_is_missed_is_named_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, options: object, left_s: float, claims: list[Claim]) -> str:
        claims += [Claim(f"{name} {ratio}", ratio, 0.5, "higher", {}) for ratio in (0.6, 0.4)]
        return ""

    monkeypatch.setattr(gpu, "_run_part", part)
    assert gpu.main(["launch", "kernels", "--device", "cpu", "--scale", "tiny", "--out", str(tmp_path)]) == 1
    first, *missed = capsys.readouterr().out.splitlines()[-3:]
    assert first == "failed:"
    assert [line.split(" | ")[1] for line in missed] == ["launch 0.4", "kernels 0.4"]
    assert [len(claims) for claims in claims_of(tmp_path).values()] == [2, 2]


def test_without_a_card_make_gpu_says_of_each_part_why_it_is_skipped() -> None:
    """And reads every command and file that it needs there."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a card")
    command = ["make", "-s", "gpu", "smoke", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == list(gpu.SETS["smoke"])
    assert all(line.endswith("skipped: there is no CUDA device") for line in lines)
    assert last == "nothing failed, and nothing was measured"


def test_what_a_part_lacks_without_a_card_is_named_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "launches", lambda *_: [(1, 1, ["--not-an-option"])])
    assert dry_run(gpu.SETS["full"], "full") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["failed:", "launch: SystemExit: 2"]
    assert [line.split(":")[0] for line in lines[:-2]] == list(gpu.PARTS[1:])


def test_every_family_that_is_served_is_launched(capsys: pytest.CaptureFixture[str]) -> None:
    """Each by a configuration of its own, which a run without a card names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {model_type: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type in FAMILIES}
    assert {*names.values()} == {*SERVED.shipped}
    assert "families" in gpu.SETS["full"]
    assert dry_run(["families"], "full") == 0
    assert f"models {', '.join(names)} and" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_families_model_is_served(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part itself, with one model at a time, and one processor for both devices."""
    monkeypatch.setenv("BENCH_MODELS", str(tmp_path))
    monkeypatch.setattr(families, "MODELS", (family,))
    (claim,) = families.run("cpu", "tiny")
    assert claim.name.startswith(f"{family}, ")
    assert claim.met


@pytest.mark.parametrize("arguments", [["kernel"], ["smoke", "tokens"], ["--seconds", "x"]])
def test_what_it_does_not_know_it_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
