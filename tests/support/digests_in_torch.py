"""Digests of KV on a recorded device, where Triton has nothing to run on."""

from typing import Any

import numpy as np
import pytest
import torch

from pdkv.connectors.transfer.digest import PoolDigests
from pdkv.connectors.transfer.units import UnitPool


def digests_in_torch(words: Any, offsets: Any, sizes: Any, seeds: Any, strides: tuple[int, int], most: int) -> Any:
    """Stands for the Triton kernel: other digests, by operations that a recorded device queues."""
    sides, heads = seeds.shape
    places = (
        offsets.numpy()[:, None, None, None]
        + np.arange(sides)[None, :, None, None] * strides[0]
        + np.arange(heads)[None, None, :, None] * strides[1]
        + np.arange(most)
    )
    used = torch.from_numpy(np.arange(most) < sizes.numpy()[:, None])[:, None, None]
    read = words[torch.from_numpy(places)]
    return (read * used * (seeds[None, :, :, None] | 1)).sum(dim=(1, 3))


def use_digests_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on these are a device's, and nothing is compiled when a connector starts."""
    monkeypatch.setattr("pdkv.kernels.digest_triton.digests_triton", digests_in_torch)
    for kind in (UnitPool, PoolDigests):
        monkeypatch.setattr(kind, "compile_kernels", lambda self: None)
