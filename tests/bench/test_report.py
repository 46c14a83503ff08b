"""Reports: worked figures, goodput, and what makes the figures doubtful."""

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdkv.bench.client import Reply
from pdkv.bench.llm_d import llm_d_report
from pdkv.bench.report import Run, Sent, Slo, doubts, percentile, print_report, request_lines, summarize
from pdkv.bench.roofline import saturation
from pdkv.bench.serve import Pace
from pdkv.bench.sweep import best_rate, draw, find_rate, print_sweep
from pdkv.errors import ConfigError


def sent(stamps: Sequence[float], *, wanted: int | None = None, error: str | None = None, late_s: float = 0.0) -> Sent:
    reply = Reply(10.0)
    reply.stamps, reply.num_tokens, reply.num_prompt_tokens = [10.0 + at for at in stamps], len(stamps), 8
    reply.error, reply.has_usage = error, True
    return Sent(0, 0, 0.5, late_s, reply, wanted or len(stamps))


RUN = Run([sent([0.5, 0.75, 1.0]), sent([0.1, 0.2], wanted=3), sent([], error="HTTP 503: no")], 2.0, 0.001)


def test_a_report_has_the_figures_of_vllms() -> None:
    report = summarize(RUN, [50, 99], Slo({"ttft": 200.0, "tpot": 150.0}))
    assert (report["completed"], report["failed"], report["errors"]) == (2, 1, {"HTTP 503: no": 1})
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (16, 5)
    assert (report["request_throughput"], report["output_throughput"]) == (1.0, 2.5)
    assert (report["mean_ttft_ms"], report["mean_tpot_ms"]) == (pytest.approx(300), pytest.approx(175))
    assert report["p99_ttft_ms"] == pytest.approx(496)  # numpy.percentile([100, 500], 99)
    assert report["mean_itl_ms"] == pytest.approx(200)
    assert report["mean_e2el_ms"] == pytest.approx(600)
    assert (report["goodput"], report["slo_attainment"]) == (0.5, pytest.approx(1 / 3))
    assert report["client_cpu_us_per_token"] == pytest.approx(200)
    shown = io.StringIO()
    print_report(report, [50, 99], shown)
    assert "P99 TTFT (ms):" in shown.getvalue()
    assert "1 failed: HTTP 503: no" in shown.getvalue()


def test_the_requests_are_lines_of_json() -> None:
    first, _, third = map(json.loads, request_lines(RUN).splitlines())
    assert (first["ttft_s"], first["itl_s"], first["output_tokens"]) == (0.5, [0.25, 0.25], 3)
    assert (third["error"], "ttft_s" in third) == ("HTTP 503: no", False)


def test_nothing_that_worked_is_a_report_too() -> None:
    report = summarize(Run([RUN.requests[2]], 1.0, 0.1), [99], Slo({}))
    assert (report["completed"], report["failed"]) == (0, 1)
    print_report(report, [99], io.StringIO())


def test_figures_that_may_be_the_clients_are_doubted() -> None:
    busy = summarize(Run([sent([0.1, 0.2])], 1.0, 0.9), [99], Slo({}))
    late = summarize(Run([sent([0.1, 0.2], late_s=0.05)], 1.0, 0.1), [99], Slo({}))
    fine = summarize(Run([sent([0.1, 0.2])], 1.0, 0.1), [99], Slo({}))
    assert "busy for 90% of a core" in doubts(busy, is_open_loop=True)[0]
    assert "50.0 ms late" in doubts(late, is_open_loop=True)[0]
    uncounted = sent([0.1, 0.2])
    uncounted.reply.has_usage = False
    report = summarize(Run([uncounted], 1.0, 0.1), [99], Slo({}))
    assert "the server does not count tokens" in doubts(report, is_open_loop=True)[0]
    assert doubts(late, is_open_loop=False) == doubts(fine, is_open_loop=True) == []
    dear = summarize(Run([sent([0.1] * 20_000)], 1.0, 0.4), [99], Slo({}))
    assert "took 20.0 us of a processor per token, above 15" in doubts(dear, is_open_loop=True)[0]


def test_turns_that_were_not_sent_are_outside_the_slo() -> None:
    report = summarize(Run(RUN.requests, 2.0, 0.001, num_unsent=7), [99], Slo({"ttft": 600.0}))
    assert (report["unsent"], report["slo_attainment"], report["goodput"]) == (7, 0.2, 1.0)
    assert "7 turns were not sent" in doubts(report, is_open_loop=False)[0]


