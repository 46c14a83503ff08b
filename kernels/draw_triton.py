"""The draw of a token from each row of logits in Triton, with the tokens of engine/worker/sampling/draw.py to the bit.

Every number is made by the same float64 operations, each rounded (no multiply-add as one instruction), and every sum is
exact. Where the filters cut is found by bisection over the values that a float32 can have. The host never waits.
"""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import jit

_TILE = 4096  # tokens that a program looks at together
_WARPS = 16
_PIVOTS = 4  # looked at in one pass over a row: 16 passes find one of 2**32 values
_SCRATCH_ELEMENTS = 1 << 25  # float64 weights that exist at a time: 256 MiB
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits that the kernels take."""


@jit()
def _order(x: tl.tensor) -> tl.tensor:
    """Integers that order as float32 numbers do; both zeros have one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _number(order: tl.tensor) -> tl.tensor:
    """The float64 whose `_order` that is."""
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)


@jit()
def _exp(x: tl.tensor) -> tl.tensor:
    """exp of float64 <= 0, and 0 below -64, by the operations of draw.py."""
    magic: tl.constexpr = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to an integer
    r = tl.maximum(x, -64.0)
    shifted = r * 1.4426950408889634074 + magic
    n = shifted - magic
    power = ((shifted.to(tl.int64, bitcast=True) << 52) + (1023 << 52)).to(tl.float64, bitcast=True)
    r = (r - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6
    rr = r * r
    p = ((rr * 1.26177193074810590878e-4 + 3.02994407707441961300e-2) * rr + 9.99999999999999999910e-1) * r
    q = ((rr * 3.00198505138664455042e-6 + 2.52448340349684104192e-3) * rr + 2.27265548208155028766e-1) * rr + 2.0
    return tl.where(x >= -64.0, (p / (q - p) * 2.0 + 1.0) * power, 0.0)


@jit()
def _split(weight: tl.tensor, high_magic: tl.tensor, low_magic: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Two parts that add up exactly (`_Mass` in draw.py)."""
    high = (weight + high_magic) - high_magic
    low = ((weight - high) + low_magic) - low_magic
    return high, low


@jit()
def _find(
    logits: tl.tensor,
    weights: tl.tensor,
    best: tl.tensor,
    wanted: tl.tensor,
    high_magic: tl.tensor,
    low_magic: tl.tensor,
    vocab_size: tl.tensor,
    IS_WEIGHED: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest number, from -inf to `best`, such that what lies above it weighs less than `wanted`.

    Without IS_WEIGHED every token weighs 1.
    """
    lowest = float("-inf")
    low = tl.full([], -2139095041, tl.int64)  # -inf's
    high = _order(best).to(tl.int64)
    share = tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + (high - low) * share // PIVOTS
        above = tl.zeros([PIVOTS], tl.float64)
        rest = tl.zeros([PIVOTS], tl.float64)
        for start in range(0, vocab_size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(logits + at, mask=at < vocab_size, other=lowest).to(tl.float32)
            is_above = _order(x)[:, None] > pivots[None, :]
            if IS_WEIGHED:
                weight = tl.load(weights + at, mask=at < vocab_size, other=0.0)
                most, least = _split(weight, high_magic, low_magic)
                above += tl.sum(tl.where(is_above, most[:, None], 0.0), axis=0)
                rest += tl.sum(tl.where(is_above, least[:, None], 0.0), axis=0)
            else:
                above += tl.sum(is_above.to(tl.int32), axis=0).to(tl.float64)
        num_below = tl.sum((above + rest >= wanted).to(tl.int32))  # pivots that are too low: the first ones
        next_low = low + tl.where(num_below > 0, (high - low) * (num_below - 1) // PIVOTS + 1, 0)
        high = tl.where(num_below < PIVOTS, low + (high - low) * num_below // PIVOTS, high)
        low = next_low
    return _number(low)


@jit(do_not_specialize=["first_row", "num_rows", "vocab_size"])
def _begin_kernel(
    logits: tl.tensor,
    table: tl.tensor,  # (5, rows) temperature, top_k, top_p, floor of min-p, uniform
    bests: tl.tensor,
    tokens: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each row's largest logit, and the floor of min-p and top-k; or its token, where no finite one is the largest."""
    row = first_row + tl.program_id(0)
    own = logits + row.to(tl.int64) * stride_row
    lowest = float("-inf")
    best = tl.full([], lowest, tl.float32)
    first_nan = vocab_size
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(own + at, mask=at < vocab_size, other=lowest).to(tl.float32)
        first_nan = tl.minimum(first_nan, tl.min(tl.where(x != x, at, vocab_size)))
        best = tl.maximum(best, tl.max(tl.where(x != x, lowest, x)))
    if (first_nan < vocab_size) | (tl.abs(best) == float("inf")):
        first = vocab_size
        for start in range(0, vocab_size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(own + at, mask=at < vocab_size, other=0.0).to(tl.float32)
            first = tl.minimum(first, tl.min(tl.where(x == best, at, vocab_size)))
        tl.store(tokens + row, tl.where(first_nan < vocab_size, first_nan, first).to(tl.int64))
        return
    tl.store(tokens + row, tl.full([], -1, tl.int64))
    tl.store(bests + row, best)
    top_k = tl.load(table + num_rows + row)
    if top_k > 0.0:
        temperature = tl.load(table + row)
        last = _find(own, own, best, top_k, 0.0, 0.0, vocab_size, False, PIVOTS, TILE)
        floor = table + 3 * num_rows + row
        tl.store(floor, tl.maximum(tl.load(floor), (last - best.to(tl.float64)) / temperature))


@jit(do_not_specialize=["first_row", "num_rows", "vocab_size"])
def _weigh_kernel(
    logits: tl.tensor,
    table: tl.tensor,
    bests: tl.tensor,
    tokens: tl.tensor,
    weights: tl.tensor,  # (rows of this launch, vocab_size)
    first_row: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """What the tokens weigh that min-p and top-k keep, 1 at the likeliest; 0 at the others."""
    row = first_row + tl.program_id(0)
    if tl.load(tokens + row) >= 0:
        return
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride_row + at, mask=at < vocab_size, other=0.0).to(tl.float32)
    scaled = (x.to(tl.float64) - tl.load(bests + row).to(tl.float64)) / tl.load(table + row)
    weight = tl.where(scaled >= tl.load(table + 3 * num_rows + row), _exp(scaled), 0.0)
    tl.store(weights + tl.program_id(0).to(tl.int64) * vocab_size + at, weight, mask=at < vocab_size)


@jit()
def _units(
    logits: tl.tensor,
    weights: tl.tensor,
    at: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """Integer weights of the tokens `at`, 0 where the scaled logit is below `floor`."""
    weight = tl.load(weights + at, mask=at < vocab_size, other=0.0)
    if floor > float("-inf"):
        x = tl.load(logits + at, mask=at < vocab_size, other=0.0).to(tl.float64)
        weight = tl.where((x - best) / temperature >= floor, weight, 0.0)
    return (weight * scale).to(tl.int64)


@jit(do_not_specialize=["first_row", "num_rows", "vocab_size"])
def _choose_kernel(
    logits: tl.tensor,
    table: tl.tensor,
    bests: tl.tensor,
    tokens: tl.tensor,
    weights: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    high_magic: tl.tensor,
    low_magic: tl.tensor,
    scale: tl.tensor,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Top-p, and the first token in id order at which the cumulated weight exceeds the uniform's part of it."""
    row = first_row + tl.program_id(0)
    if tl.load(tokens + row) >= 0:
        return
    own = logits + row.to(tl.int64) * stride_row
    weighed = weights + tl.program_id(0).to(tl.int64) * vocab_size
    temperature = tl.load(table + row)
    best = tl.load(bests + row)
    top = best.to(tl.float64)
    floor = tl.full([], float("-inf"), tl.float64)
    top_p = tl.load(table + 2 * num_rows + row)
    if top_p < 1.0:
        high = tl.zeros([], tl.float64)
        low = tl.zeros([], tl.float64)
        for start in range(0, vocab_size, TILE):
            at = start + tl.arange(0, TILE)
            most, least = _split(tl.load(weighed + at, mask=at < vocab_size, other=0.0), high_magic, low_magic)
            high += tl.sum(most)
            low += tl.sum(least)
        last = _find(own, weighed, best, top_p * (high + low), high_magic, low_magic, vocab_size, True, PIVOTS, TILE)
        floor = (last - top) / temperature
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        total += tl.sum(_units(own, weighed, at, top, temperature, floor, scale, vocab_size))
    target = (tl.load(table + 4 * num_rows + row) * total.to(tl.float64)).to(tl.int64)
    before = tl.zeros([], tl.int64)
    token = tl.zeros([], tl.int64)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        units = _units(own, weighed, at, top, temperature, floor, scale, vocab_size)
        token += tl.sum((before + tl.cumsum(units, axis=0) <= target).to(tl.int32)).to(tl.int64)
        before += tl.sum(units)
    tl.store(tokens + row, token)


def draw_triton(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """One token per row, (n,) int64, as `draw` in engine/worker/sampling/draw.py says; nothing is copied to the host.

    Args:
        logits: (n, vocab) float32, bfloat16 or float16, rows contiguous; left as they are.
        params: (5, n) float64, contiguous, on the same device: temperature, top_k (0: off; at most vocab), top_p, the
            lowest scaled logit that min-p keeps, uniform. The fourth row is overwritten.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of {DTYPES}, got {logits.dtype} with strides {logits.stride()}")
    if (params.dtype, params.shape, params.is_contiguous()) != (torch.float64, (5, num_rows), True):
        raise ValueError(f"params must be contiguous float64 {(5, num_rows)}, got {params.dtype} {tuple(params.shape)}")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bests = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rows_per_launch = min(num_rows, max(1, _SCRATCH_ELEMENTS // vocab_size))
    weights = torch.empty(rows_per_launch * vocab_size, dtype=torch.float64, device=logits.device)
    bits = vocab_size.bit_length()
    magic = 1.5 * 2.0 ** (bits - 1), 1.5 * 2.0 ** (2 * bits - 54), 2.0 ** (62 - bits)
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    for first in range(0, num_rows, rows_per_launch):
        sizes = first, num_rows, vocab_size, logits.stride(0)
        count = min(rows_per_launch, num_rows - first)
        state = logits, params, bests, tokens
        _begin_kernel[(count,)](*state, *sizes, PIVOTS=_PIVOTS, TILE=_TILE, **options)
        tiles = triton.cdiv(vocab_size, _TILE)
        _weigh_kernel[(count, tiles)](*state, weights, *sizes, TILE=_TILE, **options)
        _choose_kernel[(count,)](*state, weights, *sizes, *magic, PIVOTS=_PIVOTS, TILE=_TILE, **options)
    return tokens
