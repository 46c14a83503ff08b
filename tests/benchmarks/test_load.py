"""The figures of a load are those of worked examples."""

import pytest

from benchmarks.load import percentile, rates, summarize
from pdkv.bench.client import Reply


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((47, 127.03, 14545, 2993, 66.17790), (0.37, 114.50, 23.56, 138.06, 24.49)),
        ((1000, 1247.16, 289255, 184429, 586.21850), (0.80, 231.93, 147.88, 379.81, 470.04)),
    ],
)
def test_rates_are_those_of_the_worked_examples(
    arguments: tuple[int, float, int, int, float], expected: tuple[float, ...]
) -> None:
    assert tuple(round(value, 2) for value in rates(*arguments)) == expected


def test_summary_counts_failures_and_leaves_them_out_of_the_latencies() -> None:
    good, bad = Reply(10.0), Reply(10.0)
    good.stamps, good.num_tokens = [10.5, 10.75, 11.0], 3
    bad.error = "broken"
    report = summarize([good, bad], 2.0, input_len=8)
    assert (report["ok"], report["failed"], report["first_error"]) == (1, 1, "broken")
    assert (report["output_tok_s"], report["input_tok_s"]) == (1.5, 4.0)
    assert report["ttft_ms"]["p50"] == 500.0
    assert report["itl_ms"]["p99"] == 250.0


def test_percentile_is_a_value_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
