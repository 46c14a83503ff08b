"""The engine's side of Mooncake's client against processes that die, say nonsense or cannot be started."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from pdkv.errors import StoreTimeout, StoreUnavailable
from pdkv.kv_store import mooncake_host
from pdkv.kv_store.connections import Deadline
from pdkv.kv_store.mooncake_host import ClientConnection, MooncakeHost
from pdkv.kv_store.mooncake_process import LENGTH, Outcome


@pytest.fixture
def host() -> Iterator[MooncakeHost]:
    with socket.create_server(("127.0.0.1", 0)) as master:
        host = MooncakeHost(master.getsockname(), "P2PHANDSHAKE", 5.0, "Mooncake")
        with closing(host):
            yield host


def connect(host: MooncakeHost) -> ClientConnection:
    return host.connect(Deadline(5.0, "Mooncake"), 1.0)


def connection() -> tuple[ClientConnection, socket.socket]:
    """And the client's end of it."""
    ours, theirs = socket.socketpair()
    made = ClientConnection(ours, os.memfd_create("test"), "Mooncake")
    made.deadline = Deadline(5.0, "Mooncake")
    return made, theirs


def outcome(*codes: int, error: str = "") -> bytes:
    answer = msgspec.msgpack.encode(Outcome(codes, error))
    return LENGTH.pack(len(answer)) + answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (LENGTH.pack(0xFFFFFFFF), "answers with 4294967295 bytes"),
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", "answer is invalid"),
        (LENGTH.pack(2) + msgspec.msgpack.encode("x"), "answer is invalid"),
        (outcome(1), "unexpected length"),
        (outcome(error="it broke"), "it broke"),
        (outcome(1, 1)[:-1], "closed the connection"),
    ],
)
def test_an_answer_that_is_none_is_unavailable(answer: bytes, says: str) -> None:
    ours, theirs = connection()
    with closing(ours), theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(StoreUnavailable, match=says):
            ours.call("contains", ["a", "b"])


def test_codes_of_any_width_are_an_answer() -> None:
    ours, theirs = connection()
    with closing(ours), theirs:
        codes = [-(1 << 63), (1 << 63) - 1] * 5000
        theirs.sendall(outcome(*codes))
        assert ours.call("get", ["name"] * len(codes)) == codes


def test_memory_that_there_is_not_is_unavailable() -> None:
    ours, theirs = connection()
    with closing(ours), theirs, pytest.raises(StoreUnavailable, match="bytes for passing values cannot be allocated"):
        ours.reserve(1 << 62)


@pytest.mark.parametrize("failing", ["socketpair", "Popen"])
def test_what_the_system_refuses_is_unavailable_this_time(
    host: MooncakeHost, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing open."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("not now")

    module = {"socketpair": mooncake_host.socket, "Popen": mooncake_host.subprocess}
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module[failing], failing, refuse)
    with pytest.raises(StoreUnavailable, match="not now"):
        connect(host)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.processes
def test_a_client_that_takes_no_connection_is_a_timeout(host: MooncakeHost) -> None:
    host._process = subprocess.Popen(["sleep", "60"])
    host._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host._is_ready = True
    with theirs, pytest.raises(StoreTimeout):
        host.connect(Deadline(0.1, "Mooncake"), 1.0)
    assert host._process.poll() is None, "its next caller may have more time"


@pytest.mark.processes
@pytest.mark.parametrize("says", [b"\xc1", msgspec.msgpack.encode([1]), b""])
def test_a_client_that_starts_with_nonsense_is_ended(host: MooncakeHost, says: bytes) -> None:
    process = subprocess.Popen(["sleep", "60"])
    host._process = process
    host._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if says:
            theirs.send(says)
        else:
            theirs.close()
        with pytest.raises(StoreUnavailable):
            connect(host)
    assert process.poll() is not None
    assert host._process is None
