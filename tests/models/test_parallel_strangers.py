"""Whoever else is on the host: the ranks of an engine listen nowhere, and what strangers do costs them nothing."""

import contextlib
import os
import socket
import stat
import subprocess
import sys

import psutil
import pytest
import torch
from rank_threads import on_ranks
from warm import PYTHON, WarmPopen

from pdkv.errors import RankGone
from pdkv.models.parallel import TensorParallel, join_ranks
from pdkv.models.rank_sockets import connect_ranks
from pdkv.models.shard import Shard

_RANKS = """
import resource, sys
import torch
from rank_threads import on_ranks
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.set_num_threads(1)

def run(parallel):
    if parallel.shard.rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    return [parallel.all_reduce(torch.ones(rows)).sum().item() for rows in (4, 1 << 20)]

print(on_ranks(2, run), flush=True)
"""


def listening(pid: int) -> list[tuple[str, int]]:
    """TCP addresses on which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]


def test_strangers_that_connect_in_a_loop_end_no_rank() -> None:
    """Each connection used to cost a descriptor; without any left, the rank was aborted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with WarmPopen(
        [*PYTHON, "-c", _RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as ranks, contextlib.ExitStack() as connections:  # fmt: skip
        assert ranks.stdout is not None
        assert ranks.stdout.readline() == "ready\n"
        for address in listening(ranks.pid):
            for _ in range(200):
                with contextlib.suppress(OSError):
                    connections.enter_context(socket.create_connection(address, 1.0))
        answer, _ = ranks.communicate("go\n", timeout=60)
    assert ranks.returncode == 0
    assert answer == f"{[[8.0, 2.0 * (1 << 20)]] * 2}\n"


def test_ranks_listen_nowhere() -> None:
    before = listening_sockets()

    def run(parallel: TensorParallel) -> list[int]:
        parallel.all_reduce(torch.ones(4))
        new = listening_sockets() - before
        parallel.all_reduce(torch.ones(4))  # neither leaves before the other has looked
        return sorted(new)

    assert on_ranks(2, run) == [[], []]


def listening_sockets() -> set[int]:
    """Descriptors of this process on which somebody could connect, whatever the family."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(fd)
    return found


@pytest.mark.parametrize(
    "word",
    [b"", b"x", bytes(24), (1).to_bytes(8, "little") + (0).to_bytes(8, "little") * 2],
    ids=["empty", "short", "zeros", "self"],
)
def test_a_rank_that_says_something_else_is_no_rank(word: bytes) -> None:
    """Another version, or sockets that were handed out wrongly: the start fails with a type."""
    ours, theirs = connect_ranks(2)
    theirs[0].send(word) if word else theirs[0].close()
    with pytest.raises(RankGone, match="rank 0 of 2: rank 1"):
        join_ranks(Shard(0, 2), torch.device("cpu"), ours, None, 5.0)
    theirs[0].close()


def test_ranks_that_exchange_different_things_are_an_error() -> None:
    """Never a sum of two different layers."""

    def run(parallel: TensorParallel) -> str:
        with pytest.raises(RankGone, match="is not at exchange") as raised:
            parallel.all_reduce(torch.ones(4 + parallel.shard.rank))
        with pytest.raises(RankGone, match="before"):
            parallel.all_reduce(torch.ones(4))
        return str(raised.value)

    assert len(on_ranks(2, run)) == 2
