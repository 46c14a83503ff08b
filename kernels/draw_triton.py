"""The draw of a token from each row of logits in Triton, with exactly the tokens of engine/worker/sampling/draw.py.

Every number is made by the same float64 operations, each rounded (no multiply-add as one instruction), and every sum is
exact. The filters' thresholds are found by bisection over all float32 values. All tokens of a row race in one program
per tile, then the winners of the tiles race. The host never waits.
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
"""Dtypes of logits that the kernels support."""


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
def _minus_ln(x: tl.tensor) -> tl.tensor:
    """-ln of positive, normal float64 by the operations of draw.py."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    r = (bits - (exponent << 52)).to(tl.float64, bitcast=True) - 1.0
    rr = r * r
    e = exponent.to(tl.float64)
    p = r * 1.01875663804580931796e-4 + 4.97494994976747001425e-1
    p = (p * r + 4.70579119878881725854e0) * r + 1.44989225341610930846e1
    p = (p * r + 1.79368678507818819316e1) * r + 7.70838733755885391666e0
    q = (r + 1.12873587189167450590e1) * r + 4.52279145837532221105e1
    q = (q * r + 8.29875266912776603211e1) * r + 7.11544750618563894466e1
    q = q * r + 2.31251620126765340583e1
    rest = (r * (rr * p / q) - e * 2.121944400546905827679e-4) - rr * 0.5
    return -((r + rest) + e * 0.693359375)


