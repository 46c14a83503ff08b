"""Choose tokens from logits: argmax, or temperature, min-p, top-k, top-p and an inverse CDF at given uniforms."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_CDF_BLOCK = 64  # tokens per block of the two-level search
_TOP_P_CANDIDATES = 512  # looked at before all are sorted
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # bounds the float64 temporaries; on CPU they stay in the cache


class DrawParams(NamedTuple):
    """Parameters of n rows, each (n,); filters that are off: top_k 0, top_p 1, min_p 0."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def part(self, rows: slice) -> "DrawParams":
        """The parameters of some of the rows."""
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniforms[rows]
        )


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token per row of (n, vocab), (n,) int64; among equals the lowest id."""
    if logits.is_cpu:  # numpy's is vectorised, ten times as fast
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draw one token per row, (n,) int64, from logits (n, vocab).

    Filters apply in vLLM's order: temperature, min-p, top-k, top-p over what is left. A filter keeps a token by its
    value alone: top-k keeps whatever is at least the k-th largest, top-p whatever has less than p in strictly likelier
    tokens; so equal tokens stay or go together, and the result does not depend on an order of sorting.
    """
    rows_per_chunk = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 26) // logits.shape[1])
    tokens = [
        _draw_chunk(logits[i : i + rows_per_chunk], params.part(slice(i, i + rows_per_chunk)))
        for i in range(0, logits.shape[0], rows_per_chunk)
    ]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _draw_chunk(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    device = logits.device
    table = torch.from_numpy(np.stack([params.temperature, params.top_p, params.min_p, params.uniforms])).to(device)
    temperature, top_p, min_p, uniforms = table.unsqueeze(-1)
    scaled = logits.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperature)  # <= 0
    weights = scaled.exp()
    ranked = (params.top_k > 0) | (params.top_p < 1.0)
    if ranked.any() or (params.min_p > 0.0).any():
        floor = min_p.log()
        if ranked.any():
            rows: slice | torch.Tensor = (
                slice(None) if ranked.all() else torch.from_numpy(np.flatnonzero(ranked)).to(device)
            )
            top_k = params.top_k[ranked]
            floor[rows] = _ranked_floor(scaled[rows], weights[rows], floor[rows], top_k, top_p[rows])
        weights.masked_fill_(scaled < floor, 0.0)
    return _invert_cdf(weights, uniforms)


def _ranked_floor(
    scaled: torch.Tensor, weights: torch.Tensor, floor: torch.Tensor, top_k: NDArray[np.int64], top_p: torch.Tensor
) -> torch.Tensor:
    """The lowest scaled logit that min-p, top-k and top-p keep, (r, 1).

    Args:
        scaled, weights: (r, vocab) scaled logits and their exponentials.
        floor: (r, 1) the lowest that min-p keeps.
        top_k: (r,), 0 = off. top_p: (r, 1), 1 = off.
    """
    vocab_size = scaled.shape[1]
    limits = torch.from_numpy(top_k).to(scaled.device).clamp_(max=vocab_size).unsqueeze(-1)
    count = min(int(top_k.max()), vocab_size)
    if (top_k <= 0).any():  # top-p alone: guess how many tokens it keeps
        count = min(max(count, _TOP_P_CANDIDATES), vocab_size)
    likeliest = largest(scaled, count)
    floor = torch.where(limits > 0, torch.maximum(floor, likeliest.gather(1, (limits - 1).clamp_(min=0))), floor)
    if bool((top_p >= 1.0).all()):
        return floor
    wanted = top_p * weights.masked_fill(scaled < floor, 0.0).sum(dim=-1, keepdim=True)
    mass = likeliest.exp().masked_fill_(likeliest < floor, 0.0)
    if count < vocab_size and bool(((limits <= 0) & (mass.sum(dim=-1, keepdim=True) < wanted)).any()):
        likeliest = largest(scaled, vocab_size)
        mass = likeliest.exp().masked_fill_(likeliest < floor, 0.0)
    before = mass.cumsum(dim=-1).sub_(mass)
    num_kept = ((mass > 0.0) & (before < wanted)).sum(dim=-1, keepdim=True)
    return torch.where(top_p >= 1.0, floor, likeliest.gather(1, (num_kept - 1).clamp_(min=0)))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest (0: none) of each row of (n, m) float64 or int64, falling."""
    if not values.is_cpu:
        return values.topk(count, dim=-1).values
    array = values.numpy()  # numpy sorts without indices and vectorised: a tenth of torch's time
    first = array.shape[1] - count
    if first:
        array = np.partition(array, min(first, array.shape[1] - 1), axis=-1)[:, first:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def _invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First token, in id order, at which the cumulated probability exceeds the uniform.

    The float64 weights (n, vocab), 1 at the likeliest token, become integers first (truncated to multiples of 2**-44
    or finer): their sums are exact in any order, so that neither the batch, nor threads, nor the device's way to sum
    moves a boundary, and a token of weight 0 cannot be drawn.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    units = weights.mul_(2.0 ** (62 - vocab_size.bit_length())).long()  # the whole row sums to less than 2**62
    if vocab_size % _CDF_BLOCK:
        units = torch.nn.functional.pad(units, (0, num_blocks * _CDF_BLOCK - vocab_size))
    units = units.view(num_rows, num_blocks, _CDF_BLOCK)
    sums = units.sum(dim=-1)
    cumulated = sums.cumsum(dim=-1)
    total = cumulated[:, -1:]
    target = (uniforms * total.double()).long()  # < total: at u = 1 - 2**-53 the product rounds to total's predecessor
    block = torch.searchsorted(cumulated, target, right=True).clamp_(max=num_blocks - 1)
    rest = target - (cumulated.gather(1, block) - sums.gather(1, block))
    inside = units.gather(1, block.unsqueeze(-1).expand(-1, -1, _CDF_BLOCK)).squeeze(1).cumsum(dim=-1)
    token = block * _CDF_BLOCK + torch.searchsorted(inside, rest, right=True)
    return token.squeeze(-1).clamp_(max=vocab_size - 1)
