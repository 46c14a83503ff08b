"""Choose tokens from logits: argmax, or temperature, min-p, top-k, top-p and an exponential race.

Among the tokens that the filters leave, each of which has its own random number u, the one with the least -ln(u) /
weight is drawn: each wins in proportion to its weight. Which token wins depends only on the likely ones, so draws from
two similar distributions with the same numbers mostly give the same token.

On a CPU a compiled kernel draws, if it is available; on a GPU a Triton kernel does, for which the host does not wait.
Both give bit for bit the result of the torch operations here: all make each number by the same float64 operations, and
sum only numbers that sum exactly in any order.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.worker.sampling.randomness import Draws
from pdkv.kernels import host
from pdkv.kernels.upload import to_tensor

_TOP_P_CANDIDATES = 512  # tokens examined before all are sorted
_CHUNK_ELEMENTS = 1 << 18  # limits the float64 temporaries: they stay in the cache
_EXP_ELEMENTS = 1 << 15  # computed at once: a dozen operations whose temporaries stay in the cache
_LOWEST = -64.0  # scaled logits below have weight 0: with 2**-92 none can win, as the lowest u is 2**-53
_LN_P = 4.97494994976747001425e-1, 4.70579119878881725854e0, 1.44989225341610930846e1, 1.79368678507818819316e1
_LN_Q = 4.52279145837532221105e1, 8.29875266912776603211e1, 7.11544750618563894466e1, 2.31251620126765340583e1
_CLOSE = 1e-3  # more than float32 errs in ln of a time's bound


class DrawParams(NamedTuple):
    """Parameters of n rows, each (n,); disabled filters: top_k 0, top_p 1, min_p 0."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]  # as in `Draws`, with the next two
    choices: NDArray[np.uint64]
    positions: NDArray[np.uint64]

    def part(self, rows: slice) -> "DrawParams":
        """The parameters of some of the rows."""
        return DrawParams._make(column[rows] for column in self)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token per row of (n, vocab), (n,) int64; among equals the lowest id."""
    if logits.is_cpu:  # numpy's is vectorised, ten times as fast
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draw one token per row, (n,) int64, from logits (n, vocab).

    Filters apply in vLLM's order: temperature, min-p, top-k, top-p over what is left. A filter keeps a token by its
    value alone: top-k keeps values not below the k-th largest, top-p keeps tokens whose strictly likelier ones sum to
    less than p; so equal tokens stay or go together, and the result does not depend on the sorting order.

    A row with NaN gives its first NaN; a row with an infinite largest logit (or -inf: all are masked) gives the first
    such token.
    """
    floor = torch.from_numpy(params.min_p.copy()).log().numpy()
    if not logits.is_cpu:
        from pdkv.kernels.draw_triton import draw_triton  # Triton, which a CPU may lack

        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return draw_triton(logits, to_tensor(_table(logits, params, floor), logits.device))
    if logits.stride(1) == 1 and _name(logits.dtype) in host.DTYPES and host.can_draw():
        table, drawn = _table(logits, params, floor), np.empty(len(logits), np.int64)
        sizes = *logits.shape, logits.stride(0), host.DTYPES[_name(logits.dtype)], torch.get_num_threads()
        host.call_sampler("pdkv_race", logits.data_ptr(), table.ctypes.data, drawn.ctypes.data, *sizes)
        return torch.from_numpy(drawn)
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    tokens = [
        _draw_chunk(logits[part], params.part(part), floor[part])
        for i in range(0, logits.shape[0], rows_per_chunk)
        for part in [slice(i, i + rows_per_chunk)]
    ]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _table(logits: torch.Tensor, params: DrawParams, floor: NDArray[np.float64]) -> NDArray[np.int64]:
    """What the kernels get, (7, n): float64 temperature, top_k (at most vocab), top_p, the lowest scaled logit that
    min-p keeps; then seed, choice, position.
    """
    numbers = np.stack([params.temperature, np.minimum(params.top_k, logits.shape[1]), params.top_p, floor])
    return np.concatenate([numbers.view(np.int64), np.stack(params[4:]).view(np.int64)])


