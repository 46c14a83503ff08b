"""A recording is sent again as it went, and its own report stands beside that of its replay."""

import io

import pytest
from word_server import run

from pdkv.bench.datasets import Maker, Shape, recorded_sessions
from pdkv.bench.prefix import repeats
from pdkv.bench.replay import recorded_report
from pdkv.bench.report import Slo, print_report, summarize
from pdkv.bench.serve import Pace
from pdkv.bench.trace import Trace, TraceRequest

IDS = Maker(0, as_text=False)


def request(
    t: float, blocks: str = "", *, session: int = 0, prompt: int = 20, output: int = 3, outcome: str = "stop",
    priority: int = 0, ttft_s: float | None = 0.25,
) -> TraceRequest:  # fmt: skip
    return TraceRequest(
        t=t, session=session, key=0, prompt_tokens=prompt, output_tokens=output, max_tokens=8, priority=priority,
        blocks=tuple(f"{ord(block):016x}" for block in blocks), outcome=outcome, ttft_s=ttft_s, e2e_s=1.0,
    )  # fmt: skip


TRACE = Trace(
    "m", 4,
    (
        request(10.0, "ab"),
        request(10.5, "c", session=1, output=0, outcome="abort", ttft_s=None),
        request(10.5, prompt=0, output=0, outcome="error:queue_full", ttft_s=None),
        request(13.0, "abd", prompt=30, priority=2),  # two seconds behind the end of the first
        request(13.5, "abde", prompt=40),  # the one before it has not ended
        request(16.0, "xbde", prompt=50),  # of another beginning
    ),
)  # fmt: skip


def test_only_a_prompt_that_goes_on_from_the_one_before_it_waits_for_it() -> None:
    sessions = recorded_sessions(TRACE, Shape(), IDS)
    assert [session.at_s for session in sessions] == [10.0, 10.5, 13.5, 16.0]
    assert [[len(turn.prompt) for turn in session.turns] for session in sessions] == [[20, 30], [20], [40], [50]]
    assert [turn.pause_s for turn in sessions[0].turns] == [0.0, 2.0]
    assert sessions[1].turns[0].max_tokens == 8  # it had no token when its client left
    assert len(recorded_sessions(TRACE, Shape(num_prompts=2), IDS)) == 2
    assert repeats(sessions, block=4, threshold=0.5, min_length=0)["tokens"] == 20 + 20 + 30 + 40 + 50


def test_each_prompt_is_whole_and_shares_what_it_shared() -> None:
    pace = Pace(speed=1e6)
    found, bodies, _ = run(recorded_sessions(TRACE, Shape(), IDS), pace=pace)
    assert len(found.requests) == len(bodies) == 5
    *firsts, second, third, other = sorted((body["prompt"] for body in bodies), key=len)
    assert [len(prompt) for prompt in (*firsts, second, third, other)] == [20, 20, 30, 40, 50]
    assert [first[:8] == second[:8] for first in firsts].count(True) == 1
    assert second[:8] == third[:8] != other[:8]
    assert second[8:12] == third[8:12]
    assert [body["priority"] for body in bodies if "priority" in body] == [2]
    _, bodies, _ = run(recorded_sessions(TRACE, Shape(), Maker(0, as_text=True)), pace=pace, endpoint="chat")
    texts = sorted((body["messages"][-1]["content"].split() for body in bodies), key=len)
    assert [len(text) for text in texts] == [20, 20, 30, 40, 50]
    assert texts[2][:8] == texts[3][:8] != texts[4][:8]


def test_both_reports_stand_beside_each_other() -> None:
    slo = Slo({"ttft": 300.0})
    recorded = recorded_report(TRACE, [99], slo)
    assert (recorded["completed"], recorded["failed"], recorded["duration"]) == (4, 2, 7.0)
    assert recorded["errors"] == {"abort": 1, "error:queue_full": 1}
    assert (recorded["p99_ttft_ms"], recorded["mean_e2el_ms"]) == (250.0, 1000.0)
    assert recorded["mean_tpot_ms"] == pytest.approx(375)
    assert recorded["slo_attainment"] == pytest.approx(4 / 6)
    shown = io.StringIO()
    found, *_ = run(recorded_sessions(TRACE, Shape(), IDS), pace=Pace(speed=1e6))
    print_report(summarize(found, [99], slo) | {"recorded": recorded}, [99], shown)
    lines = {line.split(":")[0]: line.split()[-2:] for line in shown.getvalue().splitlines() if ":" in line}
    assert lines["Successful requests"] == ["4", "5"]
    assert lines["P99 TTFT (ms)"][0] == "250.00"
    assert lines["P99 ITL (ms)"][0] == lines["Client CPU per token (us)"][0] == "-"
    assert "1 failed when recorded: abort" in shown.getvalue()
