"""Results are kept by day, a rerun replaces its own part only, and a missed limit is shown as missed."""

import json
from pathlib import Path

import pytest

from benchmarks.pd_balance import balance
from benchmarks.peers import NEEDED_BY
from benchmarks.report import Claim, Outcome, save, show
from pdkv.connector_kit.bench.turns import Spread
from pdkv.host.processor import instruction_set

FAST = Claim("fast", 1.3, 1.2, "higher", {"tok/s": 1234.5})
SLOW = Claim("slow", 1.6, 1.5, "lower", {"ms": 0.125})


def outcome(*claims: Claim) -> Outcome:
    return Outcome(list(claims), 1.0, 0.0, "2026-01-01T00:00:00+00:00")


def test_a_claim_is_met_on_the_right_side_of_its_limit() -> None:
    assert FAST.met
    assert not SLOW.met
    assert not Claim("fast", 1.1, 1.2, "higher", {}).met
    assert Claim("slow", 1.5, 1.5, "lower", {}).met


def test_a_rerun_replaces_its_own_part(tmp_path: Path) -> None:
    save({"a": outcome(FAST), "b": outcome(SLOW)}, tmp_path)
    table = save({"b": outcome(FAST)}, tmp_path).read_text()
    [path] = tmp_path.glob("*.json")
    benchmarks = json.loads(path.read_text())["benchmarks"]
    assert {name: [claim["met"] for claim in part["claims"]] for name, part in benchmarks.items()} == {
        "a": [True],
        "b": [True],
    }
    assert "**missed**" not in table
    assert f", {instruction_set()}, " in table


def test_figures_of_another_instruction_set_stay_in_files_of_their_own(tmp_path: Path) -> None:
    path = save({"a": outcome(FAST)}, tmp_path).with_suffix(".json")
    document = json.loads(path.read_text())
    document["hardware"]["isa"] = "another"
    path.write_text(json.dumps(document))
    for name in "b", "c":
        table = save({name: outcome(SLOW)}, tmp_path)
    assert table.stem == f"{path.stem}-{instruction_set()}"
    assert list(json.loads(table.with_suffix(".json").read_text())["benchmarks"]) == ["b", "c"]
    assert json.loads(path.read_text()) == document


def test_what_was_missed_is_shown(tmp_path: Path) -> None:
    table = save({"b": outcome(SLOW)}, tmp_path).read_text()
    assert "| b | slow | 1.60 | ≤ 1.50 | **missed** | ms 0.125 |" in table
    assert "**missed**" in show("b", [SLOW])


def test_the_quartiles_of_the_rounds_stand_beside_their_median(tmp_path: Path) -> None:
    claim = Claim.of("fast", Spread(0.9, 1.0, 1.1), 0.95, "higher", {})
    assert claim.ratio == 1.0
    assert claim.met
    path = save({"a": outcome(claim), "b": outcome(FAST)}, tmp_path)
    assert "| a | fast | 1.00 (0.90 to 1.10) | ≥ 0.95 |  |  |" in path.read_text()
    assert "1.30 | ≥ 1.20" in path.read_text()
    assert "1.00 (0.90 to 1.10)" in show("a", [claim])


def test_a_document_from_before_the_quartiles_is_shown(tmp_path: Path) -> None:
    path = save({"a": outcome(FAST)}, tmp_path).with_suffix(".json")
    document = json.loads(path.read_text())
    del document["benchmarks"]["a"]["claims"][0]["quartiles"]
    path.write_text(json.dumps(document))
    assert "| a | fast | 1.30 | ≥ 1.20 |" in save({"b": outcome(SLOW)}, tmp_path).read_text()


def test_balance_of_equal_phases_is_all_and_of_one_phase_alone_is_half() -> None:
    assert balance(2.0, 2.0) == 1.0
    assert balance(3.0, 1.0) == balance(1.0, 3.0) == pytest.approx(2 / 3)
    assert balance(1.0, 0.0) == 0.5


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import run  # and with it all of them, and OpenAI's client

    with pytest.raises(SystemExit):
        run.main(["no_such_benchmark"])
    assert "no_such_benchmark" in capsys.readouterr().err


def test_without_its_peer_a_comparison_is_skipped_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import run

    assert run.main([*NEEDED_BY, "--vllm", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("benchmarks.peers install") == len(NEEDED_BY)
    assert not (tmp_path / "out").exists()
    assert set(NEEDED_BY) < set(run.BENCHMARKS)
