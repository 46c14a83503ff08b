"""The attention interface of one step: the input of a backend before the layers run."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import Padding
from pdkv.models.heads import Heads
from pdkv.models.latent_heads import LatentHeads


class Layer(NamedTuple):
    """Where a layer's KV is stored, and how far back it looks."""

    group: int  # of the block tables
    layer: int  # of a block's layers
    window: int | None = None  # the number of keys that a query sees, including its own; None: all up to its own
    kv_scales: tuple[float, float] = (1.0, 1.0)  # the value of 1.0 in K and V that are stored in FP8
    value_size: int | None = None  # of latent rows: so many of a row's first numbers are its value


class Scores(NamedTuple):
    """What becomes of products of queries and keys before the softmax."""

    scale: float | None = None  # a factor; None: 1 / sqrt(head size)
    softcap: float = 0.0  # c: then x becomes c * tanh(x / c); 0: it stays

    def scale_of(self, head_size: int) -> float:
        """The factor for heads of that size."""
        return float(head_size**-0.5) if self.scale is None else self.scale


USUAL = Scores()


class ModelInputs(NamedTuple):
    """The model's own input of a step, padded, on its device."""

    token_ids: torch.Tensor  # (n,) int64
    positions: torch.Tensor  # (n,) int64
    rows: torch.Tensor | None  # (m,) int64, of the tokens; None: all of them


class AttentionBackend(ABC):
    """Writes K and V of a step's tokens into the pool and attends to it. `prepare` once per step, then every layer."""

    pads_decodes = False
    """Whether steps of one token per request may be padded, and their work captured."""

    @abstractmethod
    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        """Prepare for a step.

        Args:
            block_tables: (groups, max_num_seqs, max_blocks), the batch's own, by KV group and slot.
            rows: indices, ascending, of the step's tokens for which the last layer must return attention; None: all.
            size: to which a step is padded; only if `pads_decodes`, and with prompts if `pads_prompts`. All step data
                that `attend` then reads is at the same address as in the last step of that size.
        """

    @property
    def pads_prompts(self) -> bool:
        """The same of steps with prompts, behind requests of few tokens."""
        return False

    @abstractmethod
    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None = None) -> torch.Tensor:
        """Attention of (n, heads + 2 * kv_heads, head_size) -> (n or len(rows), heads * head_size), both padded.

        Over latent rows: (n, heads + 1, row) -> (n or len(rows), heads * value), the queries' parts for the latents not
        filled in; without `heads`, with them, -> (n or len(rows), heads * value_size).

        `heads`: applied to queries and keys first, in place; None: it already has been.
        """

    def padded(self, num_rows: int) -> int:
        """The padded numbers of rows of a step, and of its last layer. Padding is never written to the pool."""
        return num_rows


def pad(array: IntArray, size: int) -> IntArray:
    """`array` (n,) followed by zeros, `size` values in total."""
    return array if len(array) == size else np.concatenate([array, np.zeros(size - len(array), dtype=array.dtype)])