@jit()
def _mix(a: tl.tensor, b: tl.tensor, BY: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    total = a + b
    return total, ((b << BY) | (b >> (32 - BY))) ^ total


@jit()
def _rounds(x: tl.tensor, y: tl.tensor, z: tl.tensor, w: tl.tensor, IS_EVEN: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Four rounds of Threefry."""
    x, y = _mix(x, y, 10 if IS_EVEN else 6)
    z, w = _mix(z, w, 26 if IS_EVEN else 20)
    x, w = _mix(x, w, 11 if IS_EVEN else 17)
    z, y = _mix(z, y, 21 if IS_EVEN else 11)
    x, y = _mix(x, y, 13 if IS_EVEN else 25)
    z, w = _mix(z, w, 27 if IS_EVEN else 10)
    x, w = _mix(x, w, 23 if IS_EVEN else 18)
    z, y = _mix(z, y, 5 if IS_EVEN else 20)
    return x, y, z, w


@jit()
def _words(counters: tl.tensor, level: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Threefry4x32-13 (randomness.py) under a key: [i, j, k] is word j + 2 * k of counter i. All are uint32."""
    e = a ^ b ^ c ^ d ^ tl.full([], 0x1BD11BDA, tl.uint32)
    one, two, three = tl.full([], 1, tl.uint32), tl.full([], 2, tl.uint32), tl.full([], 3, tl.uint32)
    zeros = counters ^ counters
    x, y, z, w = _rounds(counters + a, zeros + (level + b), zeros + c, zeros + d, True)
    x, y, z, w = _rounds(x + b, y + c, z + d, w + (e + one), False)
    x, y, z, w = _rounds(x + c, y + d, z + e, w + (a + two), True)
    x, y = _mix(x + d, y + e, 6)
    z, w = _mix(z + a, w + (b + three), 20)
    return tl.join(tl.join(x, y), tl.join(z, w))


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


@jit(do_not_specialize=["num_rows", "vocab_size"])
def _begin_kernel(
    logits: tl.tensor,
    table: tl.tensor,  # (4, rows) temperature, top_k, top_p, floor of min-p
    bests: tl.tensor,
    tokens: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each row's largest logit, and the floor of min-p and top-k; or its token, where no finite one is the largest."""
    row = tl.program_id(0)
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
    """In rows with top-p: what the tokens weigh that min-p and top-k keep, 1 at the likeliest; 0 at the others."""
    row = first_row + tl.program_id(0)
    if (tl.load(tokens + row) >= 0) | (tl.load(table + 2 * num_rows + row) >= 1.0):
        return
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride_row + at, mask=at < vocab_size, other=0.0).to(tl.float32)
    scaled = (x.to(tl.float64) - tl.load(bests + row).to(tl.float64)) / tl.load(table + row)
    weight = tl.where(scaled >= tl.load(table + 3 * num_rows + row), _exp(scaled), 0.0)
    tl.store(weights + tl.program_id(0).to(tl.int64) * vocab_size + at, weight, mask=at < vocab_size)


@jit(do_not_specialize=["first_row", "num_rows", "vocab_size"])
def _top_p_kernel(
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
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Raise the floor of rows with top-p."""
    row = first_row + tl.program_id(0)
    top_p = tl.load(table + 2 * num_rows + row)
    if (tl.load(tokens + row) >= 0) | (top_p >= 1.0):
        return
    own = logits + row.to(tl.int64) * stride_row
    weighed = weights + tl.program_id(0).to(tl.int64) * vocab_size
    best = tl.load(bests + row)
    high = tl.zeros([], tl.float64)
    low = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        most, least = _split(tl.load(weighed + at, mask=at < vocab_size, other=0.0), high_magic, low_magic)
        high += tl.sum(most)
        low += tl.sum(least)
    last = _find(own, weighed, best, top_p * (high + low), high_magic, low_magic, vocab_size, True, PIVOTS, TILE)
    floor = table + 3 * num_rows + row
    tl.store(floor, tl.maximum(tl.load(floor), (last - best.to(tl.float64)) / tl.load(table + row)))


@jit(do_not_specialize=["num_rows", "vocab_size"])
def _race_kernel(
    logits: tl.tensor,
    table: tl.tensor,
    bests: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,  # (3, rows) seed, choice, position
    times: tl.tensor,  # (rows, tiles) the least of each tile, and whose it is
    winners: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The race among the tokens of one tile."""
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(tokens + row) >= 0:
        return
    own = logits + row.to(tl.int64) * stride_row
    best, temperature = tl.load(bests + row).to(tl.float64), tl.load(table + row)
    floor = tl.load(table + 3 * num_rows + row)
    seed = tl.load(keys + row)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    k2, k3 = tl.load(keys + num_rows + row).to(tl.uint32), tl.load(keys + 2 * num_rows + row).to(tl.uint32)
    counters = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    high = _words(counters.to(tl.uint32), tl.full([], 0, tl.uint32), k0, k1, k2, k3)
    low = _words(counters.to(tl.uint32), tl.full([], 1, tl.uint32), k0, k1, k2, k3)
    word = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]
    at = (counters // 16 * 64 + counters % 16)[:, None, None] + 16 * word[None, :, :]
    u = (((high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    x = tl.load(own + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32).to(tl.float64)
    scaled = (x - best) / temperature
    time = tl.where(scaled >= floor, _minus_ln(u) / _exp(scaled), float("inf"))
    first = tl.min(time)
    place = row * tl.num_programs(1) + tile
    tl.store(times + place, first)
    tl.store(winners + place, tl.min(tl.where(time == first, at, vocab_size)))


def draw_triton(logits: torch.Tensor, table: torch.Tensor, *, has_top_p: bool) -> torch.Tensor:
    """One token per row, (n,) int64, as `draw` in engine/worker/sampling/draw.py says; nothing is copied to the host.

    Args:
        logits: (n, vocab) float32, bfloat16 or float16, rows contiguous; left as they are.
        table: (7, n) int64, contiguous, on the same device, as made by `_table` in draw.py. Its fourth row is
            overwritten.
        has_top_p: whether any row has a top_p below 1.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of {DTYPES}, got {logits.dtype} with strides {logits.stride()}")
    if (table.dtype, table.shape, table.is_contiguous()) != (torch.int64, (7, num_rows), True):
        raise ValueError(f"table must be contiguous int64 {(7, num_rows)}, got {table.dtype} {tuple(table.shape)}")
    device, num_tiles = logits.device, triton.cdiv(vocab_size, _TILE)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    bests = torch.empty(num_rows, dtype=torch.float32, device=device)
    times = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=device)
    winners = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device)
    sizes, options = (num_rows, vocab_size, logits.stride(0)), {"num_warps": _WARPS, "enable_fp_fusion": False}
    state = logits, table[:4].view(torch.float64), bests, tokens
    _begin_kernel[(num_rows,)](*state, *sizes, PIVOTS=_PIVOTS, TILE=_TILE, **options)
    if has_top_p:
        rows_per_launch = min(num_rows, max(1, _SCRATCH_ELEMENTS // vocab_size))
        weights = torch.empty(rows_per_launch * vocab_size, dtype=torch.float64, device=device)
        bits = vocab_size.bit_length()
        magic = 1.5 * 2.0 ** (bits - 1), 1.5 * 2.0 ** (2 * bits - 54)
        for first in range(0, num_rows, rows_per_launch):
            count = min(rows_per_launch, num_rows - first)
            _weigh_kernel[(count, num_tiles)](*state, weights, first, *sizes, TILE=_TILE, **options)
            _top_p_kernel[(count,)](*state, weights, first, *sizes, *magic, PIVOTS=_PIVOTS, TILE=_TILE, **options)
    _race_kernel[(num_rows, num_tiles)](*state, table[4:], times, winners, *sizes, TILE=_TILE, **options)
    winner = torch.where(times == times.amin(dim=1, keepdim=True), winners, vocab_size).amin(dim=1)
    return torch.where(tokens < 0, winner, tokens)
