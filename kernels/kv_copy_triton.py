"""The copies of `kv_copy` in Triton: contiguous runs are moved, and new tokens converted to FP8 if necessary."""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_TILE_BYTES = 8192
"""What a program of `_copy_units_kernel` moves: four loads of 16 bytes for each of its 128 threads, all under way
before the first is stored. A multiprocessor runs sixteen of them, 128 KiB; an H100 reads at its full bandwidth with
18 KiB under way on each (3.35 TB/s for 0.7 us, over 132)."""


@jit()
def to_fp8(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`values` / `scale`, both float32, with the result of `kv_copy.quantize`."""
    scaled = tl.div_rn(values, scale)  # `/` is only nearly right on a GPU
    kept = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return tl.where(tl.abs(scaled) < float("inf"), kept, float("nan")).to(tl.float8e4nv)


@jit()
def _write_kv_kernel(
    keys: tl.tensor,  # the layer's K of block 0
    values: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_kv_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_kv_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # at least NUM_HEADS * HEAD_SIZE
    QUANTIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    elements = tl.arange(0, PADDED)
    heads = elements // HEAD_SIZE
    dims = elements % HEAD_SIZE
    mask = heads < NUM_HEADS
    # Not behind a branch on the slot: all three loads are under way at once.
    key = tl.load(k + token * stride_k_token + heads * stride_k_head + dims, mask=mask)
    value = tl.load(v + token * stride_v_token + heads * stride_v_head + dims, mask=mask)
    if QUANTIZE:
        key = to_fp8(key.to(tl.float32), k_scale)
        value = to_fp8(value.to(tl.float32), v_scale)
    target = (
        (slot // BLOCK_SIZE) * stride_kv_block + heads * stride_kv_head + (slot % BLOCK_SIZE) * stride_kv_token + dims
    )
    mask = heads < tl.where(slot < 0, 0, NUM_HEADS)
    tl.store(keys + target, key, mask=mask)
    tl.store(values + target, value, mask=mask)


@jit(do_not_specialize=["num_pieces", "num_heads", "first_head", "first_side"])
def _copy_units_kernel(
    pool: tl.tensor,
    unit_ids: tl.tensor,
    buffer: tl.tensor,
    num_pieces: tl.tensor,  # of a unit: layers * 2 * heads of the ranges
    num_heads: tl.tensor,  # of the range
    first_head: tl.tensor,
    first_side: tl.tensor,  # 2 * the first layer
    stride_pool_block: tl.tensor,
    stride_pool_side: tl.tensor,
    stride_pool_head: tl.tensor,
    UNITS_PER_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # elements of a unit's K or V of one layer and head, contiguous on both sides
    TILE_PIECES: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    TO_POOL: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    pieces = tl.program_id(1) * TILE_PIECES + tl.arange(0, TILE_PIECES)
    elements = tl.program_id(2) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    unit = tl.load(unit_ids + index).to(tl.int64)
    sides = first_side + pieces // num_heads
    heads = first_head + pieces % num_heads
    in_unit = (sides * stride_pool_side + heads * stride_pool_head)[:, None] + elements[None, :]
    in_pool = pool + (unit // UNITS_PER_BLOCK * stride_pool_block + unit % UNITS_PER_BLOCK * PIECE) + in_unit
    in_buffer = buffer + index * num_pieces * PIECE + (pieces[:, None] * PIECE + elements[None, :])
    mask = (pieces < num_pieces)[:, None] & (elements < PIECE)[None, :]
    source, target = in_pool, in_buffer
    if TO_POOL:
        source, target = in_buffer, in_pool
    tl.store(target, tl.load(source, mask=mask), mask=mask)


def write_kv_triton(
    kv_pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Launch the kernel; arguments as `write_kv` has checked them. k's and v's innermost dimensions are contiguous."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the innermost dimension of k and v must be contiguous")
    num_tokens, num_heads, head_size = k.shape
    if num_tokens == 0:
        return
    last = kv_pool.shape[2] - 1  # side: of latent rows the first, which is written twice
    _write_kv_kernel[(num_tokens,)](
        kv_pool[0, layer, 0], kv_pool[0, layer, last], k, v, slot_mapping, kv_scales[0], kv_scales[last],
        *k.stride()[:2], *v.stride()[:2], kv_pool.stride(0), *kv_pool.stride()[3:5],
        BLOCK_SIZE=kv_pool.shape[4], NUM_HEADS=num_heads, HEAD_SIZE=head_size,
        PADDED=triton.next_power_of_2(num_heads * head_size), QUANTIZE=kv_pool.dtype != k.dtype, **LAUNCH_OPTIONS,
    )  # fmt: skip


def copy_units_triton(
    kv_pool: torch.Tensor,
    unit_ids: torch.Tensor,
    buffer: torch.Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    *,
    to_pool: bool,
) -> None:
    """Launch the kernel; arguments as `copy_units` has checked them."""
    num_units, num_layers, sides, num_heads, tokens, head_size = buffer.shape
    if num_units == 0:
        return
    piece, num_pieces = tokens * head_size, num_layers * sides * num_heads
    tile = _TILE_BYTES // kv_pool.itemsize
    tile_elements = min(tile, triton.next_power_of_2(piece))
    tile_pieces = tile // tile_elements
    _copy_units_kernel[(num_units, triton.cdiv(num_pieces, tile_pieces), triton.cdiv(piece, tile_elements))](
        kv_pool, unit_ids, buffer, num_pieces, num_heads, heads[0], sides * layers[0],
        kv_pool.stride(0), *kv_pool.stride()[2:4], UNITS_PER_BLOCK=kv_pool.shape[4] // tokens, PIECE=piece,
        TILE_PIECES=tile_pieces, TILE_ELEMENTS=tile_elements, TO_POOL=to_pool, **LAUNCH_OPTIONS,
    )  # fmt: skip
