"""`pd bench` over a launch of one prefill and one decode engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from deployments import Launch, Running
from traffic import wait_until_true

from pdkv.cli.main import main

SMALL = ("--num-prompts", "12", "--input-len", "24", "--output-len", "4", "--vocabulary", "200")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings") / "load.jsonl"


@pytest.fixture(scope="module")
def server(module_launch: Launch, recording: Path) -> Running:
    return module_launch("--record-trace", str(recording))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["bench", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "prompt_tokens"),
    [
        (("--request-rate", "200", "--burstiness", "0.5"), 12 * 24),
        (("--dataset-name", "conversations", "--turns", "3"), 4 * (24 + 52 + 80)),
    ],
    ids=["random", "conversations"],
)
def test_a_load_is_sent_and_reported(
    server: Running, flags: tuple[str, ...], prompt_tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, requests = tmp_path / "result.json", tmp_path / "requests.jsonl"
    saved = ("--save-result", str(result), "--save-requests", str(requests))
    code, out = bench(capsys, "serve", server.url, *SMALL, *flags, *saved, "--goodput", "e2el:60000")
    report: dict[str, Any] = json.loads(result.read_text())
    assert code == 0
    assert "Median TTFT (ms):" in out
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (12, 0, 48)
    assert report["total_input_tokens"] == prompt_tokens
    assert report["slo_attainment"] == 1
    assert len(requests.read_text().splitlines()) == 12


def test_a_recording_is_sent_again(
    server: Running, recording: Path, served_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = ("--dataset-name", "conversations", "--input-len", "70", "--num-warmups", "0")
    assert bench(capsys, "serve", server.url, *SMALL, *talk)[0] == 0
    copied = tmp_path / "copied"
    wait_until_true(lambda: recording.read_bytes().count(b"\n") >= 13, "the recording of 12 requests")
    copied.write_bytes(recording.read_bytes())
    num_requests = len(copied.read_bytes().splitlines()) - 1
    flags = ("--speed", "100", "--vocabulary", "200", "--tokenizer", str(served_model), "--json")
    assert main(["replay", str(copied), *flags, server.url]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == report["recorded"]["completed"] == num_requests
    assert report["total_input_tokens"] == report["recorded"]["total_input_tokens"]
    assert report["total_output_tokens_retokenized"] > 0
    code, out = bench(capsys, "serve", server.url, "--trace", str(copied), "--trace-speed", "100", "--report-format",
                      "llm-d", "--json", "--vocabulary", "200")  # fmt: skip
    assert (code, json.loads(out)["results"]["request_performance"]["aggregate"]["requests"]["failures"]) == (0, 0)


def test_a_sweep_ends_with_a_rate(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """No server keeps a bound of a tenth of a microsecond, so that the lowest rate breaks it."""
    flags = ("--goodput", "ttft:0.0001", "--refinements", "1", "--begin-rate", "500", "--json")
    code, out = bench(capsys, "sweep", server.url, *SMALL, *flags)
    found = json.loads(out)
    assert (code, found["best"]) == (1, None)
    assert [run["request_rate"] for run in found["runs"]] == [250, 500]


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (("--request-rate", "0"), 2, "--request-rate: a number above 0, or inf, was expected, got 0"),
        (("--num-prompts", "-1"), 2, "--num-prompts: a number above 0 was expected, got -1"),
        (("--range-ratio", "nan"), 2, "--range-ratio: a share from 0 to below 1 was expected, got nan"),
        (("--header", "a"), 2, "--header: NAME=VALUE was expected, got 'a'"),
        (("--metric-percentiles", "50,x"), 2, "numbers between 0 and 100 such as 50,99 were expected, got '50,x'"),
        (("--extra-body", "[1]"), 2, "--extra-body: a JSON object was expected, got [1]"),
        (("--dataset-name", "mooncake"), 2, "--dataset-name mooncake: a file was expected in --dataset-path"),
        (("--dataset-path", "x"), 2, "--dataset-path: random reads no file"),
        (("--trace", "x", "--dataset-name", "random"), 2, "--trace x is the data set: --dataset-name random"),
        (("--trace", "x", "--dataset-path", "y"), 2, "--trace x is the data set: --dataset-path y contradicts it"),
        (("--save-result", "/absent/x"), 2, "--save-result: there is no folder /absent"),
        (("--trace-speed", "1", "--request-rate", "2"), 2, "--trace-speed follows the data set's own times"),
        (("--model", "other"), 1, "the first request failed: HTTP 404"),
        (("--vocabulary", "100000"), 1, "the first request failed: HTTP 400"),
    ],
)
def test_a_wrong_option_is_named(
    server: Running, flags: tuple[str, ...], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", server.url, *SMALL, *flags]) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "code", "expected"),
    [("localhost", 2, "a server's URL such as"), ("http://127.0.0.1:9", 1, "http://127.0.0.1:9/v1/models")],
)
def test_a_server_that_is_none_is_named(url: str, code: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", url, *SMALL]) == code
    assert expected in capsys.readouterr().err


def test_one_engine_is_measured_in_this_process(served_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--model", str(served_model), "--input-len", "8", "--output-len", "4", "--json")
    _, out = bench(capsys, "latency", *engine, "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "2")
    assert len(json.loads(out)["latencies"]) == 2
    _, out = bench(capsys, "throughput", *engine, "--num-prompts", "5")
    assert json.loads(out)["total_num_tokens"] == 5 * 12
