"""Ranks as threads of one process: a real Gloo group, without the start of processes."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed import HashStore

from pdkv.models.parallel import TensorParallel, join_ranks
from pdkv.models.shard import Shard

Result = TypeVar("Result")


def on_ranks(size: int, run: Callable[[TensorParallel], Result], *, timeout_s: float = 30.0) -> list[Result]:
    """What `run` returns on each of `size` ranks; raises what the first of them raised."""
    store = HashStore()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        try:
            parallel = join_ranks(store, Shard(rank, size), torch.device("cpu"), timeout_s)
            try:
                results[rank] = run(parallel)
            finally:
                parallel.close()
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
