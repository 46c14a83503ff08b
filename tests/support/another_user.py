"""What another user of this host can do to a process, tried by a child of this process that has become nobody."""

import ctypes
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest

from pdkv.connector_kit.rig.sockets import Listener

NOBODY = 65534
MAX_DATAGRAMS = 20_000
_PTRACE_SEIZE = 0x4206
_SYS_PIDFD_GETFD = 438

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

Result = TypeVar("Result")


def as_nobody(function: Callable[[], Result]) -> Result:
    """Run a function in a child that is another user, without this process' descriptors; its result as JSON has it.

    Raises:
        AssertionError: the child failed.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write_fd, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            result = json.dumps(function())
        except BaseException:
            result = json.dumps({"failed": traceback.format_exc()})
        os.write(3, result.encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd) as answer:
        found = json.loads(answer.read())
    os.waitpid(pid, 0)
    assert not (isinstance(found, dict) and "failed" in found), found
    return found  # type: ignore[no-any-return]


def intrude(
    pids: Sequence[int], fds: Sequence[Sequence[int]], addresses: Sequence[int], doors: Sequence[Listener], folder: str
) -> list[str]:
    """Try all that a process of the same user could do; returns what worked.

    Args:
        fds: descriptors that each of `pids` has.
        addresses: of memory that each has mapped.
        doors: sockets below `folder`, a run directory.
    """
    attempts: dict[str, Callable[[], Any]] = {}
    for pid, own_fds, address in zip(pids, fds, addresses, strict=True):
        attempts |= {
            f"list the descriptors of {pid}": partial(os.listdir, f"/proc/{pid}/fd"),
            f"read the environment of {pid}": partial(_read, f"/proc/{pid}/environ"),
            f"see the memory of {pid}": partial(_read, f"/proc/{pid}/maps"),
            f"open the memory of {pid}": partial(_open, f"/proc/{pid}/mem", os.O_RDONLY),
            f"copy memory of {pid}": partial(_copy_memory, pid, address, "process_vm_readv"),
            f"write memory of {pid}": partial(_copy_memory, pid, address, "process_vm_writev"),
            f"trace {pid}": partial(_call, "ptrace", _PTRACE_SEIZE, pid, 0, 0),
            f"stop {pid}": partial(os.kill, pid, signal.SIGSTOP),
        }
        for fd in own_fds:
            path = f"/proc/{pid}/fd/{fd}"
            attempts[f"read {path}"] = partial(_open, path, os.O_RDONLY)
            attempts[f"write {path}"] = partial(_open, path, os.O_WRONLY)
            attempts[f"take descriptor {fd} of {pid}"] = partial(_take, pid, fd)
    attempts[f"list {folder}"] = partial(os.listdir, folder)
    attempts[f"write into {folder}"] = partial(_open, f"{folder}/stranger", os.O_CREAT | os.O_WRONLY)
    for door in doors:
        attempts[f"connect to {door}"] = partial(_connect, door)
    return [what for what, attempt in attempts.items() if _works(attempt)]


def flood(doors: Sequence[Listener], size: int) -> int:
    """Send datagrams to each until its queue is full, or there were many; returns how many were taken."""
    taken = 0
    for door in doors:
        with socket.socket(door.family, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            for _ in range(MAX_DATAGRAMS):
                try:
                    stranger.sendto(b"\xff" * size, door.address)
                    taken += 1
                except OSError:
                    break
    return taken


def _works(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _open(path: str, flags: int) -> None:
    os.close(os.open(path, flags | os.O_NONBLOCK, 0o600))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _connect(door: Listener) -> None:
    with socket.socket(door.family, door.type) as stranger:
        stranger.settimeout(1.0)
        stranger.connect(door.address)


def _take(pid: int, fd: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        _call("syscall", _SYS_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def _copy_memory(pid: int, address: int, call: str) -> None:
    """Of nothing but zeros, should it come to that."""
    own = ctypes.create_string_buffer(8)
    local, remote = _Iovec(ctypes.addressof(own), 8), _Iovec(address, 8)
    _call(call, pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
