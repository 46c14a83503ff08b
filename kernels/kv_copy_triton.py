"""The copies of `kv_copy` in Triton: plain moves of contiguous runs."""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_COPY_ELEMENTS = 4096  # elements that one program moves


@jit()
def _write_kv_kernel(
    keys: tl.tensor,  # the layer's K of block 0
    values: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    slot_mapping: tl.tensor,
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
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    elements = tl.arange(0, PADDED)
    heads = elements // HEAD_SIZE
    dims = elements % HEAD_SIZE
    mask = heads < NUM_HEADS
    target = (
        (slot // BLOCK_SIZE) * stride_kv_block + heads * stride_kv_head + (slot % BLOCK_SIZE) * stride_kv_token + dims
    )
    tl.store(keys + target, tl.load(k + token * stride_k_token + heads * stride_k_head + dims, mask=mask), mask=mask)
    tl.store(values + target, tl.load(v + token * stride_v_token + heads * stride_v_head + dims, mask=mask), mask=mask)


@jit()
def _copy_blocks_kernel(
    pool: tl.tensor,  # the first layer of the range in block 0
    block_ids: tl.tensor,
    buffer: tl.tensor,
    stride_pool_block: tl.tensor,
    num_elements: tl.tensor,  # of one block's range of layers, contiguous on both sides
    TO_POOL: tl.constexpr,
    COPY_ELEMENTS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * COPY_ELEMENTS + tl.arange(0, COPY_ELEMENTS)
    mask = elements < num_elements
    in_pool = pool + tl.load(block_ids + index).to(tl.int64) * stride_pool_block + elements
    in_buffer = buffer + index * num_elements + elements
    if TO_POOL:
        tl.store(in_pool, tl.load(in_buffer, mask=mask), mask=mask)
    else:
        tl.store(in_buffer, tl.load(in_pool, mask=mask), mask=mask)


def write_kv_triton(
    kv_pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Launch the kernel; arguments as `write_kv` has checked them. k's and v's innermost dimensions are contiguous."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the innermost dimension of k and v must be contiguous")
    num_tokens, num_heads, head_size = k.shape
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens,)](
        kv_pool[0, layer, 0],
        kv_pool[0, layer, 1],
        k,
        v,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_pool.stride(0),
        kv_pool.stride(3),
        kv_pool.stride(4),
        BLOCK_SIZE=kv_pool.shape[4],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        PADDED=triton.next_power_of_2(num_heads * head_size),
        **LAUNCH_OPTIONS,
    )


def copy_blocks_triton(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, start: int, stop: int, *, to_pool: bool
) -> None:
    """Launch the kernel for layers [start, stop); arguments as gather_blocks and scatter_blocks have checked them."""
    num_blocks = block_ids.shape[0]
    if num_blocks == 0:
        return
    num_elements = (stop - start) * kv_pool.stride(1)
    _copy_blocks_kernel[(num_blocks, triton.cdiv(num_elements, _COPY_ELEMENTS))](
        kv_pool[0, start],
        block_ids,
        buffer,
        kv_pool.stride(0),
        num_elements,
        TO_POOL=to_pool,
        COPY_ELEMENTS=_COPY_ELEMENTS,
        **LAUNCH_OPTIONS,
    )
