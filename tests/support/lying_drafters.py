"""Proposers for tests that name a drafter and send KV that it has not computed."""

from typing import Any

import numpy as np
import torch

from pdkv.engine.worker.draft_model import DraftModelProposer, _bytes


class Noise(DraftModelProposer):
    """Whatever it sends has the right marks, and noise behind them."""

    byte: int | None = None

    def _give(self, drafted: Any, kv_pool: torch.Tensor, table: Any, start: int, stop: int) -> None:
        super()._give(drafted, kv_pool, table, start, stop)
        layers = _bytes(kv_pool)[:, self._first_layer :]
        draw = np.random.default_rng(stop)
        for block in table[start // self._block_size : -(-stop // self._block_size)].tolist():
            marked = layers[block, 0, 0, 0, :, :8].copy()
            layers[block] = draw.integers(0, 256, layers[block].shape) if self.byte is None else self.byte
            layers[block, 0, 0, 0, :, :8] = marked


class NaN(Noise):
    """The same, of what no model computes."""

    byte = 0xFF
