"""Rude clients: nothing of the others' breaks, what is asked for and not read ends. Times are the soak's to judge."""

from pathlib import Path

import pytest
from deployments import launches
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.clients import FLAGS, disturb
from soak.http_health import describe, late
from soak.rude_clients import NUM_SLOW
from soak.stalls import WATCHDOG, counted, own


@pytest.mark.slow
def test_rude_clients_break_no_stream_and_hold_no_memory(tmp_path: Path) -> None:
    model = serve_directory(make_hf_model(tmp_path / "model", "llama", "float32"), tmp_path)
    with launches(model) as launch:
        result = disturb(launch("--prefill", "1", "--decode", "1", *FLAGS, "--send-timeout-s", "1", *WATCHDOG), 4.0)
    assert result.violations == []
    done = result.rude["counts"]
    assert sum(count for name, count in done.items() if name.startswith("slow: ") and ": 4" not in name) > NUM_SLOW / 2
    assert done["100,000 messages: 400"] >= 1
    assert result.gaps["num_gaps"] > 100
    assert "a bare server: " in describe(result.health)


@pytest.mark.parametrize(
    ("worst_ms", "bare_worst_ms", "is_late"),
    [(50.0, 1.0, False), (51.0, 25.0, True), (51.0, 26.0, False), (125.0, 100.0, False), (126.0, 100.0, True)],
)
def test_health_is_late_by_more_than_the_machine_is(worst_ms: float, bare_worst_ms: float, is_late: bool) -> None:
    assert bool(late({"worst_ms": worst_ms, "bare_worst_ms": bare_worst_ms, "num_unavailable": 0})) == is_late


def test_a_health_check_that_was_refused_is_told() -> None:
    assert late({"worst_ms": 1.0, "bare_worst_ms": 1.0, "num_unavailable": 2}) == ["/health was 2 times a 503"]


def test_stalls_are_read_from_the_metrics() -> None:
    text = (
        "# TYPE pdkv_loop_stalls_total counter\n"
        'pdkv_loop_stalls_total{where="a.b",kind="busy"} 3.0\npdkv_loop_stalls_total{where="c",kind="waiting"} 1.0\n'
    )
    stalls = counted(text)
    assert stalls == {"a.b (busy)": 3, "c (waiting)": 1}
    assert own(stalls) == ["a.b (busy): 3"]
