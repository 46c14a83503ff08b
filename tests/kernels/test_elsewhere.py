"""Kernels as a compiler for aarch64 makes them (NEON) give what those of this host's level v3 give: the same bits, and
attention within rounding. They run under qemu-user; Debian has both (`qemu-user`, `gcc-aarch64-linux-gnu`).
"""

import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FILES = {
    "linear": ("linear", "passes", "prompts"), "passes": ("passes",), "prompts": ("prompts", "linear", "passes"),
    "host": ("host", "digest"), "sampler": ("sampler",), "rans": ("rans",),
}  # fmt: skip
"""The file whose kernels are called, and those that it needs."""

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("gcc", CROSS, QEMU))),
    reason=f"no {CROSS} or {QEMU}, or another machine than x86-64",
)


@pytest.fixture(scope="module")
def libraries() -> Iterable[tuple[list[str], list[str]]]:
    """Sources and flags of each, as setup.py says."""
    with mock.patch("setuptools.setup"):
        found: dict[str, tuple[list[str], list[str]]] = runpy.run_path(str(HERE.parents[1] / "setup.py"))["LIBRARIES"]
    return found.values()


def lines(file: str, flags: list[str], compiler: str, runner: list[str], program: Path) -> list[list[str]]:
    kernel, *others = FILES[file]
    command = [compiler, "-std=gnu11", "-O3", "-g0", "-static", *flags, "-I", KERNELS, f'-DKERNEL="{kernel}.c"']
    sources = [HERE / "elsewhere" / "calls.c", *(KERNELS / f"{other}.c" for other in others)]
    subprocess.run([*command, f"-D{file.upper()}", *sources, "-o", program, "-lm"], check=True, timeout=120)
    run = subprocess.run([*runner, program], check=True, capture_output=True, text=True, timeout=120)
    return [line.split() for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.slow) if "passes" in FILES[file] else file for file in FILES]
)
def test_neon_gives_what_this_host_gives(file: str, libraries: Any, tmp_path: Path) -> None:
    (flags,) = (flags for sources, flags in libraries if file in sources)
    wanted = lines(file, [*flags, "-march=x86-64-v3"], "gcc", [], tmp_path / "here")
    found = lines(file, flags, CROSS, [QEMU], tmp_path / "there")
    assert len(wanted) > 2
    for (kind, name, *theirs), line in zip(found, wanted, strict=True):
        assert [kind, name] == line[:2]
        if kind == "bits":
            assert theirs == line[2:], name
        else:
            rtol, atol = (1e-5, 1e-6) if name == "attention" else (1e-2, 1e-2)
            numbers = (torch.tensor(list(map(float, each))) for each in (theirs, line[2:]))
            torch.testing.assert_close(*numbers, rtol=rtol, atol=atol)
