"""Compiled kernels of each level that this processor has, in one process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdkv.kernels import compiled

MODULES = ("compiled", "host", "digest", "stream", "linear", "passes", "prompts", "cachegen", "rans")


def _forget() -> None:
    """What is not imported yet, as torch is not where tests are only handed out, has nothing to forget."""
    for module in (sys.modules.get(f"pdkv.kernels.{name}") for name in MODULES):
        for name in ("isa", "_library", "_sampler"):
            if hasattr(made := getattr(module, name, None), "cache_clear"):
                made.cache_clear()


@contextmanager
def kernels_of(isa: str) -> Iterator[None]:
    """Within it PDKV_ISA is `isa`, also for those who have asked before."""
    before = os.environ.get(compiled.ISA)
    os.environ[compiled.ISA] = isa
    _forget()
    try:
        yield
    finally:
        os.environ.pop(compiled.ISA)
        if before is not None:
            os.environ[compiled.ISA] = before
        _forget()
