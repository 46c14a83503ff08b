"""The README is true: its Python runs and its commands parse. (Its links and paths: tests/test_pages.py.)"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import launches

from pdkv.cli.main import make_parser
from pdkv.config import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^(?:pd|make|pip) .*$", README, re.MULTILINE)]


def run_python(source: str) -> str:
    """Standard output of a program in a process of its own."""
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def promised(source: str) -> str:
    """What the comment behind the last print says."""
    return source.rstrip().rsplit("# ", 1)[1]


def test_the_client_example_prints_what_it_says() -> None:
    (example,) = [source for source in PYTHON if "openai" in source]
    with launches(DEFAULT_MODEL) as launch:
        running = launch("--prefill", "1", "--decode", "1", "--kv-cache-memory", "16MiB")
        output = run_python(example.replace("http://127.0.0.1:8000", running.url))
    assert output.strip() == promised(example)


def test_the_offline_example_prints_what_it_says() -> None:
    (example,) = [source for source in PYTHON if "LLM" in source]
    assert run_python(example).strip() == promised(example)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("pd ")])
def test_every_pd_command_parses(command: str) -> None:
    arguments = make_parser().parse_args(shlex.split(command)[1:])
    assert arguments.run is not None


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_every_make_target_exists(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_connector_shown_is_the_example() -> None:
    shown = max(re.findall(r"```py\n(.*?)```", README, re.DOTALL), key=len)
    assert shown == (ROOT / "examples/custom_connector/pdkv_sqlite.py").read_text()