def test_llm_ds_report_has_its_fields_and_units() -> None:
    report = summarize(RUN, [99], Slo({}))
    found = llm_d_report(RUN, report, Pace(rate=4.0, max_concurrency=2), "random")
    aggregate = found["results"]["request_performance"]["aggregate"]
    latency, load = aggregate["latency"], found["scenario"]["load"]
    assert (found["version"], load["standardized"]["rate_qps"], load["standardized"]["source"]) == (
        "0.2",
        4.0,
        "random",
    )
    assert (aggregate["requests"]["total"], aggregate["requests"]["failures"]) == (3, 1)
    units = {name: values["units"] for name, values in latency.items()}
    assert units == {
        "time_to_first_token": "s",
        "time_per_output_token": "s/token",
        "inter_token_latency": "s/token",
        "request_latency": "s",
    }
    assert latency["time_to_first_token"]["p99"] == pytest.approx(report["p99_ttft_ms"] / 1e3)
    assert aggregate["throughput"]["output_token_rate"] == {"units": "tokens/s", "mean": 2.5}
    failed = Run([RUN.requests[2]], 1.0, 0.1)
    empty = llm_d_report(failed, summarize(failed, [99], Slo({})), Pace(), "sharegpt")
    assert empty["results"]["request_performance"]["aggregate"]["latency"] == {}


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({"engines": [{"name": "d", "decode_step": {"fixed_s": 0.02, "request_s": 0.001}}, {"name": "p"}]}, 20),
        ({"engines": [{"name": n, "decode_step": {"fixed_s": n, "request_s": 0.1}} for n in (1, 2)]}, 10),
        ({"engines": [{"name": "d", "decode_step": {"fixed_s": 0.02, "request_s": 0}}]}, None),
        ({"engines": [3, {"decode_step": {"fixed_s": "a", "request_s": 1}}]}, None),
        ({"engines": "none"}, None),
        ({}, None),
    ],
)
def test_saturation_is_where_requests_cost_what_a_step_costs(topology: dict[str, Any], expected: float | None) -> None:
    assert saturation(json.dumps(topology).encode()) == (expected and pytest.approx(expected))


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:nan", "itl:5", "ttft:inf", ":5"])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="with milliseconds was expected"):
        Slo.parse([text])


def test_percentiles_are_numpys() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert [percentile(values, percent) for percent in (0, 25, 50, 90, 100)] == [1.0, 2.0, 4.0, 12.8, 16.0]
    assert percentile([3.0], 99) == 3.0


def reached(limit: float, most: float = float("inf")) -> Callable[[float], dict[str, float]]:
    """A server that meets an SLO up to a rate, of a run that reaches `most` requests a second."""
    return lambda rate: {"slo_attainment": 1.0 if rate <= limit else 0.5, "request_throughput": min(rate, most)}


def test_a_sweep_ends_where_faster_runs_would_be_the_same_burst() -> None:
    reports = find_rate(reached(float("inf"), 10.0), begin=1.0, attainment=0.9, refinements=8)
    assert [report["request_rate"] for report in reports] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    for report in reports:
        report.update(output_throughput=1.0, goodput=1.0)  # type: ignore[attr-defined]
    shown = io.StringIO()
    print_sweep(reports, 0.9, shown)
    assert "no rate that was tried breaks the SLO" in shown.getvalue()


def test_points_are_drawn_at_their_places() -> None:
    shown = io.StringIO()
    draw([(1.0, 10.0, "a"), (10.0, 100.0, "b"), (100.0, 1000.0, "c")], shown)
    first, *others, axis, scale = shown.getvalue().splitlines()
    assert first == f"     1000 |{'':63}c"
    assert others[-1] == "       10 |a"
    assert any(line.index("b") in (42, 43) for line in others if "b" in line)  # both axes are logarithmic
    assert (axis.strip()[0], scale.split()) == ("+", ["1", "100"])
    draw([(0.0, 0.0, "x")], shown)
    draw([], shown)


@pytest.mark.parametrize("limit", [0.4, 1.0, 5.0, 23.0])
def test_a_sweep_finds_the_limit(limit: float) -> None:
    reports = find_rate(reached(limit), begin=1.0, attainment=0.9, refinements=8)
    rates = [report["request_rate"] for report in reports]
    best = best_rate(reports, 0.9)
    assert rates == sorted(rates)
    assert best is not None
    assert limit - 0.1 <= best["request_rate"] <= limit
    assert best_rate([{"slo_attainment": 0.1}], 0.9) is None
