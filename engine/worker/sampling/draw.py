"""Choose tokens from logits: argmax, or temperature, min-p, top-k, top-p and an inverse CDF at given uniforms.

On CPU a compiled kernel draws where it is there, on a GPU Triton's, for which the host does not wait. Both give what
the torch operations here give, to the bit: all make each number by the same float64 operations, and add up only what
adds up exactly, in whatever order.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.kernels import host
from pdkv.kernels.upload import to_tensor

_CDF_BLOCK = 64  # tokens per block of the two-level search
_TOP_P_CANDIDATES = 512  # looked at before all are sorted
_CHUNK_ELEMENTS = 1 << 18  # bounds the float64 temporaries: they stay in the cache
_EXP_ELEMENTS = 1 << 15  # made at once: a dozen operations, whose temporaries stay in the cache
_LOWEST = -64.0  # scaled logits below have weight 0: 2**-92, when a unit of the draw is 2**-44


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

    A row with NaN gives its first one; one whose largest logit is infinite or -inf (all are masked), its first such.
    """
    floor = torch.from_numpy(params.min_p.copy()).log().numpy()
    if not logits.is_cpu:
        return _draw_on_device(logits, params, floor)
    if logits.stride(1) == 1 and _name(logits.dtype) in host.DTYPES and host.can_draw():
        return _draw_compiled(logits, params, floor)
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    tokens = [
        _draw_chunk(logits[part], params.part(part), floor[part])
        for i in range(0, logits.shape[0], rows_per_chunk)
        for part in [slice(i, i + rows_per_chunk)]
    ]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _draw_on_device(logits: torch.Tensor, params: DrawParams, floor: NDArray[np.float64]) -> torch.Tensor:
    """`floor`: (n,) the lowest scaled logit that min-p keeps."""
    from pdkv.kernels.draw_triton import draw_triton  # Triton, which a CPU need not have

    top_k = np.minimum(params.top_k, logits.shape[1])
    table = np.stack([params.temperature, top_k, params.top_p, floor, params.uniforms])
    return draw_triton(logits if logits.stride(1) == 1 else logits.contiguous(), to_tensor(table, logits.device))


def _draw_compiled(logits: torch.Tensor, params: DrawParams, floor: NDArray[np.float64]) -> torch.Tensor:
    """`floor`: (n,) the lowest scaled logit that min-p keeps."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    columns = (params.temperature, params.top_k, params.top_p, floor, params.uniforms)
    kept = [column.copy() for column in columns]  # fields of a table: each has strides of its own
    host.draw(
        host.DrawArgs(
            logits.data_ptr(),
            *(column.ctypes.data for column in kept),
            tokens.data_ptr(),
            *logits.shape,
            logits.stride(0),
            host.DTYPES[_name(logits.dtype)],
            torch.get_num_threads(),
        )
    )
    return tokens


def _draw_chunk(logits: torch.Tensor, params: DrawParams, lowest: NDArray[np.float64]) -> torch.Tensor:
    """`lowest`: (n,) the lowest scaled logit that min-p keeps."""
    table = torch.from_numpy(np.stack([params.temperature, params.top_p, lowest, params.uniforms]))
    temperature, top_p, floor, uniforms = table.unsqueeze(-1)
    scaled = logits.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    best = scaled.amax(dim=-1, keepdim=True)
    scaled.sub_(best).div_(temperature)  # <= 0
    weights = exp(scaled)
    ranked = (params.top_k > 0) | (params.top_p < 1.0)
    if ranked.any() or (params.min_p > 0.0).any():
        if ranked.any():
            rows: slice | torch.Tensor = slice(None) if ranked.all() else torch.from_numpy(np.flatnonzero(ranked))
            top_k = params.top_k[ranked]
            floor[rows] = _ranked_floor(scaled[rows], weights[rows], floor[rows], top_k, top_p[rows])
        weights.masked_fill_(scaled < floor, 0.0)
    return torch.where(best.squeeze(-1).isfinite(), _invert_cdf(weights, uniforms), logits.argmax(dim=-1))


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of float64 <= 0, and 0 below _LOWEST, by the operations of sampler.c: Cephes' rational function."""
    out = torch.empty(x.shape, dtype=torch.float64)
    flat, results = x.reshape(-1), out.view(-1)
    for piece, result in zip(torch.split(flat, _EXP_ELEMENTS), torch.split(results, _EXP_ELEMENTS), strict=True):
        result.copy_(_exp(piece))
    return out


