"""Layers with weights divided among ranks; each has the inputs and outputs of the whole layer.

A column-parallel layer needs no class: a rank computes its own outputs. Its row-parallel successor adds them up.
"""

import torch
import torch.nn.functional as F

from pdkv.kernels.linear import PackedWeight
from pdkv.models.linear import Linear
from pdkv.models.parallel import TensorParallel
from pdkv.models.passes import RowPass


class Embedding:
    """Token ids (n,) -> (n, hidden)."""

    def __init__(self, weight: torch.Tensor | PackedWeight) -> None:
        """`weight` (vocab, hidden), or the head that is tied to it: there is one table then."""
        self._weight = weight
        self.dtype = weight.dtype
        self.device = weight.device if isinstance(weight, torch.Tensor) else weight.packed.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows(token_ids)

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        return F.embedding(token_ids, weight) if isinstance(weight, torch.Tensor) else weight.rows(token_ids)


class VocabularyParallelEmbedding(Embedding):
    """A rank's rows of the table. Ids of other ranks give zeros here, and the sum over ranks has every id's row."""

    def __init__(self, weight: torch.Tensor | PackedWeight, words: slice, parallel: TensorParallel) -> None:
        """`weight` (at least len(words), hidden): the rows of the token ids `words`; what follows is padding."""
        super().__init__(weight)
        self._words = words
        self._parallel = parallel

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        foreign = (token_ids < self._words.start) | (token_ids >= self._words.stop)
        rows = self._rows((token_ids - self._words.start).masked_fill_(foreign, 0))
        return self._parallel.all_reduce(rows.masked_fill_(foreign.unsqueeze(-1), 0.0))


class RowParallelLinear:
    """A layer divided by its inputs: the ranks' parts are added up. The first rank adds bias and residual."""

    def __init__(self, part: Linear, parallel: TensorParallel) -> None:
        self._part = part
        self._parallel = parallel
        self._is_first = parallel.shard.rank == 0

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._parallel.all_reduce(self._part(x, before))

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        own = self._part.add(x, residual, before) if self._is_first else self._part(x, before)
        return self._parallel.all_reduce(own)


class GatheredLinear:
    """A layer divided by its outputs, which every rank gets in full: the LM head."""

    def __init__(self, part: Linear, num_outputs: int, parallel: TensorParallel) -> None:
        """`part` has the same number of outputs on every rank; outputs beyond `num_outputs` in total are padding."""
        self._part = part
        self._num_outputs = num_outputs
        self._parallel = parallel

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._parallel.all_gather(self._part(x, before))[:, : self._num_outputs].contiguous()

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self(x, before).add_(residual)


class WideNorms:
    """One RMSNorm of all queries' heads together and one of all keys', of which a rank holds a part."""

    def __init__(
        self, q_weight: torch.Tensor, k_weight: torch.Tensor, sizes: tuple[int, int], epsilon: float,
        parallel: TensorParallel,
    ) -> None:  # fmt: skip
        """This rank's weights; `sizes`: of all ranks' queries and keys."""
        self._weights = q_weight.float(), k_weight.float()
        size = parallel.shard.size
        # Ranks may hold the same keys: each counts for its part of them.
        counts = [all_of * (size * len(w) // all_of) for all_of, w in zip(sizes, self._weights, strict=True)]
        self._counts = torch.tensor(counts, dtype=torch.float32, device=q_weight.device)
        self._epsilon = epsilon
        self._parallel = parallel

    def apply(self, qkv: torch.Tensor) -> None:
        """Norm rows of (n, queries + keys + values) in place; computed in float32 and rounded once."""
        stop = len(self._weights[0]), len(self._weights[0]) + len(self._weights[1])
        parts = qkv[:, : stop[0]], qkv[:, stop[0] : stop[1]]
        wide = [part.float() for part in parts]
        squares = torch.stack([part.square().sum(-1) for part in wide], dim=-1)
        if self._parallel.shard.size > 1:
            squares = self._parallel.all_reduce(squares)
        factors = (squares / self._counts + self._epsilon).rsqrt()
        for i, part in enumerate(parts):
            part.copy_(wide[i] * factors[:, i, None] * self._weights[i])
