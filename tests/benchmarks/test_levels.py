"""`make bench-quick`: shares of each processor against those that are stored for it."""

import sys
from pathlib import Path

import pytest

from benchmarks import levels


def test_a_share_far_below_the_stored_one_fails_and_where_nothing_is_stored_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"v2": {"digest / read": 0.5}}
    monkeypatch.setattr(levels, "STORED", tmp_path / "levels.json")
    monkeypatch.setattr(levels, "Limits", lambda folder: None)
    monkeypatch.setattr(levels, "measure", lambda limits: found)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["levels", *arguments])
        return levels.main(), capsys.readouterr().out

    code, text = run()
    assert (code, "so nothing was compared" in text) == (0, True)
    assert run("--store")[0] == 0
    found["v2"]["digest / read"] = 0.41
    code, text = run()
    assert (code, "so nothing was compared" in text) == (0, False)
    found["v2"]["digest / read"] = 0.39
    code, text = run()
    assert code == 1
    assert "| digest / read | 0.39 (was 0.5) |" in text
