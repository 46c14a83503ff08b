"""The systemd units: what they run and the options that their heads name are ours."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from pdkv.cli import engine as cli_engine
from pdkv.cli.launch import all_flags
from pdkv.cli.main import make_parser

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))

by_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


@by_unit
def test_the_command_and_the_options_of_its_file_exist(unit: Path) -> None:
    text = unit.read_text().replace("%i", "decode-b")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    arguments = make_parser().parse_args(shlex.split(command)[1:])
    groups = cli_engine.flag_groups().values()
    known = {name for group in groups for name in group} if arguments.run is cli_engine.run else set(all_flags())
    named = tomllib.loads("\n".join(re.findall(r"^#   (.*)$", text, re.MULTILINE)))
    assert named
    assert {name.replace("-", "_") for name in named} <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_them(tmp_path: Path) -> None:
    """Where pdkv is not installed at /opt/pdkv, that alone is amiss."""
    for unit in UNITS:
        shutil.copy(unit, tmp_path)
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "/opt/pdkv" not in line] == []