def _exp(x: torch.Tensor) -> torch.Tensor:
    magic = 1.5 * 2.0**52  # adding it rounds to an integer
    r = x.clamp(min=_LOWEST)
    n = r.mul(1.4426950408889634074).add_(magic)
    power = n.view(torch.int64).bitwise_left_shift(52).add_(1023 << 52).view(torch.float64)  # 2**n: of its lowest bits
    n.sub_(magic)
    r.sub_(n * 6.93145751953125e-1).sub_(n.mul_(1.42860682030941723212e-6))
    rr = torch.mul(r, r, out=n)
    p = rr.mul(1.26177193074810590878e-4).add_(3.02994407707441961300e-2).mul_(rr)
    p.add_(9.99999999999999999910e-1).mul_(r)
    q = rr.mul(3.00198505138664455042e-6).add_(2.52448340349684104192e-3).mul_(rr).add_(2.27265548208155028766e-1)
    q.mul_(rr).add_(2.0).sub_(p)
    return p.div_(q).mul_(2.0).add_(1.0).mul_(power).masked_fill_(x < _LOWEST, 0.0)


class _Mass(NamedTuple):
    """Weights, each split into a multiple of 2**(bits - 53) and one of 2**(2 * bits - 106): both add up exactly."""

    high: torch.Tensor
    low: torch.Tensor

    @classmethod
    def of(cls, weights: torch.Tensor, vocab_size: int) -> "_Mass":
        """`weights` up to 1, of at most `vocab_size` tokens a row."""
        bits = vocab_size.bit_length()
        high_magic, low_magic = 1.5 * 2.0 ** (bits - 1), 1.5 * 2.0 ** (2 * bits - 54)
        high = weights.add(high_magic).sub_(high_magic)
        return cls(high, weights.sub(high).add_(low_magic).sub_(low_magic))

    def sum(self) -> torch.Tensor:
        """Of each row, (n, 1)."""
        return self.high.sum(dim=-1, keepdim=True) + self.low.sum(dim=-1, keepdim=True)

    def before(self) -> torch.Tensor:
        """What precedes each token in its row."""
        return self.high.cumsum(dim=-1).sub_(self.high) + self.low.cumsum(dim=-1).sub_(self.low)


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
    limits = torch.from_numpy(top_k).clamp_(max=vocab_size).unsqueeze(-1)
    count = min(int(top_k.max()), vocab_size)
    if (top_k <= 0).any():  # top-p alone: guess how many tokens it keeps
        count = min(max(count, _TOP_P_CANDIDATES), vocab_size)
    likeliest = largest(scaled, count)
    floor = torch.where(limits > 0, torch.maximum(floor, likeliest.gather(1, (limits - 1).clamp_(min=0))), floor)
    if bool((top_p >= 1.0).all()):
        return floor
    wanted = top_p * _Mass.of(weights.masked_fill(scaled < floor, 0.0), vocab_size).sum()
    likely = exp(likeliest).masked_fill_(likeliest < floor, 0.0)
    mass = _Mass.of(likely, vocab_size)
    if count < vocab_size and bool(((limits <= 0) & (mass.sum() < wanted)).any()):
        likeliest = largest(scaled, vocab_size)
        likely = exp(likeliest).masked_fill_(likeliest < floor, 0.0)
        mass = _Mass.of(likely, vocab_size)
    num_kept = ((likely > 0.0) & (mass.before() < wanted)).sum(dim=-1, keepdim=True)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
