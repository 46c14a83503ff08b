"""The ring broadcast queue: every reader gets every message in order, and every wait ends."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from pdkv.engine.worker.ranks.channel import RankChannel
from pdkv.engine.worker.ranks.ring_queue import CHUNK_BYTES, NUM_CHUNKS, RingReader, RingWriter
from pdkv.errors import RankGone, RankTimeout


class Ring:
    """A writer and its readers in one process, over real socket pairs and a real memfd."""

    def __init__(self, num_readers: int, num_chunks: int, chunk_bytes: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_readers)]
        self.ours = [RankChannel(ours, f"rank {i + 1}") for i, (ours, _) in enumerate(pairs)]
        self.theirs = [RankChannel(theirs, "rank 0") for _, theirs in pairs]
        self.writer = RingWriter(self.ours, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
        self.readers = [RingReader(channel, i, 5.0) for i, channel in enumerate(self.theirs)]

    def close(self) -> None:
        for end in (self.writer, *self.readers, *self.ours, *self.theirs):
            end.close()


@pytest.fixture
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """Parameters: readers, chunks, bytes of a chunk."""
    made = Ring(*getattr(request, "param", (2, 3, 64)))
    yield made
    made.close()


def read_all(reader: RingReader, count: int) -> list[bytes]:
    return [bytes(reader.get(60.0)) for _ in range(count)]


def test_the_shipped_ring_has_ten_chunks() -> None:
    assert NUM_CHUNKS == 10
    big = Ring(1, NUM_CHUNKS, CHUNK_BYTES)
    message = os.urandom(CHUNK_BYTES)
    big.writer.put(message, 5.0)
    assert big.readers[0].get(60.0) == message
    big.close()


def test_every_reader_gets_every_message_in_order(ring: Ring) -> None:
    messages = [b"", b"a", b"x" * 64]
    for message in messages:
        ring.writer.put(message, 5.0)
    assert [read_all(reader, 3) for reader in ring.readers] == [messages] * 2


def test_the_ring_wraps_around(ring: Ring) -> None:
    for i in range(20):
        message = bytes([i]) * (i * 3)
        ring.writer.put(message, 5.0)
        assert [reader.get(60.0) for reader in ring.readers] == [message] * 2


def test_a_message_longer_than_a_chunk_goes_over_the_socket_between_others(ring: Ring) -> None:
    long, longer = os.urandom(65), os.urandom(3_000_000)
    got: dict[int, list[bytes]] = {}

    def read(index: int) -> None:
        got[index] = read_all(ring.readers[index], 4)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for message in (b"before", long, longer, b"behind"):
        ring.writer.put(message, 5.0)
    for thread in threads:
        thread.join()
    assert got == {index: [b"before", long, longer, b"behind"] for index in range(2)}


def test_a_chunk_is_writable_again_when_all_have_read_it(ring: Ring) -> None:
    fast, slow = ring.readers
    for i in range(3):
        ring.writer.put(bytes([i]), 5.0)
    read_all(fast, 3)
    with pytest.raises(RankTimeout, match="rank 2 did not read in time"):
        ring.writer.put(b"one too many", 0.02)
    assert slow.get(60.0) == b"\0"
    ring.writer.put(b"fits", 0.02)
    assert read_all(slow, 3) == [b"\1", b"\2", b"fits"]
    assert fast.get(60.0) == b"fits"


def test_a_writer_that_waits_goes_on_when_the_slow_reader_reads(ring: Ring) -> None:
    for i in range(3):
        ring.writer.put(bytes([i]), 5.0)
    writing = threading.Thread(target=ring.writer.put, args=(b"late", 5.0))
    writing.start()
    assert [read_all(reader, 3) for reader in ring.readers] == [[b"\0", b"\1", b"\2"]] * 2
    assert [reader.get(60.0) for reader in ring.readers] == [b"late"] * 2
    writing.join()


def test_an_empty_ring_is_a_timeout(ring: Ring) -> None:
    with pytest.raises(RankTimeout, match="rank 0 sent nothing in time"):
        ring.readers[0].get(0.01)
    ring.writer.put(b"x", 5.0)
    assert ring.readers[0].get(0.01) == b"x"


def test_a_reader_that_died_is_gone_when_the_writer_needs_it(ring: Ring) -> None:
    for _ in range(3):
        ring.writer.put(b"x", 5.0)
    read_all(ring.readers[0], 3)
    ring.theirs[1].close()
    with pytest.raises(RankGone, match="rank 2"):
        ring.writer.put(b"x", 5.0)
    with pytest.raises(RankGone, match="rank 2"):
        ring.ours[1].send(b"x" * 1000, 5.0)


def test_what_was_written_is_read_before_the_writer_is_found_gone(ring: Ring) -> None:
    ring.writer.put(b"last words", 5.0)
    for channel in ring.ours:
        channel.close()
    assert [reader.get(60.0) for reader in ring.readers] == [b"last words"] * 2
    with pytest.raises(RankGone, match="rank 0"):
        ring.readers[0].get(None)


def test_a_reader_that_stops_in_an_overflow_is_a_timeout(ring: Ring) -> None:
    with pytest.raises(RankTimeout, match="rank 1 did not answer in time"):
        ring.writer.put(bytes(10_000_000), 0.05)


def test_nobody_offers_a_ring() -> None:
    ours, theirs = socket.socketpair()
    channel = RankChannel(theirs, "rank 0")
    with pytest.raises(RankTimeout):
        RingReader(channel, 0, 0.01)
    ours.close()
    with pytest.raises(RankGone):
        RingReader(channel, 0, 5.0)
    channel.close()
    with pytest.raises(RankGone):
        channel.receive(1.0)


def reader_process(channel: RankChannel, index: int, others: Sequence[RankChannel], answer: bool) -> None:
    """Reads until the writer says end (or forever); reports what it read."""
    for other in others:
        other.close()
    reader = RingReader(channel, index, 5.0)
    total = 0
    while (message := reader.get(None)) != b"end":
        total += sum(message)
    if answer:
        channel.send(str(total).encode(), 5.0)
    os._exit(0)


def fork_readers(count: int, *, answer: bool) -> tuple[list[RankChannel], list[int]]:
    pairs = [socket.socketpair() for _ in range(count)]
    ours = [RankChannel(a, f"rank {i + 1}") for i, (a, _) in enumerate(pairs)]
    theirs = [RankChannel(b, "rank 0") for _, b in pairs]
    pids = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            others = [channel for channel in (*ours, *theirs) if channel is not theirs[index]]
            reader_process(theirs[index], index, others, answer)
        pids.append(pid)
    for channel in theirs:
        channel.close()
    return ours, pids


def test_processes_read_what_another_one_writes() -> None:
    channels, pids = fork_readers(3, answer=True)
    writer = RingWriter(channels, num_chunks=4, chunk_bytes=128)
    messages = [os.urandom(size % 200) for size in range(600)]
    for message in messages:
        writer.put(message, 10.0)
    writer.put(b"end", 10.0)
    assert [int(channel.receive(10.0)) for channel in channels] == [sum(map(sum, messages))] * 3
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    writer.close()
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGSTOP, RankTimeout), (signal.SIGKILL, RankGone)])
def test_a_stopped_process_is_a_timeout_and_a_killed_one_is_gone(
    number: signal.Signals, error: type[Exception]
) -> None:
    channels, pids = fork_readers(2, answer=False)
    writer = RingWriter(channels, num_chunks=2, chunk_bytes=16)
    os.kill(pids[1], number)
    timeout_s = 0.5 if error is RankTimeout else 30.0
    writer.put(b"x", timeout_s)
    writer.put(b"x", timeout_s)
    with pytest.raises(error, match="rank 2"):
        writer.put(b"x", timeout_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    writer.close()
    for channel in channels:
        channel.close()
