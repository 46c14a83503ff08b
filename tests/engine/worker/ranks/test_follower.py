"""The other ranks' view of rank 0."""

import os
import socket

import pytest

from pdkv.engine.worker.ranks.channel import RankChannel
from pdkv.engine.worker.ranks.follower import FirstRank
from pdkv.engine.worker.ranks.ring_queue import RingWriter


def test_news_that_come_while_a_rank_ends_go_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector's thread that did not end in time: the descriptor could be another's by then."""
    ours, theirs = socket.socketpair()
    read_fd, write_fd = os.pipe()
    channel, write = RankChannel(ours, "rank 1"), os.write
    ring = RingWriter([channel], chunk_bytes=64)
    channel.send_fds([write_fd])
    os.close(write_fd)
    ranks = [FirstRank(theirs, 1, timeout_s=60.0, start_timeout_s=60.0)]

    def write_late(fd: int, data: bytes) -> int:
        ranks[0].close()
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_late)
    ranks[0].notify()
    assert os.read(read_fd, 2) == b"\0"
    ranks.clear()
    assert os.read(read_fd, 2) == b""  # with its last user the descriptor is closed
    os.close(read_fd)
    ring.close()
    channel.close()
