"""Pack what a GPU machine's Python lacks, where there is a package index: python -m benchmarks.gpu.carry FILE.tar.xz

`make gpu` unpacks it on that machine, which needs torch, Triton, setuptools and no index. Under 64 MiB.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

WITH_WHAT_THEY_NEED = [
    "fastapi", "fastapi-offline", "httptools", "jinja2", "msgspec", "prometheus-client", "psutil", "pyzmq",
    "transformers", "uvicorn", "uvloop", "xxhash",
]  # fmt: skip
ALONE = ["llguidance", "nixl-cu13"]  # torch is there
UNUSED = ["nixl_ep_cu13", "numpy", "numpy.libs"]  # 95 MB of experts' communication; torch brings numpy
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)] + ["manylinux2014_x86_64"]
MAX_BYTES = 48 << 20
"""The repository travels, too."""


def pack(path: Path, python_version: str) -> None:
    """Write the archive. Raises CalledProcessError where the index lacks something, RuntimeError if it is too big."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        _install(WITH_WHAT_THEY_NEED, site, python_version)
        _install(["--no-deps", *ALONE], site, python_version)
        for name in UNUSED:
            shutil.rmtree(site / name, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:xz", preset=6) as archive:
            archive.add(site, ".")
    if path.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")


def _install(names: Sequence[str], site: Path, python_version: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    command += ["--no-compile", "--only-binary=:all:", "--upgrade"]
    command += ["--implementation", "cp", "--python-version", python_version]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *names], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--python-version", default="3.12", help="of that machine")
    options = parser.parse_args(arguments)
    pack(options.path, options.python_version)
    print(f"{options.path}: {options.path.stat().st_size >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
