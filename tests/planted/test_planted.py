"""`make planted`: each defect can still be planted, and what none of its tests notices is told."""

import subprocess
from pathlib import Path

import pytest
from planted import __main__ as module
from planted.__main__ import DEFECTS, ROOT, Defect, main, planted


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_each_defect_can_be_planted(defect: Defect) -> None:
    assert planted((ROOT / defect.file).read_text(), defect)
    assert all((ROOT / "tests" / name).exists() for name in defect.tests.split())


def test_what_is_found_is_told_from_what_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest imports what it needs
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_one(one=1):\n    two = 2\n    assert one == 1\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    wrong = Defect("tests/test_it.py", "one=1", "one=7", "test_it.py")
    monkeypatch.setattr(
        module, "DEFECTS", {"wrong": wrong, "unused": wrong._replace(pattern="two = 2", planted="two = 3")}
    )
    assert main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "found  wrong: tests/test_it.py::test_one\nMISSED unused: test_it.py\n"
    assert not subprocess.run(["git", "diff", "--quiet"], cwd=tmp_path, check=False).returncode
