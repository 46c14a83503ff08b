"""Sums of few rows over memory that the GPUs of all ranks map into each other (torch's symmetric memory).

A decode step sums a few KiB after every layer, for which NCCL takes many times as long as moving the bytes. Here each
GPU reads the others' parts itself (or their switch adds them up), in one kernel between two barriers.
"""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch

from pdkv.base.clock import MONOTONIC
from pdkv.kernels.streams import streams_of
from pdkv.models.parallel import DeviceRanks, TensorParallel
from pdkv.models.shard import Shard

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 10
"""Bytes of a sum: 64 rows of 4096 values in bfloat16. NCCL is as fast for more."""

_DTYPES = (torch.float32, torch.bfloat16)  # that torch's kernels add up
_ALIGNMENT = 16  # bytes that their threads read at once
_RELEASE_TIMEOUT_S = 2.0


class SharedSums(ABC):
    """One rank's part of the shared memory."""

    buffer: torch.Tensor  # (MAX_BYTES,) uint8, this rank's own

    @abstractmethod
    def add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of all ranks' `part` (n,), the start of their buffers, to `out` (n,), on the current stream."""

    def release(self) -> None:
        """End kernels that still wait for other ranks; their sums are then wrong."""


class SymmetricRanks(TensorParallel):
    """Small sums go over shared memory, everything else over the group. All on one stream, since barriers are counted
    in its order.
    """

    def __init__(self, group: DeviceRanks, sums: SharedSums) -> None:
        self.shard = group.shard
        self._group = group
        self._sums = sums

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.nbytes > MAX_BYTES or x.nbytes % _ALIGNMENT or x.dtype not in _DTYPES or not x.nbytes:
            return self._group.all_reduce(x)
        part, flat = self._sums.buffer[: x.nbytes].view(x.dtype), x.view(-1)
        part.copy_(flat)
        self._sums.add_up(part, flat)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(x)

    def set_timeout(self, timeout_s: float) -> None:
        self._group.set_timeout(timeout_s)

    def close(self) -> None:
        try:
            self._sums.release()
        finally:  # a device that answers no more may not keep the group open
            self._group.close()


class CudaSums(SharedSums):
    """torch.distributed._symmetric_memory, of GPUs of one host."""

    def __init__(self, shard: Shard, device: torch.device, path: Path, timeout_s: float) -> None:
        """Meet the other ranks, which must all do so, over the file `path`.

        Raises:
            Exception: of any type: from the driver, for a timeout, or because this version of torch works differently.
        """
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
        from torch.distributed import FileStore  # type: ignore[attr-defined]
        from torch.distributed._symmetric_memory import rendezvous

        store = FileStore(str(path), shard.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        self._name = cast(Any, f"pdkv:{path}")  # of a type that not every torch has
        self._group = ProcessGroup(store, shard.rank, shard.size)
        _register_process_group(self._name, self._group)
        # With an id memory is never given back, which would wait for kernels that wait for a lost rank.
        alloc_id = random.getrandbits(60)
        self.buffer = _SymmetricMemory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, None, alloc_id)
        self._handle: Any = rendezvous(self.buffer, self._name)
        self._shard = shard
        self._streams = streams_of(device)
        self._has_multicast = bool(self._handle.multicast_ptr)  # all ranks' or nobody's
        # What `release` launches is loaded now: the driver may load no kernel while another one spins. Nobody has
        # given a signal yet, since no sum begins before all ranks are here.
        self._pad(shard.rank).fill_(0)

    def add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
        ops = torch.ops.symm_mem
        add_up = ops.multimem_all_reduce_ if self._has_multicast else ops.one_shot_all_reduce
        out.copy_(add_up(part, "sum", self._name))

    def release(self) -> None:
        """Kernels wait in a loop for signals of other ranks, and no abort ends them: this sets the signals that a lost
        rank would have sent, and clears those that it would have received, from another stream.
        """
        done, given, signals = self._streams.make_event(), self._streams.make_event(), self._streams.make_stream()
        done.record()
        pads = [self._pad(rank) for rank in range(self._shard.size)]
        deadline = MONOTONIC.now() + _RELEASE_TIMEOUT_S
        while not done.query():
            if MONOTONIC.now() > deadline:
                logger.warning("rank %d of %d: its GPU waits for a lost rank", self._shard.rank, self._shard.size)
                return
            with signals.on():
                for rank, pad in enumerate(pads):
                    pad.fill_(1 if rank == self._shard.rank else 0)
                given.record()
            given.synchronize(_RELEASE_TIMEOUT_S)

    def _pad(self, rank: int) -> torch.Tensor:
        """Signals of the others to a rank: int32, not 0 where one is given that was not taken."""
        pad: torch.Tensor = self._handle.get_signal_pad(rank, dtype=torch.int32)
        return pad


def over_symmetric_memory(
    group: DeviceRanks,
    device: torch.device,
    path: Path,
    timeout_s: float,
    make: Callable[[Shard, torch.device, Path, float], SharedSums] = CudaSums,
) -> TensorParallel:
    """The ranks of `group`, over symmetric memory if all of them support it. The choice is the same on all ranks, and
    logged.

    Args:
        path: a file that does not exist yet, by which the ranks find each other.
        timeout_s: limit for that.
        make: makes a rank's sums.

    Raises:
        RankTimeout, RankGone: a rank went away meanwhile.
    """
    sums: SharedSums | None = None
    why = _without_access(group, device)
    if _all_say(group, why == "", device):
        try:
            sums = make(group.shard, device, path, timeout_s)
        except Exception as error:  # as CudaSums says
            why = f"{type(error).__name__}: {error}"
    if _all_say(group, sums is not None, device) and sums is not None:
        ranks = SymmetricRanks(group, sums)
        if _all_say(group, _adds_up(ranks, group, device), device):
            logger.info("sums of up to %d KiB go over symmetric memory", MAX_BYTES >> 10)
            return ranks
        why = "its sums differ from NCCL's, or between ranks"
    logger.info("all sums go over NCCL, not over symmetric memory: %s", why or "another rank says why")
    return group


def _without_access(group: DeviceRanks, device: torch.device) -> str:
    """Why the ranks' devices cannot read each other's memory; empty: they can."""
    own = device.index if device.index is not None else 0
    found = group.all_gather(torch.tensor([[own]], device=device)).flatten().tolist()
    if len(set(found)) < len(found):
        return f"ranks share GPUs: {found}"
    far = [other for other in found if other != own and not torch.cuda.can_device_access_peer(own, other)]
    return f"GPU {own} has no access to GPUs {far}" if far else ""


def _all_say(group: DeviceRanks, own: bool, device: torch.device) -> bool:
    return bool(group.all_gather(torch.tensor([[own]], dtype=torch.uint8, device=device)).all())


def _adds_up(ranks: SymmetricRanks, group: DeviceRanks, device: torch.device) -> bool:
    """Whether random sums of the least size and of the largest are right, and the same bits on every rank."""
    generator = torch.Generator().manual_seed(group.shard.rank)
    for num_values in (_ALIGNMENT // 2, MAX_BYTES // 2):
        x = torch.randn(num_values, generator=generator).to(device, torch.bfloat16)
        expected, result = group.all_reduce(x.float()), ranks.all_reduce(x).view(1, -1)
        everyone = group.all_gather(result).view(group.shard.size, -1)
        if not torch.equal(everyone, result.expand_as(everyone)):
            return False
        if not torch.allclose(result[0].float(), expected, rtol=2e-2, atol=2e-2):
            return False
    return True
