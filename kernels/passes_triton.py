"""Passes over a step's rows in Triton: RMSNorm, silu(gate) * up, and queries and keys normed and rotated in place, with
keys and values written to the pool.

Computed in float32, and rounded at the same places as by the torch operations of models/passes.py, heads.py and
rope.py. Kernels are compiled for the model's sizes alone, so a new number of rows compiles nothing.
"""

import torch
import triton
import triton.language as tl

from pdkv.kernels.kv_copy import PagedSlots
from pdkv.kernels.kv_copy_triton import to_fp8
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_TILE = 1024  # values of a row that a program gates
_TILE_HEADS = 16  # that a program rotates


@jit()
def _rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    stride_row: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,  # to what `out` has
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * stride_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values) / SIZE + epsilon)
    normed = values * factor * tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(out + row * SIZE + at, mask=at < SIZE, other=0.0)
        normed = normed.to(added.dtype).to(tl.float32) + added.to(tl.float32)
    tl.store(out + row * SIZE + at, normed.to(out.dtype.element_ty), mask=at < SIZE)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x * x) + epsilon) * weight of each row of x (n, size), rounded once; (n, size).

    A row's values and `weight` (size,) are contiguous. `residual` (n, size), contiguous: the result is added to it, in
    place, and rounded again.
    """
    num_rows, size = x.shape
    fits = residual is None or (residual.shape == x.shape and residual.is_contiguous())
    if x.stride(1) != 1 or weight.shape != (size,) or weight.stride(0) != 1 or not fits:
        raise ValueError(
            f"expected contiguous rows, got x {tuple(x.shape)}, {x.stride()} and weight {tuple(weight.shape)}"
        )
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_rows:
        padded = triton.next_power_of_2(size)
        warps = min(max(padded // 512, 1), 16)
        _rms_norm_kernel[(num_rows,)](
            out, x, weight, epsilon, x.stride(0), SIZE=size, PADDED=padded, ADDS=residual is not None,
            num_warps=warps, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out


@jit()
def gated(gates: tl.tensor, ups: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """act(gates) * ups of numbers of one dtype, which act is rounded to, too."""
    x = gates.to(tl.float32)
    power = x
    if GELU:
        power = 1.5957691216 * (x + 0.044715 * (x * x * x))
    acted = (x / (1.0 + tl.exp(-power))).to(gates.dtype).to(tl.float32)
    return (acted * ups.to(tl.float32)).to(gates.dtype)


@jit()
def _gated_kernel(
    out: tl.tensor, x: tl.tensor, stride_row: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gates = tl.load(x + row * stride_row + at, mask=at < SIZE, other=0.0)
    ups = tl.load(x + row * stride_row + SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(out + row * SIZE + at, gated(gates, ups, GELU), mask=at < SIZE)


def gated_triton(x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up for rows x (n, 2 * size) of [gate, up]; silu is rounded, then the product. `gelu`: by tanh."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"expected contiguous rows of two halves, got x {tuple(x.shape)} with strides {x.stride()}")
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        grid = num_rows, triton.cdiv(size, _TILE)
        _gated_kernel[grid](out, x, x.stride(0), SIZE=size, TILE=_TILE, GELU=gelu, num_warps=4, **LAUNCH_OPTIONS)
    return out


@jit()
def _weighed(
    x: tl.tensor,
    factor: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    is_query: tl.tensor,
) -> tl.tensor:
    """The values x (heads, dims) of heads times their factor and the norm's weights, not rounded yet."""
    q = tl.load(q_weight + dims, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_weight + dims, mask=mask, other=0.0).to(tl.float32)
    return x * factor[:, None] * tl.where(is_query[:, None], q[None, :], k[None, :])


