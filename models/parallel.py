"""Tensor parallelism: the exchanges between the ranks of one model during a forward pass."""

import logging
import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pdkv.errors import RankError, RankGone, RankTimeout
from pdkv.models.rank_memory import SLOT_BYTES, RankMemory
from pdkv.models.shard import WHOLE, Shard

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""NCCL's watchdog ends the process without a word: a waiter for the step first reports which rank was lost."""


class TensorParallel:
    """The exchanges of a single rank, which are trivial; layers of a model on one rank never call them."""

    shard = WHOLE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x (any shape, contiguous), identical on each rank. Overwrites x and returns it.

        Raises:
            RankTimeout: a rank did not come in time.
            RankGone: a rank went away.
        """
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x (n, k) side by side, (n, size * k), on each rank. Raises as `all_reduce` does."""
        return x

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, no rank waits longer than this for another."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


ALONE = TensorParallel()


class HostRanks(TensorParallel):
    """Several ranks on one host's CPU, over shared memory."""

    def __init__(self, shard: Shard, peers: Sequence[socket.socket], timeout_s: float) -> None:
        """Meet the other ranks over `peers`. Raises as RankMemory does."""
        self.shard = shard
        self._memory = RankMemory(shard, peers, timeout_s)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        for start in range(0, flat.numel(), SLOT_BYTES // x.itemsize):
            part = flat[start : start + SLOT_BYTES // x.itemsize]
            torch.sum(self._memory.exchange(part), 0, out=part)  # in the order of ranks: the same bits everywhere
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        sides = x.new_empty(rows, self.shard.size, columns)
        num_columns = min(columns, SLOT_BYTES // x.itemsize)
        num_rows = max(SLOT_BYTES // max(num_columns * x.itemsize, 1), 1)
        for row in range(0, rows, num_rows):
            for column in range(0, columns, num_columns):
                part = x[row : row + num_rows, column : column + num_columns]
                parts = self._memory.exchange(part)
                sides[row : row + num_rows, :, column : column + num_columns].copy_(parts.transpose(0, 1))
        return sides.view(rows, self.shard.size * columns)

    def set_timeout(self, timeout_s: float) -> None:
        self._memory.timeout_s = timeout_s

    def close(self) -> None:
        self._memory.close()


class DeviceRanks(TensorParallel):
    """Several ranks over a torch.distributed group, which uses NCCL on CUDA devices. There is no global default group.

    NCCL's collectives go to the current stream, like any kernel, and the host waits for none of them. So no call here
    notices a lost rank; the step's event simply never comes. Waits for the event have a deadline (PendingStep), after
    which this object is closed, which aborts running collectives. torch's own watchdog only ends the process, and acts
    later.

    In CUDA graphs: the calls can be captured if each was made once before, with capture_error_mode="thread_local",
    and all ranks capture and replay the same graphs in the same order. Neither the watchdog nor an abort has been
    shown to end a graph that waits for a lost rank.
    """

    def __init__(self, shard: Shard, group: Any, grace_s: float = 0.0) -> None:
        """`grace_s`: how much longer than the timeout of `set_timeout` the group itself waits."""
        from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions  # type: ignore[attr-defined]

        self.shard = shard
        self._group = group
        self._grace_s = grace_s
        self._sum, self._gather = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False  # on the current stream

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda group: group.allreduce([x], self._sum))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        size, (rows, columns) = self.shard.size, x.shape
        parts = x.new_empty(size, rows, columns)
        flat = x.contiguous().view(-1)
        self._run(lambda group: group._allgather_base(parts.view(-1), flat, self._gather))
        return parts.transpose(0, 1).reshape(rows, size * columns)

    def set_timeout(self, timeout_s: float) -> None:
        self._group._set_default_timeout(timedelta(seconds=timeout_s + self._grace_s))

    def close(self) -> None:
        """Leave the group at once, even if it is still working; ranks that wait for this one fail."""
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError as error:  # the process ends soon, and its memory with it
                logger.warning("rank %d of %d: its group does not end: %s", self.shard.rank, self.shard.size, error)

    def _run(self, collective: Callable[[Any], Any]) -> None:
        """Raises RankGone, RankTimeout."""
        if self._group is None:
            raise RankGone(f"rank {self.shard.rank} of {self.shard.size} has left the others")
        try:
            work = collective(self._group)
            if work is not None:  # Gloo's, which is waited for
                work.wait()
        except RuntimeError as error:
            raise _rank_error(error, self.shard) from None


def join_ranks(
    shard: Shard, device: torch.device, peers: Sequence[socket.socket], store: Path | None, timeout_s: float
) -> TensorParallel:
    """Meet the other ranks: over shared memory on CPU, by NCCL on CUDA.

    Args:
        peers: a socket to each other rank, in their order (rank_sockets.py); owned from now on.
        store: CUDA: the file, in a private directory, in which NCCL's ranks find each other's addresses.
        timeout_s: limit of this meeting and, until `set_timeout`, of every later wait for another rank.

    Raises:
        RankTimeout, RankGone: not all came.
        ConfigError: more ranks than CUDA devices, or no memory to share.
    """
    if shard.size == 1:
        return ALONE
    if device.type != "cuda":
        return HostRanks(shard, peers, timeout_s)
    for peer in peers:
        peer.close()
    assert store is not None, "NCCL's ranks need a file to meet"
    try:
        return DeviceRanks(shard, _nccl_group(store, shard, device, timedelta(seconds=timeout_s)), _GRACE_S)
    except RuntimeError as error:
        raise _rank_error(error, shard) from None


def _nccl_group(path: Path, shard: Shard, device: torch.device, timeout: timedelta) -> Any:
    from torch.distributed import FileStore, ProcessGroupNCCL  # type: ignore[attr-defined]

    store = FileStore(str(path), shard.size)
    store.set_timeout(timeout)
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: Any = ProcessGroupNCCL(store, shard.rank, shard.size, options)
    group.eager_connect_single_device(device)  # now, and not in the first step
    return group


def _rank_error(error: RuntimeError, shard: Shard) -> RankError:
    """torch names the kind of failure in its text only."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = re.sub(r"^\[[^]]*:\d+\] ", "", text)  # a source file of Gloo's
    kind = RankTimeout if re.search("timed out|timeout", text, re.IGNORECASE) else RankGone
    return kind(f"rank {shard.rank} of {shard.size} lost another one: {text}")
