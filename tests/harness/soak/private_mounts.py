"""A mount namespace of this run's own, so that a small disk and a small /dev/shm can be filled without harm."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ENTERED = "SOAK_PRIVATE_MOUNTS"
SHM = Path("/dev/shm")


def enter(command: Sequence[str]) -> bool:
    """Run `command` in place of this process with private mounts, if the system allows them.

    Returns:
        In the new process: True. Where it is not allowed: False.
    """
    if os.environ.get(_ENTERED):
        return True
    for flags in (["--mount"], ["--mount", "--map-root-user"]):
        probe = ["unshare", *flags, "sh", "-c", f"mount -t tmpfs -o size=1m none {SHM}"]
        try:
            allowed = subprocess.run(probe, capture_output=True).returncode == 0
        except FileNotFoundError:
            return False
        if allowed:
            sys.stdout.flush()
            os.execvpe("unshare", ["unshare", *flags, *command], {**os.environ, _ENTERED: "1"})
    return False


def mount_tmpfs(path: Path, size_bytes: int) -> None:
    """An empty file system of that size; it goes with the namespace."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)], check=True)


def unmount(path: Path) -> None:
    """Detach it."""
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Write `path` until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
