"""Limits the memory that this process keeps: freed temporaries, which are needed again, and compiled kernels."""

import logging
import os

import torch

from pdkv.host.malloc import set_malloc

logger = logging.getLogger(__name__)

_HEAP_UP_TO_BYTES = 1 << 30

_COMPILED_KERNELS = 32
"""Compiled kernels kept: enough for the shapes of a few steps; compiling one again takes 0.2 ms. `ModelRunner.warm_up`
makes that many.
"""


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of a step's freed temporaries instead of returning it; False if there is no mallopt.

    Fresh pages cost a fault each: activations of 1 MiB and more would be 10x slower to write than to compute.
    """
    done = set_malloc(mmap_threshold=_HEAP_UP_TO_BYTES, trim_threshold=2**31 - 1)
    if not done:
        logger.debug("malloc cannot be made to keep freed memory, which goes back to the system")
    return done


def bound_kernel_caches() -> None:
    """Let oneDNN and torch keep few compiled kernels: each holds 0.6 MB, and they keep 1024 by default.

    Only effective before the process's first matrix product, when both read their variables; variables that are set
    stay.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_COMPILED_KERNELS))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(_COMPILED_KERNELS))


def take_step_memory(num_bytes: int) -> None:
    """Take the memory of the largest step now: touched, freed, and kept by `keep_freed_memory` for the steps to come.

    So a process has its full size from the start, instead of growing whenever a step exceeds all earlier ones.
    """
    torch.empty(num_bytes, dtype=torch.uint8).zero_()
