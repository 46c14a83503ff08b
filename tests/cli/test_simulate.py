"""`pd simulate`, `pd plan` and `pd profile`: reports, and bad input."""

import asyncio
import json
from pathlib import Path

import pytest
from fake_dispatcher import FakeDispatcher
from http_server import serving
from small_app import MAX_MODEL_LEN, MODEL, make_app

from pdkv.bench.serve import Target
from pdkv.cli.bench import longest_of
from pdkv.cli.main import main

SMALL = ["--num-prompts", "6", "--input-len", "64", "--output-len", "8"]


def test_a_simulation_prints_the_report_of_pd_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "requests.jsonl"
    flags = ["--request-rate", "20", "--goodput", "ttft:500", "--save-requests", str(lines)]
    assert main(["simulate", *SMALL, *flags, "--kill", "prefill-0@0.1+0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["short_answers"], report["request_rate"]) == (6, 0, 20)
    assert report["goodput"] > 0
    assert len(lines.read_text().splitlines()) == 6
    assert main(["simulate", *SMALL, "--prefill", "0"]) == 0
    assert "P99 TTFT (ms):" in capsys.readouterr().out


def test_a_plan_prints_every_division_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engines", "2", "--slo-ttft-ms", "1s", "--slo-tpot-ms", "100", "--rate", "4"]
    assert main(["plan", *SMALL, *flags]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("2 aggregated", "1P1D", "1P1D conditional", "recommended:", "runner-up:"))
    assert main(["plan", *SMALL, *flags, "--slo-tpot-ms", "0.01ms", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["recommended"]["rate"] == 0


def test_a_recording_is_simulated_at_its_own_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    fields = {"key": 0, "prompt_tokens": 40, "output_tokens": 3, "outcome": "length", "e2e_s": 0.1}
    lines = [{"t": t, "session": i, "blocks": ["ab" * 8] * 2, **fields} for i, t in enumerate((0.0, 2.0))]
    head = {"pdkv_trace": 1, "block_size": 16, "model": "m"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    assert main(["simulate", "--trace", str(path), "--prefill", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["cached_input_tokens"]) == (2, 32)
    assert report["duration"] > 2.0
    assert main(["plan", "--trace", str(path), "--engines", "1", "--slo-ttft-ms", "1000", "--slo-tpot-ms", "1000"]) == 0
    assert "1 aggregated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--decode", "0"], "--decode: a number above 0"),
        (["simulate", "--prefill", "-1"], "--prefill: a number 0 or more"),
        (["simulate", "--profile", "h900"], "unknown profile 'h900'"),
        (["simulate", "--policy", "nonsense"], "nonsense"),
        (["simulate", "--kill", "decode-0"], "NAME@AT or NAME@AT+BACK"),
        (["simulate", "--stop", "decode-0@1x2"], "--stop decode-0@1x2: NAME@AT or NAME@AT+BACK"),
        (["simulate", "--kill", "decode-0@1x"], "--kill decode-0@1x: NAME@AT or NAME@AT+BACK"),
        (["simulate", "--slow", "decode-0@1"], "--slow decode-0@1: NAME@ATxTIMES or"),
        (["simulate", "--slow", "x@1x2"], "--slow x: an engine's name"),
        (["simulate", "--kv-host-tokens", "-1"], "--kv-host-tokens: a number 0 or more"),
        (["simulate", "--kv-host-tokens", "63"], "--kv-host-tokens: 0, or 64 and more"),
        (["simulate", "--kill", "x@1"], "--kill x: an engine's name"),
        (["simulate", "--block-size", "24"], "a multiple of 16"),
        (["simulate", "--kv-tokens", "8"], "take at most 0"),
        (["simulate", "--trace", "/nowhere"], "/nowhere: No such file"),
        (["simulate", "--trace", "/nowhere", "--request-rate", "3"], "no --request-rate was expected"),
        (["simulate", "--num-prompts", "1", "--input-len", "40000"], "a request of 40128 tokens"),
        (["simulate", "--input-len", "99999999"], "--input-len: at most 16777216 tokens"),
        (["simulate", *SMALL, "--request-rate", "1e-9"], "a load of 6e+09 s"),
        (["plan", "--engines", "2", "--slo-ttft-ms", "1", "--slo-tpot-ms", "1"], "--rate: requests a second"),
        (["plan", "--engines", "0", "--slo-ttft-ms", "1", "--slo-tpot-ms", "1", "--rate", "1"], "--engines"),
        (
            ["plan", "--engines", "2", "--slo-ttft-ms", "1", "--slo-tpot-ms", "5min", "--rate", "1"],
            "--slo-tpot-ms: a number of milliseconds above 0 and up to 1,000,000,000 was expected, got '5min'",
        ),
        (["profile", "--output", "/nowhere/x.toml"], "there is no folder /nowhere"),
        (["profile", "--like", "h900", "--output", "x.toml"], "unknown profile 'h900'"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


async def test_a_server_says_how_long_a_sequence_of_its_model_may_be() -> None:
    async with serving(make_app(FakeDispatcher())) as server:
        url = f"http://127.0.0.1:{server.port}"
        known, unknown = [await asyncio.to_thread(longest_of, Target(url, name)) for name in (MODEL, "other")]
    assert (known, unknown) == (MAX_MODEL_LEN, None)
