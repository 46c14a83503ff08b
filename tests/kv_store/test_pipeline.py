"""Commands ahead of replies: the bound on bytes under way, and who waits for whom."""

import socket
import threading
from collections.abc import Iterator

import pytest

from pdkv.errors import StoreTimeout, StoreUnavailable
from pdkv.kv_store.connections import Channel, ConnectionPool, Deadline
from pdkv.kv_store.pipeline import ByteBudget, Command, run_pipeline

_WAIT_S = 20


class Server:
    """The other end of a channel: knows how many bytes were asked for, and answers when it is told."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.channel = Channel(ours, "server")
        self.channel.deadline = Deadline(_WAIT_S, "server")
        self.socket.settimeout(_WAIT_S)

    def asked(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.socket.recv(count - len(data))
        return data

    def has_more(self) -> bool:
        self.socket.setblocking(False)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self.socket.settimeout(_WAIT_S)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.channel.close()
    server.socket.close()


def start(server: Server, sizes: list[int], budget: ByteBudget, max_commands: int = 64) -> threading.Thread:
    """Commands of one byte each, answered by one byte each."""
    commands = [Command([b"%d" % (index % 10)], size) for index, size in enumerate(sizes)]
    thread = threading.Thread(
        target=run_pipeline,
        args=(server.channel, commands, lambda index: server.channel.skip(1)),
        kwargs={"budget": budget, "max_commands": max_commands},
        daemon=True,
    )
    thread.start()
    return thread


def test_commands_go_ahead_as_far_as_the_bytes_allow(server: Server) -> None:
    """F7: the rest waits for replies."""
    budget = ByteBudget(100)
    thread = start(server, [30] * 7, budget)
    assert server.asked(3) == b"012"
    assert not server.has_more()
    server.socket.sendall(b"xx")  # half of them and more
    assert server.asked(2) == b"34"
    server.socket.sendall(b"x" * 5)
    assert server.asked(2) == b"56"
    thread.join(_WAIT_S)
    assert budget.try_acquire(100)


def test_commands_go_ahead_as_far_as_their_number_allows(server: Server) -> None:
    thread = start(server, [0] * 6, ByteBudget(100), max_commands=4)
    assert server.asked(4) == b"0123"
    assert not server.has_more()
    server.socket.sendall(b"x" * 6)
    assert server.asked(2) == b"45"
    thread.join(_WAIT_S)
    assert not thread.is_alive()


def test_a_value_larger_than_the_bound_travels_alone(server: Server) -> None:
    thread = start(server, [10, 500, 10], ByteBudget(100))
    for expected in (b"0", b"1", b"2"):
        assert server.asked(1) == expected
        assert not server.has_more()
        server.socket.sendall(b"x")
    thread.join(_WAIT_S)
    assert not thread.is_alive()


def test_a_call_waits_for_the_bytes_of_another_until_its_deadline(server: Server) -> None:
    """F7: a bounded wait, then an error; the other call is not disturbed."""
    budget = ByteBudget(100)
    budget.acquire(80, Deadline(_WAIT_S, "other"))
    server.channel.deadline = Deadline(0.05, "server")
    with pytest.raises(StoreTimeout, match=r"server: no answer within 0\.05 s"):
        run_pipeline(server.channel, [Command([b"0"], 30)], lambda index: None, budget=budget, max_commands=4)
    assert budget.try_acquire(20)


def test_bytes_that_come_free_wake_the_next_call(server: Server) -> None:
    budget = ByteBudget(100)
    budget.acquire(80, Deadline(_WAIT_S, "other"))
    thread = start(server, [30], budget)
    assert not server.has_more()
    budget.release(80)
    assert server.asked(1) == b"0"
    server.socket.sendall(b"x")
    thread.join(_WAIT_S)
    assert not thread.is_alive()


def test_a_call_that_fails_gives_its_bytes_back(server: Server) -> None:
    budget = ByteBudget(100)
    server.socket.close()
    with pytest.raises(StoreUnavailable):
        run_pipeline(
            server.channel, [Command([b"0"], 90)], lambda index: server.channel.skip(1), budget=budget, max_commands=4
        )
    assert budget.try_acquire(100)


def test_lines_and_values_are_told_apart_however_they_arrive(server: Server) -> None:
    value = bytes(range(256)) * 300
    stream = b"+first\r\n" + value + b"\r\n$2\r\nab\r\n"

    def send_slowly() -> None:
        for start in range(0, len(stream), 97):
            server.socket.sendall(stream[start : start + 97])

    thread = threading.Thread(target=send_slowly)
    thread.start()
    out = memoryview(bytearray(len(value)))
    assert server.channel.read_line() == b"+first"
    server.channel.read_into(out)
    assert out == value
    assert [server.channel.read_line() for _ in range(2)] == [b"", b"$2"]
    assert server.channel.read_exactly(4) == b"ab\r\n"
    thread.join(_WAIT_S)


def test_many_buffers_are_sent_in_order(server: Server) -> None:
    buffers = [bytes([index % 256]) * (index % 700) for index in range(2000)]
    thread = threading.Thread(target=server.channel.send, args=(buffers,))
    thread.start()
    expected = b"".join(buffers)
    assert server.asked(len(expected)) == expected
    thread.join(_WAIT_S)


def test_a_closed_pool_opens_nothing() -> None:
    server = Server()
    pool = ConnectionPool(lambda deadline: server.channel, "server")
    assert pool.run(lambda channel: 5, Deadline(_WAIT_S, "server")) == 5
    pool.close()
    pool.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        pool.run(lambda channel: 5, Deadline(_WAIT_S, "server"))
    assert server.socket.recv(1) == b""  # it closed what it had
    server.socket.close()


def test_a_channel_that_failed_is_not_used_again() -> None:
    servers = [Server(), Server()]
    channels = iter(server.channel for server in servers)
    pool = ConnectionPool(lambda deadline: next(channels), "server")

    def fail(channel: Channel) -> None:
        raise StoreTimeout("late")

    with pytest.raises(StoreTimeout):
        pool.run(fail, Deadline(_WAIT_S, "server"))
    assert pool.run(lambda channel: channel, Deadline(_WAIT_S, "server")) is servers[1].channel
    pool.close()
    for server in servers:
        server.socket.close()
