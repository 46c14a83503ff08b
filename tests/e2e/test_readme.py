"""The README is true: after a plain installation its Python (and that of docs/offline.md) and its checks run.

Its links and paths: tests/test_pages.py.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import launches

from pdkv.cli.main import make_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README + (ROOT / "docs/offline.md").read_text(), re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^(?:pd|make|pip) .*$", README, re.MULTILINE)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of who has run the README's `pip install`s: not this checkout, though it is run in its root."""
    target, trees = tmp_path_factory.mktemp("site"), []
    for project in (".", "examples/custom_connector"):
        trees.append(tree := tmp_path_factory.mktemp("tree"))  # a build leaves folders behind
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT / project, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        for file in files:
            if (ROOT / project / file).is_file() and not file.startswith(("tests/", "benchmarks/", "docs/")):
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / project / file, tree / file)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--target", str(target), *map(str, trees)], check=True, timeout=300,
        env={**os.environ, "CC": "false"},  # without compiled kernels: that is faster, and they are optional
    )  # fmt: skip
    path = f"{target / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(target), "PATH": path, "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}


def run_python(source: str, environment: dict[str, str]) -> str:
    """Standard output of a program that is run in the root, which is on its sys.path."""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def promised(source: str) -> str:
    """What the comment behind the last print says."""
    return source.rstrip().rsplit("# ", 1)[1]


def test_what_is_installed_is_what_runs_in_the_root(installed: dict[str, str]) -> None:
    where = run_python("import pdkv, pdkv.connectors; print(pdkv.__file__, pdkv.connectors.__file__)", installed)
    assert all(path.startswith(installed["PYTHONPATH"]) for path in where.split())


def test_the_client_example_prints_what_it_says(installed: dict[str, str]) -> None:
    (example,) = [source for source in PYTHON if "openai" in source]
    with launches(Path(installed["PYTHONPATH"], "pdkv", "default_model")) as launch:
        running = launch(
            "--prefill", "1", "--decode", "1", "--kv-cache-memory", "16MiB",
            environment={"PYTHONPATH": installed["PYTHONPATH"]},
        )  # fmt: skip
        output = run_python(example.replace("http://127.0.0.1:8000", running.url), installed)
    assert output.strip() == promised(example)


def test_the_offline_examples_print_what_they_say(installed: dict[str, str]) -> None:
    """One after the other."""
    examples = [source for source in PYTHON if "LLM" in source]
    assert len(examples) == 2
    output = run_python("\n".join(f"exec({source!r}, {{}})" for source in examples), installed)
    assert output.splitlines() == [line for source in examples for line in promised(source).splitlines()]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("pd ")])
def test_every_pd_command_parses(command: str) -> None:
    arguments = make_parser().parse_args(shlex.split(command)[1:])
    assert arguments.run is not None


CHECKS = [command for command in COMMANDS if command.startswith("pd connector check")]


@pytest.mark.parametrize("command", CHECKS)
def test_a_check_passes_and_leaves_nothing_behind(command: str, installed: dict[str, str]) -> None:
    """One case of it, from the root."""
    arguments = [*shlex.split(command), "--quick", "--case", "content_identity"]
    done = subprocess.run(arguments, cwd=ROOT, env=installed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 0 failed" in done.stdout
    assert not list(Path(installed["TMPDIR"]).iterdir())
    assert f"pd connector check {arguments[3]}" in command
    assert "/tmp" not in command


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_every_make_target_exists(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_connector_shown_is_the_frame_of_the_example() -> None:
    (shown,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    lines = iter((ROOT / "examples/custom_connector/pdkv_sqlite.py").read_text().splitlines())
    frame = [line.removesuffix(" ...") for line in shown.splitlines() if line]
    assert len(frame) >= 10
    assert all(line in lines for line in frame), "each line is one of the example, in its order"
