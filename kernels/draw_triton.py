"""The draw of a token from each row of logits in Triton, with exactly the tokens of engine/worker/sampling/draw.py.

Every number is made by the same float64 operations, each rounded (no multiply-add as one instruction), and every sum is
exact. The filters' thresholds take three passes over a row: its largest and smallest logit; how many tokens each of
many bins between them has; and the few tokens that may be the threshold, to be bisected where they lie together. All
tokens of a row race in one program per tile, then the winners of the tiles race. The host never waits.
"""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import jit

_TILE = 4096  # tokens that a program looks at together
_WARPS = 16
_PIVOTS = 4  # looked at in one pass over some tokens: 16 passes find one of 2**32 values
_BINS = 1024  # of a row
_KEPT = 8  # of which part of a row's tokens one may be kept; where more may be the threshold, the row is bisected
_LOWEST = -64.0  # scaled logits below have weight 0, as in draw.py
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
def _tokens(row: tl.tensor, start: tl.tensor, count: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """A tile of a row's logits in float32; -inf behind the last one."""
    at = start + tl.arange(0, TILE)
    return tl.load(row + at, mask=at < count, other=float("-inf")).to(tl.float32)


@jit()
def _weight(x: tl.tensor, best: tl.tensor, temperature: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """What tokens weigh that the filters before have kept, 1 at the likeliest; 0 of the others."""
    scaled = (x.to(tl.float64) - best.to(tl.float64)) / temperature
    return tl.where(scaled >= floor, _exp(scaled), 0.0)


@jit()
def _sums(
    row: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    high_magic: tl.tensor,
    low_magic: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What all tokens weigh, in two parts."""
    high = tl.zeros([], tl.float64)
    low = tl.zeros([], tl.float64)
    for start in range(0, count, TILE):
        weight = _weight(_tokens(row, start, count, TILE), best, temperature, floor)
        most, least = _split(weight, high_magic, low_magic)
        high += tl.sum(most)
        low += tl.sum(least)
    return high, low


@jit()
def _find(
    row: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    wanted: tl.tensor,
    outside: tl.tensor,
    outside_rest: tl.tensor,
    high_magic: tl.tensor,
    low_magic: tl.tensor,
    IS_WEIGHED: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest number, from -inf to `best`, such that what lies above it weighs less than `wanted`, beside what
    weighs `outside` and lies above all of these tokens.

    Without IS_WEIGHED every token weighs 1.
    """
    low = tl.full([], -2139095041, tl.int64)  # -inf's
    high = _order(best).to(tl.int64)
    share = tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + (high - low) * share // PIVOTS
        above = tl.zeros([PIVOTS], tl.float64) + outside
        rest = tl.zeros([PIVOTS], tl.float64) + outside_rest
        for start in range(0, count, TILE):
            x = _tokens(row, start, count, TILE)
            is_above = _order(x)[:, None] > pivots[None, :]
            if IS_WEIGHED:
                most, least = _split(_weight(x, best, temperature, floor), high_magic, low_magic)
                above += tl.sum(tl.where(is_above, most[:, None], 0.0), axis=0)
                rest += tl.sum(tl.where(is_above, least[:, None], 0.0), axis=0)
            else:
                above += tl.sum(is_above.to(tl.int32), axis=0).to(tl.float64)
        num_below = tl.sum((above + rest >= wanted).to(tl.int32))  # pivots that are too low: the first ones
        next_low = low + tl.where(num_below > 0, (high - low) * (num_below - 1) // PIVOTS + 1, 0)
        high = tl.where(num_below < PIVOTS, low + (high - low) * num_below // PIVOTS, high)
        low = next_low
    return _number(low)


@jit()
def _bin(x: tl.tensor, best: tl.tensor, per_bin: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """Bins of logits, which never lie before those of larger ones; the last one's are as small as can be."""
    return tl.minimum((best - x) * per_bin, BINS - 1.0).to(tl.int32)


@jit(do_not_specialize=["num_rows", "vocab_size", "room"])
def _filter_kernel(
    logits: tl.tensor,
    table: tl.tensor,  # (4, rows) temperature, top_k, top_p, floor of min-p
    bests: tl.tensor,
    tokens: tl.tensor,
    kept: tl.tensor,  # (rows, room) float32
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    room: tl.tensor,
    high_magic: tl.tensor,
    low_magic: tl.tensor,
    BINS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """Each row's largest logit, and the floor of min-p, top-k and top-p; or its token, where no finite one is the
    largest.
    """
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * stride_row
    infinity = float("inf")
    best = tl.full([], -infinity, tl.float32)
    least = tl.full([], infinity, tl.float32)
    first_nan = vocab_size
    for start in range(0, vocab_size, TILE):
        x = _tokens(own, start, vocab_size, TILE)
        first_nan = tl.minimum(first_nan, tl.min(tl.where(x != x, start + tl.arange(0, TILE), vocab_size)))
        best = tl.maximum(best, tl.max(tl.where(x != x, -infinity, x)))
        least = tl.minimum(least, tl.min(tl.where((x != x) | (x == -infinity), infinity, x)))
    if (first_nan < vocab_size) | (tl.abs(best) == infinity):
        first = vocab_size
        for start in range(0, vocab_size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(own + at, mask=at < vocab_size, other=0.0).to(tl.float32)
            first = tl.minimum(first, tl.min(tl.where(x == best, at, vocab_size)))
        tl.store(tokens + row, tl.where(first_nan < vocab_size, first_nan, first).to(tl.int64))
        return
    tl.store(tokens + row, tl.full([], -1, tl.int64))
    tl.store(bests + row, best)
    temperature = tl.load(table + row)
    top_k = tl.load(table + num_rows + row)
    top_p = tl.load(table + 2 * num_rows + row)
    if (top_k == 0.0) & (top_p >= 1.0):
        return
    floor = tl.load(table + 3 * num_rows + row)
    # Bins end where weights do: what weighs nothing decides nothing. A k-th token may lie behind that.
    most_span = -LOWEST * tl.where(top_k > 0.0, tl.maximum(temperature, 1.0), temperature)
    span = tl.minimum(tl.minimum(best.to(tl.float64) - least.to(tl.float64), most_span), 1e38).to(tl.float32)
    per_bin = BINS / tl.maximum(span, 1e-30)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, vocab_size, TILE):
        x = _tokens(own, start, vocab_size, TILE)
        is_finite = x > -infinity
        counts += tl.histogram(_bin(tl.where(is_finite, x, best), best, per_bin, BINS), BINS, mask=is_finite)
    bins = tl.arange(0, BINS)
    first_bin = tl.zeros([], tl.int32)
    if top_k > 0.0:  # all down to the bin of the k-th
        last_bin = tl.sum((tl.cumsum(counts) < top_k).to(tl.int32))
    else:  # those in which the threshold may lie if each token weighs as much as the middle of its bin, nearly
        width = 1.0 / (per_bin * temperature.to(tl.float32))
        middles = -(bins + 0.5) * width
        upto = tl.cumsum(counts * tl.where(middles >= floor, tl.exp(middles), 0.0))
        total_about, share = tl.max(upto), top_p.to(tl.float32)
        error = 1.1 * width * tl.minimum(share, 1.0 - share) + 1e-5
        first_bin = tl.sum((upto < (share - error) * total_about).to(tl.int32))
        last_bin = tl.sum((upto < (share + error) * total_about).to(tl.int32))
    num_kept = tl.sum(tl.where((bins >= first_bin) & (bins <= last_bin), counts, 0))
    has_room = num_kept <= room
    above = tl.zeros([], tl.float64)
    rest = tl.zeros([], tl.float64)
    total = tl.zeros([], tl.float64)
    total_rest = tl.zeros([], tl.float64)
    last = tl.full([], -infinity, tl.float64)
    mine = kept + row.to(tl.int64) * room
    if has_room:
        stored = tl.zeros([], tl.int32)
        for start in range(0, vocab_size, TILE):
            x = _tokens(own, start, vocab_size, TILE)
            is_finite = x > -infinity
            bin = _bin(tl.where(is_finite, x, best), best, per_bin, BINS)
            is_kept = is_finite & (bin >= first_bin) & (bin <= last_bin)
            places = stored + tl.cumsum(is_kept.to(tl.int32)) - 1
            tl.store(mine + places, x, mask=is_kept)
            stored += tl.sum(is_kept.to(tl.int32))
            if top_k == 0.0:
                high, low = _split(_weight(x, best, temperature, floor), high_magic, low_magic)
                is_above = is_finite & (bin < first_bin)
                above += tl.sum(tl.where(is_above, high, 0.0))
                rest += tl.sum(tl.where(is_above, low, 0.0))
                total += tl.sum(high)
                total_rest += tl.sum(low)
        tl.debug_barrier()  # threads read what others have kept from here on
    if top_k > 0.0:
        if has_room:
            last = _find(mine, num_kept, best, temperature, floor, top_k, 0.0, 0.0, 0.0, 0.0, False, PIVOTS, TILE)
        else:
            last = _find(own, vocab_size, best, temperature, floor, top_k, 0.0, 0.0, 0.0, 0.0, False, PIVOTS, TILE)
        floor = tl.maximum(floor, (last - best.to(tl.float64)) / temperature)
    if top_p < 1.0:
        if not has_room:
            total, total_rest = _sums(own, vocab_size, best, temperature, floor, high_magic, low_magic, TILE)
        elif top_k > 0.0:
            total, total_rest = _sums(mine, num_kept, best, temperature, floor, high_magic, low_magic, TILE)
        wanted = top_p * (total + total_rest)
        last = tl.full([], -infinity, tl.float64)
        if has_room & (above + rest < wanted):
            last = _find(
                mine, num_kept, best, temperature, floor, wanted, above, rest, high_magic, low_magic, True, PIVOTS, TILE
            )
        if last == -infinity:  # it does not lie among those that were kept
            last = _find(
                own, vocab_size, best, temperature, floor, wanted, 0.0, 0.0, high_magic, low_magic, True, PIVOTS, TILE
            )
        floor = tl.maximum(floor, (last - best.to(tl.float64)) / temperature)
    tl.store(table + 3 * num_rows + row, floor)


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


def draw_triton(logits: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """One token per row, (n,) int64, as `draw` in engine/worker/sampling/draw.py says; nothing is copied to the host.

    Args:
        logits: (n, vocab) float32, bfloat16 or float16, rows contiguous; left as they are.
        table: (7, n) int64, contiguous, on the same device, as made by `_table` in draw.py. Its fourth row is
            overwritten.
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
    room, bits = triton.cdiv(vocab_size, _KEPT), vocab_size.bit_length()
    kept = torch.empty(num_rows * room, dtype=torch.float32, device=device)
    magic = 1.5 * 2.0 ** (bits - 1), 1.5 * 2.0 ** (2 * bits - 54)
    constants = {"BINS": _BINS, "PIVOTS": _PIVOTS, "TILE": _TILE, "LOWEST": _LOWEST}
    _filter_kernel[(num_rows,)](*state, kept, *sizes, room, *magic, **constants, **options)
    _race_kernel[(num_rows, num_tiles)](*state, table[4:], times, winners, *sizes, TILE=_TILE, **options)
    winner = torch.where(times == times.amin(dim=1, keepdim=True), winners, vocab_size).amin(dim=1)
    return torch.where(tokens < 0, winner, tokens)
