"""The wheel holds exactly the package's files, and no root folder is imported under its bare name."""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")


def source_files() -> list[str]:
    """Files of the package folders that are tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKAGE_DIRS.values()]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(file for file in output.splitlines() if (ROOT / file).is_file())


def installed_path(file: str) -> str:
    """Where a source file lies in the wheel."""
    package, folder = next(pair for pair in PACKAGE_DIRS.items() if file.startswith(f"{pair[1]}/"))
    return package.replace(".", "/") + file.removeprefix(folder)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_wheel_holds_the_folders_files_and_nothing_else(compiles: bool, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    files = source_files()
    for file in [*files, "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tree / file)
    compiler = tmp_path / "cc"
    command = os.environ.get("CC", "cc") if compiles else "false"
    compiler.write_text(f'#!/bin/sh\nexec {command} "$@" -O0\n')  # in a tenth of the time
    compiler.chmod(0o755)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, "."], cwd=tree, env=os.environ | {"CC": str(compiler)}, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    built = {name for name in packed if name.endswith(".so")}
    made = {name.rpartition("/")[2].partition(".")[0] for name in built}
    assert compiles or not made
    if platform.machine() == "x86_64" and made:  # none without a compiler
        names = [f"_{name}_{level}" for name in ("codec", "host", "linear", "sampler") for level in ("v2", "v3", "v4")]
        assert made == {*names, "_linear_v4_bf16", "_block_keys"}
    assert packed - built == {installed_path(file) for file in files}


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {installed_path(file).rpartition("/")[0] for file in source_files() if file.endswith(".py")}
    assert {folder.replace("/", ".") for folder in folders} == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_importing_everything_leaves_no_root_folder_in_sys_modules() -> None:
    modules = [
        installed_path(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in source_files()
        if file.endswith(".py")
        and file != "src/pdkv/vllm/adapter.py"  # vLLM imports it, and it vLLM
        and not file.endswith("__main__.py")  # runs the command
    ]
    assert "pdkv.engine.core" in modules
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*set(sys.modules) & {set(PACKAGE_DIRS.values())!r})
"""
    # From the root and with it on sys.path, where a bare `import engine` would work.
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_shipped_connectors_stand_in_one_place_only() -> None:
    assert "pdkv.connectors" not in SETTINGS["project"].get("entry-points", {})
