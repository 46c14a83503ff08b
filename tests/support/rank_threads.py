"""Ranks as threads of one process: real sockets and shared memory, without the start of processes."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from pdkv.models.parallel import TensorParallel, join_ranks
from pdkv.models.rank_sockets import connect_ranks
from pdkv.models.shard import Shard

Result = TypeVar("Result")


def on_ranks(size: int, run: Callable[[TensorParallel], Result], *, timeout_s: float = 30.0) -> list[Result]:
    """What `run` returns on each of `size` ranks; raises what the first of them raised."""
    peers = connect_ranks(size)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        try:
            parallel = join_ranks(Shard(rank, size), torch.device("cpu"), peers[rank], None, timeout_s)
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
