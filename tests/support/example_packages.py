"""The packages in examples/, installed as their users install them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def install_example(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a package into a directory of its own; built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for path in (EXAMPLES / name).iterdir():
        if path.suffix in (".py", ".toml"):
            (source / path.name).write_bytes(path.read_bytes())
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=300)
    return target


def check_wraps_no_shipped_connector(text: str) -> None:
    """An example shows how a connector is written, not how one is renamed."""
    from pdkv.connectors.registry import SHIPPED

    for shipped in SHIPPED.values():
        module, _, name = shipped.partition(":")
        assert f"{module} import" not in text
        assert name not in text
