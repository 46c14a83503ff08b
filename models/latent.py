"""Attention over latent KV (MLA, arXiv 2405.04434): of a token, all heads share one row, a normed latent followed by a
rotated key.

For outputs, keys and values are never made of latents: queries go through their heads' key weights instead, and what
attention returns, sums of latents, through the value weights. For prompts they are made where that is less work.
"""

from typing import NamedTuple

import torch

from pdkv.models.decoder import Step
from pdkv.models.latent_config import Latent
from pdkv.models.latent_heads import LatentHeads
from pdkv.models.linear import Linear, make_norm
from pdkv.models.loader import Loader
from pdkv.models.passes import RMSNorm, RowPass

_EPSILON = 1e-6
"""The epsilon of the latents' norms, whatever config.json says about the others, as in transformers."""


class LatentWeights(NamedTuple):
    """One layer's weights, of this rank's heads."""

    inputs: Linear  # hidden -> queries or their latent, then the token's latent and the key that is rotated
    query: Linear | None  # queries from their latent, which `query_norm` norms; None: `inputs` makes them
    query_norm: RMSNorm | None
    norm: RMSNorm  # of the token's latent
    keys: torch.Tensor  # (heads, plain, rank)
    values: torch.Tensor  # (heads, rank, value)


class LatentAttention:
    """Attention whose KV is one latent row for each token."""

    def __init__(self, weights: LatentWeights, output: Linear, sizes: Latent, *, rotation: int = 0) -> None:
        """`rotation`: the index in `Step.rotations`."""
        self.output = output
        self._weights = weights
        self._sizes = sizes
        self._rotation = rotation

    def __call__(self, layer: int, x: torch.Tensor, before: RowPass | None, step: Step) -> torch.Tensor:
        weights, sizes, heads = self._weights, self._sizes, len(self._weights.keys)
        projected = weights.inputs(x, before)
        queries, own = projected.tensor_split([projected.shape[1] - sizes.row], dim=1)
        if weights.query is not None:
            queries = weights.query(queries, weights.query_norm)
        queries = queries.reshape(len(x), heads, sizes.plain + sizes.turned)
        rows = own.new_empty(len(x), heads + 1, sizes.row)  # for latent rows, and behind them each token's own row
        rows[:, heads, : sizes.rank] = weights.norm(own[:, : sizes.rank])
        rows[:, :heads, sizes.rank :] = self._by_halves(queries[..., sizes.plain :])
        rows[:, heads, sizes.rank :] = self._by_halves(own[:, sizes.rank :])
        step.rotations[self._rotation].of(None, None).apply(rows[..., sizes.rank :])
        queries = torch.cat([queries[..., : sizes.plain], rows[:, :heads, sizes.rank :]], dim=-1)
        return step.attend(layer, rows, LatentHeads(queries, weights.keys, weights.values))

    def _by_halves(self, x: torch.Tensor) -> torch.Tensor:
        """(..., turned) with the numbers that are rotated by one angle half of it apart."""
        return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2) if self._sizes.interleaved else x


def load_latent_attention(loader: Loader, layer: int, prefix: str) -> LatentAttention:
    """A layer's attention, with this rank's heads; the token's row is made on every rank. Raises ModelError."""
    config, sizes, heads = loader.config, loader.config.latent, loader.heads
    assert sizes is not None, config.architecture
    size = sizes.plain + sizes.turned
    mine = slice(heads.start * size, heads.stop * size)
    all_rows, rank = config.num_heads * size, sizes.query_rank
    first = ("q_proj", all_rows, mine) if rank is None else ("q_a_proj", rank, slice(0, rank))
    parts = [first, ("kv_a_proj_with_mqa", sizes.row, slice(0, sizes.row))]
    weights = LatentWeights(
        loader.fused("", [(prefix + name, rows, own) for name, rows, own in parts], bias=False),
        None if rank is None else loader.fused("", [(prefix + "q_b_proj", all_rows, mine)], bias=False, inputs=rank),
        None if rank is None else _norm(loader, prefix + "q_a_layernorm.weight", rank),
        _norm(loader, prefix + "kv_a_layernorm.weight", sizes.rank),
        *_of_latents(loader, prefix + "kv_b_proj.weight", sizes),
    )
    mine = slice(heads.start * sizes.value, heads.stop * sizes.value)
    output = loader.by_columns(prefix + "o_proj", config.num_heads * sizes.value, mine, bias=False)
    return LatentAttention(weights, output, sizes, rotation=loader.ropes.index(config.ropes[layer]))


def _norm(loader: Loader, name: str, size: int) -> RMSNorm:
    return make_norm(loader.tensor(name, (size,), keep=True), _EPSILON, loader.kind)


def _of_latents(loader: Loader, name: str, sizes: Latent) -> tuple[torch.Tensor, torch.Tensor]:
    """What `LatentWeights` has as keys and values."""
    size, heads = sizes.plain + sizes.value, loader.heads
    shape, mine = (loader.config.num_heads * size, sizes.rank), slice(heads.start * size, heads.stop * size)
    both = loader.tensor(name, shape, (mine, slice(None))).view(-1, size, sizes.rank)
    keys, values = both[:, : sizes.plain], both[:, sizes.plain :]
    return loader.own(keys), loader.own(values.transpose(1, 2))
