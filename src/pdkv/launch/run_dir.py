"""The private directory of one launch (sockets), and the removal of directories left behind by killed launches."""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdkv.errors import StartupError
from pdkv.host.process_info import process_start_time

ADMIN_SOCKET = "admin.sock"  # the router's, for operators (router/http/pages/admin.py)
FRONTS_SOCKET = "fronts.sock"  # the dispatcher's, for fronts (docs/fronts.md)
MARKS_FILE = "engines.json"  # their settings, for a restarted router
CONTROL_SOCKET = "control.sock"  # the launcher's (control.py)
_INFO_FILE = "launch.json"

_THIS_HOST = ("127.0.0.1", "0.0.0.0", "[::1]", "[::]")
_NAME = re.compile(r"^pdkv-(\d+)-(\d+)-[a-z0-9_]+$")
_MAX_DIRECTORY_BYTES = 80  # a unix socket's path has at most 107 bytes; the rest is for the engine's name


def run_root() -> Path:
    """The parent of run directories: the temporary directory, or /tmp if its path is too long for a socket's."""
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= _MAX_DIRECTORY_BYTES - 40 else Path("/tmp")


class RunInfo(msgspec.Struct, frozen=True):
    """A running launch, as it describes itself."""

    path: str  # its run directory
    pid: int
    url: str
    shape: str  # such as "2 prefill, 4 decode, connector shared_memory", at its start

    def is_called(self, name: str) -> bool:
        """Whether `name` is its pid, port, URL, run directory or that directory's name."""
        names = (str(self.pid), self.url.rpartition(":")[2], self.path, Path(self.path).name)
        return name in names or _address(name) == _address(self.url)


def _address(url: str) -> tuple[str, str]:
    """Host and port of a URL, with or without scheme and /v1; this host's own names are one."""
    host, _, port = url.rstrip("/").removesuffix("/v1").rpartition("://")[2].rpartition(":")
    return ("localhost" if host in _THIS_HOST else host), port


class RunDirectory:
    """A directory (mode 0700) named after its owner's pid and start time; a context manager."""

    def __init__(self) -> None:
        pid = os.getpid()
        prefix = f"pdkv-{pid}-{process_start_time(pid)}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=run_root()))
        if len(os.fsencode(self.path)) > _MAX_DIRECTORY_BYTES:
            self.remove()
            raise StartupError(f"{self.path} is too long for unix sockets; set TMPDIR to a shorter path")

    def endpoint(self, name: str) -> str:
        """The ZeroMQ endpoint of the process `name`."""
        return f"ipc://{self.path}/{name}"

    def forget(self, name: str) -> None:
        """Delete the sockets of a process that has ended for good."""
        for path in (self.path / name, *self.path.glob(f"{name}.*")):
            path.unlink(missing_ok=True)

    def introduce(self, url: str, shape: str) -> None:
        """Let `running_launches` find the launch from now on."""
        info = RunInfo(str(self.path), os.getpid(), url, shape)
        new = self.path / f"{_INFO_FILE}.new"
        new.write_bytes(msgspec.json.encode(info))
        new.rename(self.path / _INFO_FILE)

    def remove(self) -> None:
        """Delete the directory with its content, as far as a process that is about to end lets it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def running_launches() -> list[RunInfo]:
    """This user's launches that are ready and running."""
    found = []
    for path in sorted(run_directories(of_the_living=True)):
        with contextlib.suppress(OSError, msgspec.DecodeError):  # it is not ready yet, or just gone
            found.append(msgspec.json.decode((path / _INFO_FILE).read_bytes(), type=RunInfo))
    return found


def sweep_leftovers() -> list[Path]:
    """Delete this user's run directories without a living owner; returns those that are gone.

    An owner is alive only if a process with that pid and that start time exists, so a reused pid protects nothing.
    """
    left = list(run_directories(of_the_living=False))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)  # another launch may sweep, or an engine end there, at the same time
    return [path for path in left if not path.exists()]


def run_directories(*, of_the_living: bool) -> Iterator[Path]:
    """This user's directories with the name of a run directory, with a living owner or without. No links to any."""
    with os.scandir(run_root()) as entries:
        for entry in entries:
            match = _NAME.match(entry.name)
            if match is None or (process_start_time(int(match[1])) == int(match[2])) is not of_the_living:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    yield Path(entry.path)
