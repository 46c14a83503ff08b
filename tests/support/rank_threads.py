"""Ranks as threads of one process: real sockets and shared memory, without the start of processes."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from pdkv.models.parallel import DeviceRanks, TensorParallel, join_ranks
from pdkv.models.rank_sockets import connect_ranks
from pdkv.models.shard import Shard

Result = TypeVar("Result")


def join_over_gloo(shard: Shard, store: Store, timeout_s: float) -> TensorParallel:
    """What ranks on CUDA devices join, over the processor."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return DeviceRanks(shard, ProcessGroupGloo(store, shard.rank, shard.size, options))


def on_ranks(
    size: int, run: Callable[[TensorParallel], Result], *, timeout_s: float = 30.0, over_gloo: bool = False
) -> list[Result]:
    """What `run` returns on each of `size` ranks; raises what the first of them raised."""
    peers, store = connect_ranks(size), HashStore()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        try:
            shard = Shard(rank, size)
            parallel = (
                join_over_gloo(shard, store, timeout_s)
                if over_gloo
                else join_ranks(shard, torch.device("cpu"), peers[rank], None, timeout_s)
            )
            try:
                results[rank] = run(parallel)
            finally:
                parallel.close()
                for peer in peers[rank]:
                    peer.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(size)]
