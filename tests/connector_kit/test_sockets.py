"""Which sockets of a process others can send to."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdkv.connector_kit.rig import sockets
from pdkv.connector_kit.rig.sockets import Listener, listeners


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bound(stack: ExitStack, path: Path, kind: int) -> Listener:
    held = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
    held.bind(str(path))
    if kind != socket.SOCK_DGRAM:
        held.listen()
    return Listener(socket.AF_UNIX, str(path), kind)


def test_finds_what_listens_and_what_takes_datagrams(stack: ExitStack, tmp_path: Path) -> None:
    stream = bound(stack, tmp_path / "stream", socket.SOCK_STREAM)
    datagrams = bound(stack, tmp_path / "datagrams", socket.SOCK_DGRAM)
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    removed = bound(stack, tmp_path / "removed", socket.SOCK_STREAM)
    (tmp_path / "removed").unlink()
    found = listeners(os.getpid())
    assert {stream, datagrams, Listener(socket.AF_INET, tcp.getsockname())} <= {*found}
    assert removed not in found


def test_a_socket_without_a_type_is_passed_over(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels list sockets, a process's own among them, whose type reads 0."""
    stream = bound(stack, tmp_path / "stream", socket.SOCK_STREAM)
    read = sockets._lines

    def without_a_type(pid: int, name: str) -> list[str]:
        lines = read(pid, name)
        return [line.replace(" 0001 ", " 0000 ") for line in lines] if name == "unix" else lines

    assert stream in listeners(os.getpid())
    monkeypatch.setattr(sockets, "_lines", without_a_type)
    assert stream not in listeners(os.getpid())
