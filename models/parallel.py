"""Tensor parallelism: what the ranks of one model say to each other in the middle of a forward pass."""

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdkv.errors import RankError, RankGone, RankTimeout
from pdkv.models.shard import WHOLE, Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it, but mypy does not see it there


_DIRECT_BYTES = 256 << 10
"""Gloo's ring wakes several threads: 2 to 8 times as long as a direct exchange of few rows, on a busy machine."""


class TensorParallel:
    """One rank alone, with nobody to talk to. Layers that one rank uses never ask it anything."""

    shard = WHOLE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x (any shape, contiguous), the same on each of them. Overwrites x and returns it.

        Raises:
            RankTimeout: a rank did not come in time.
            RankGone: a rank went away.
        """
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x (n, k) side by side, (n, size * k), on each of them. Raises as `all_reduce` does."""
        return x

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, no rank waits longer than this for another."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


ALONE = TensorParallel()


class RankGroup(TensorParallel):
    """Several ranks over a process group of torch.distributed; there is no global default group."""

    def __init__(self, shard: Shard, group: Any, timeout: timedelta, *, direct_bytes: int) -> None:
        """`group`: a ProcessGroupGloo or ProcessGroupNCCL with that timeout; NCCL's waits are ordered on the stream.

        Args:
            direct_bytes: up to this size a tensor goes straight to each other rank instead of around a ring.
        """
        self.shard = shard
        self._group = group
        self._timeout = timeout
        self._direct_bytes = direct_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if x.nbytes <= self._direct_bytes:
                return torch.sum(self._exchange(x), 0, out=x)  # in the order of ranks: the same bits everywhere
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise _rank_error(error, self.shard) from None
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        size, (rows, columns) = self.shard.size, x.shape
        try:
            if x.nbytes <= self._direct_bytes:
                parts = self._exchange(x)
            else:
                parts = x.new_empty(size, rows, columns)
                self._group.allgather([list(parts)], [x]).wait()
        except RuntimeError as error:
            raise _rank_error(error, self.shard) from None
        return parts.transpose(0, 1).reshape(rows, size * columns)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, (size, ...): one hop, and with Gloo no thread between the caller and the socket."""
        rank, group = self.shard.rank, self._group
        parts = x.new_empty(self.shard.size, *x.shape)
        others = [other for other in range(self.shard.size) if other != rank]
        works = [group.send([x], other, 0) for other in others]
        works += [group.recv([parts[other]], other, 0) for other in others]
        parts[rank] = x
        for work in works:
            work.wait(self._timeout)  # direct ones do not know the group's
        return parts

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group._set_default_timeout(self._timeout)

    def close(self) -> None:
        self._group = None


def join_ranks(store: "Store", shard: Shard, device: torch.device, timeout_s: float) -> TensorParallel:
    """Meet the other ranks through `store`: NCCL on CUDA, Gloo over the loopback interface on CPU.

    Args:
        timeout_s: bound of this meeting and, until `set_timeout`, of every later wait for another rank.

    Raises:
        RankTimeout, RankGone: not all came.
        ConfigError: more ranks than CUDA devices.
    """
    if shard.size == 1:
        return ALONE
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    try:
        if device.type == "cuda":
            return RankGroup(shard, _nccl_group(store, shard, device, timeout), timeout, direct_bytes=-1)
        return RankGroup(shard, _gloo_group(store, shard, timeout), timeout, direct_bytes=_DIRECT_BYTES)
    except RuntimeError as error:
        raise _rank_error(error, shard) from None


def open_store(path: Path, size: int) -> "Store":
    """The file in which `size` ranks of one host find each other's addresses; the directory must be private."""
    import torch.distributed as distributed

    store: Store = distributed.FileStore(str(path), size)  # type: ignore[attr-defined]
    return store


def _gloo_group(store: "Store", shard: Shard, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._threads = 1  # one collective at a time
    options._timeout = timeout
    return gloo(store, shard.rank, shard.size, options)


def _nccl_group(store: "Store", shard: Shard, device: torch.device, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

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