@jit()
def _row(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[None, :]


@jit()
def _put(target: tl.tensor, values: tl.tensor, mask: tl.tensor, scale: tl.tensor, QUANTIZE: tl.constexpr) -> None:
    """Store float32 values that the pool's dtype holds, or that it holds once they are quantized."""
    if QUANTIZE:
        values = to_fp8(values, scale)
    tl.store(target, values.to(target.dtype.element_ty), mask=mask)


@jit()
def _heads_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,  # (positions, 2 * HALF)
    sines: tl.tensor,
    q_weight: tl.tensor,  # (HEAD_SIZE,) with HAS_NORM
    k_weight: tl.tensor,
    q_epsilon: tl.tensor,
    k_epsilon: tl.tensor,
    stride_token: tl.tensor,
    pool: tl.tensor,  # with WRITES the layer's K of block 0, which V follows
    slots: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_block: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,  # heads, and those of keys
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of the values that are rotated
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,  # values behind them, which are only normed
    HAS_NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    WRITES: tl.constexpr,  # keys and values to the pool, keys not back to their place
    BLOCK_SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    """One token's rotation of some heads; a thread reads and writes both values of a pair."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, HALF_PADDED)
    is_head = heads < (2 * NUM_ROTATED - NUM_HEADS if WRITES else NUM_ROTATED)
    mask = is_head[:, None] & (dims[None, :] < HALF)
    first = qkv + token * stride_token + heads[:, None] * HEAD_SIZE
    x = tl.load(first + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + HALF + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    value_x, value_y = x, y
    dtype = qkv.dtype.element_ty
    if REST_PADDED:
        behind = 2 * HALF + tl.arange(0, REST_PADDED)
        rest_mask = is_head[:, None] & (behind[None, :] < HEAD_SIZE)
        rest = tl.load(first + behind[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        value_rest = rest
    if HAS_NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        is_query = heads < NUM_HEADS
        epsilon = tl.where(is_query, q_epsilon, k_epsilon)
        if REST_PADDED:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_SIZE + epsilon)
        if REST_PADDED:
            rest = _weighed(rest, factor, q_weight, k_weight, behind, behind < HEAD_SIZE, is_query)
            rest = rest.to(dtype).to(tl.float32)
        x = _weighed(x, factor, q_weight, k_weight, dims, dims < HALF, is_query).to(dtype).to(tl.float32)
        y = _weighed(y, factor, q_weight, k_weight, HALF + dims, dims < HALF, is_query).to(dtype).to(tl.float32)
    place = tl.load(positions + token) * (2 * HALF) + dims
    turned_x = x * _row(cosines + place, dims < HALF) + (y * _row(sines + place, dims < HALF)).to(dtype).to(tl.float32)
    place += HALF
    turned_y = y * _row(cosines + place, dims < HALF) + (x * _row(sines + place, dims < HALF)).to(dtype).to(tl.float32)
    is_kept = (heads < (NUM_HEADS if WRITES else NUM_ROTATED))[:, None]
    tl.store(first + dims[None, :], turned_x.to(dtype), mask=mask & is_kept)
    tl.store(first + HALF + dims[None, :], turned_y.to(dtype), mask=mask & is_kept)
    if REST_PADDED and HAS_NORM:
        tl.store(first + behind[None, :], rest.to(dtype), mask=rest_mask & is_kept)
    if WRITES:
        slot = tl.load(slots + token)
        is_value = (heads >= NUM_ROTATED)[:, None]
        scale = tl.where(is_value, v_scale, k_scale)
        in_block = (heads - NUM_HEADS)[:, None] * (BLOCK_SIZE * HEAD_SIZE) + slot % BLOCK_SIZE * HEAD_SIZE
        target = pool + slot // BLOCK_SIZE * stride_block + in_block
        is_put = (heads >= tl.where(slot < 0, 2 * NUM_ROTATED, NUM_HEADS))[:, None]
        put_x = tl.where(is_value, value_x, turned_x.to(dtype).to(tl.float32))
        put_y = tl.where(is_value, value_y, turned_y.to(dtype).to(tl.float32))
        _put(target + dims[None, :], put_x, mask & is_put, scale, QUANTIZE)
        _put(target + HALF + dims[None, :], put_y, mask & is_put, scale, QUANTIZE)
        if REST_PADDED:
            _put(target + behind[None, :], tl.where(is_value, value_rest, rest), rest_mask & is_put, scale, QUANTIZE)


Norms = tuple[torch.Tensor, float, torch.Tensor, float]
"""Weight (head_size,) and epsilon of queries, then of keys."""


def pass_heads_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: Norms | None,
    slots: PagedSlots | None = None,
) -> None:
    """Norm (None: not) and rotate queries and keys in place; or queries in place, and keys and values to their slots.

    Args:
        qkv: (n, num_heads + 2 * num_kv_heads, head_size), a token's numbers contiguous; the V part is not changed.
            Without norms and slots it may be a part of each vector's numbers.
        positions: (n,) int64, each below the tables' length.
        cosines, sines: (length, 1, rotary size) as in `RopeTable`, contiguous.
        slots: where keys and values go; the K part of `qkv` then stays as it is.

    Raises:
        ValueError: what must be contiguous is not, or does not fit the pool.
    """
    num_tokens, _, head_size = qkv.shape
    rotary_size, head_stride = cosines.shape[-1], qkv.stride(1)
    if (
        qkv.stride(2) != 1
        or ((norms is not None or slots is not None) and head_stride != head_size)
        or not cosines.is_contiguous()
        or not sines.is_contiguous()
    ):
        raise ValueError(
            f"tokens, and tables of rotations, must be contiguous, got qkv {tuple(qkv.shape)}, {qkv.stride()}"
        )
    place = qkv, positions, 1.0, 1.0, 0  # nowhere
    if slots is not None:
        slots.check(qkv[:, num_heads:])
        place = slots.kv_pool[0, slots.layer], slots.slot_mapping, *slots.kv_scales, slots.kv_pool.stride(0)
    if not num_tokens:
        return
    rest = head_size - rotary_size if norms is not None or slots is not None else 0
    _heads_kernel[(num_tokens, triton.cdiv(num_heads + (1 if slots is None else 2) * num_kv_heads, _TILE_HEADS))](
        qkv, positions, cosines, sines, *(norms[::2] if norms is not None else (cosines, cosines)),
        *(norms[1::2] if norms is not None else (0.0, 0.0)), qkv.stride(0),
        *place,
        NUM_HEADS=num_heads, NUM_ROTATED=num_heads + num_kv_heads, HEAD_SIZE=head_stride,
        HALF=rotary_size // 2, HALF_PADDED=triton.next_power_of_2(rotary_size // 2),
        REST_PADDED=triton.next_power_of_2(rest) if rest else 0, HAS_NORM=norms is not None, TILE_HEADS=_TILE_HEADS,
        WRITES=slots is not None, BLOCK_SIZE=1 if slots is None else slots.kv_pool.shape[4],
        QUANTIZE=slots is not None and slots.kv_pool.dtype != qkv.dtype, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