def _draw_chunk(logits: torch.Tensor, params: DrawParams, lowest: NDArray[np.float64]) -> torch.Tensor:
    """`lowest`: (n,) the lowest scaled logit that min-p keeps."""
    table = torch.from_numpy(np.stack([params.temperature, params.top_p, lowest]))
    temperature, top_p, floor = table.unsqueeze(-1)
    scaled = logits.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    best = scaled.amax(dim=-1, keepdim=True)
    scaled.sub_(best).div_(temperature)  # <= 0
    ranked = (params.top_k > 0) | (params.top_p < 1.0)
    if ranked.any():
        rows: slice | torch.Tensor = slice(None) if ranked.all() else torch.from_numpy(np.flatnonzero(ranked))
        floor[rows] = _ranked_floor(scaled[rows], floor[rows], params.top_k[ranked], top_p[rows])
    is_finite = best.isfinite()
    scaled.masked_fill_(scaled < floor, -torch.inf).masked_fill_(~is_finite, 0.0)
    return torch.where(is_finite.squeeze(-1), _race(scaled, params), logits.argmax(dim=-1))


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
    power = (
        n.view(torch.int64).bitwise_left_shift(52).add_(1023 << 52).view(torch.float64)
    )  # 2**n, from its lowest bits
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
        """Make the sums from `weights`, each at most 1, of at most `vocab_size` tokens per row."""
        bits = vocab_size.bit_length()
        high_magic, low_magic = 1.5 * 2.0 ** (bits - 1), 1.5 * 2.0 ** (2 * bits - 54)
        high = weights.add(high_magic).sub_(high_magic)
        return cls(high, weights.sub(high).add_(low_magic).sub_(low_magic))

    def sum(self) -> torch.Tensor:
        """The sum of each row, (n, 1)."""
        return self.high.sum(dim=-1, keepdim=True) + self.low.sum(dim=-1, keepdim=True)

    def before(self) -> torch.Tensor:
        """The sum before each token in its row."""
        return self.high.cumsum(dim=-1).sub_(self.high) + self.low.cumsum(dim=-1).sub_(self.low)


def _ranked_floor(
    scaled: torch.Tensor, floor: torch.Tensor, top_k: NDArray[np.int64], top_p: torch.Tensor
) -> torch.Tensor:
    """The lowest scaled logit that min-p, top-k and top-p keep, (r, 1).

    Args:
        scaled: (r, vocab) scaled logits.
        floor: (r, 1) the lowest that min-p keeps.
        top_k: (r,), 0 = off.
        top_p: (r, 1), 1 = off.
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
    wanted = top_p * _Mass.of(exp(scaled).masked_fill_(scaled < floor, 0.0), vocab_size).sum()
    likely = exp(likeliest).masked_fill_(likeliest < floor, 0.0)
    mass = _Mass.of(likely, vocab_size)
    if count < vocab_size and bool(((limits <= 0) & (mass.sum() < wanted)).any()):
        likeliest = largest(scaled, vocab_size)
        likely = exp(likeliest).masked_fill_(likeliest < floor, 0.0)
        mass = _Mass.of(likely, vocab_size)
    num_kept = ((likely > 0.0) & (mass.before() < wanted)).sum(dim=-1, keepdim=True)
    return torch.where(top_p >= 1.0, floor, likeliest.gather(1, (num_kept - 1).clamp_(min=0)))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values (0: none) of each row of (n, m) float64 or int64, in descending order."""
    if not values.is_cpu:
        return values.topk(count, dim=-1).values
    array = values.numpy()  # numpy sorts without indices and vectorised: a tenth of torch's time
    first = array.shape[1] - count
    if first:
        array = np.partition(array, min(first, array.shape[1] - 1), axis=-1)[:, first:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def _race(scaled: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """The token of each row of scaled logits (n, vocab) whose -ln(u) / weight is least, of equals the lowest, (n,).

    Exact times are made of the few tokens that may win: -ln(u) is at least 1 - u, and the higher bits of u bound that.
    """
    draws = Draws(*params[4:])
    rest = np.maximum((~draws.leading_words(scaled.shape[1])).astype(np.float32), np.float32(2.0**-22))
    earliest = torch.from_numpy(rest).mul_(2.0**-32).log_().double().sub_(scaled)  # ln of a bound of the time
    rows = np.arange(len(scaled))
    some = _times(scaled, draws, rows, earliest.argmin(dim=-1).numpy())
    rows, tokens = (column.numpy() for column in torch.where(earliest <= some.log().unsqueeze(-1) + _CLOSE))
    times = np.full(scaled.shape, np.inf)
    times[rows, tokens] = _times(scaled, draws, rows, tokens)
    return torch.from_numpy(times.argmin(axis=-1))  # the first of equals


def _times(scaled: torch.Tensor, draws: Draws, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> torch.Tensor:
    """When tokens[i] of row rows[i] arrives, (m,): the first one wins."""
    return minus_ln(torch.from_numpy(draws.uniforms(rows, tokens))).div_(exp(scaled[rows, tokens]))


def minus_ln(x: torch.Tensor) -> torch.Tensor:
    """-ln of positive, normal float64 by the operations of sampler.c: Cephes' rational function of the mantissa."""
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # the rest is in [sqrt(1/2), sqrt(2))
    r = (bits - (exponent << 52)).view(torch.float64) - 1.0
    rr, e = r * r, exponent.double()
    p = torch.full_like(r, 1.01875663804580931796e-4)
    for number in (*_LN_P, 7.70838733755885391666e0):
        p.mul_(r).add_(number)
    q = r + 1.12873587189167450590e1
    for number in _LN_Q:
        q.mul_(r).add_(number)
    rest = (r * (rr * p / q) - e * 2.121944400546905827679e-4) - rr * 0.5
    return -((r + rest) + e * 0.693359375)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
