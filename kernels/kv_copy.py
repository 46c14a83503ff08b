"""Move KV: new tokens into the paged pool, whole blocks between the pool and a contiguous transfer buffer."""

import torch


def write_kv(kv_pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write this step's K and V of one layer into the pool, in place.

    Args:
        kv_pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size).
        layer: which layer of the pool.
        k, v: (T, num_kv_heads, head_size).
        slot_mapping: (T,) int64, block * block_size + offset; a negative one is padding and is never written.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check_pool(kv_pool)
    expected = (slot_mapping.shape[0], kv_pool.shape[3], kv_pool.shape[5])
    if k.shape != expected or v.shape != expected or slot_mapping.dim() != 1:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    if k.dtype != kv_pool.dtype or v.dtype != kv_pool.dtype:
        raise ValueError(f"k is {k.dtype}, v {v.dtype}, kv_pool {kv_pool.dtype}")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} is not in [0, {kv_pool.shape[1]})")
    if any(t.device != kv_pool.device for t in (k, v, slot_mapping)):
        raise ValueError("all tensors must be on one device")
    if kv_pool.is_cuda:
        from pdkv.kernels.kv_copy_triton import write_kv_triton

        write_kv_triton(kv_pool, layer, k, v, slot_mapping)
    else:
        write_kv_reference(kv_pool, layer, k, v, slot_mapping)


def write_kv_reference(
    kv_pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """What `write_kv` does, in torch."""
    if bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        k, v, slot_mapping = k[real], v[real], slot_mapping[real]
    block_size = kv_pool.shape[4]
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    kv_pool[:, layer, 0].transpose(1, 2)[blocks, offsets] = k
    kv_pool[:, layer, 1].transpose(1, 2)[blocks, offsets] = v


def gather_blocks(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, layers: tuple[int, int] | None = None
) -> None:
    """Copy blocks of the pool into a contiguous transfer buffer.

    Args:
        kv_pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), contiguous.
        block_ids: (n,) int64.
        out: (n, stop - start, 2, num_kv_heads, block_size, head_size), contiguous; written.
        layers: the layers [start, stop); None: all of them.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    start, stop = _check_copy(kv_pool, block_ids, out, layers)
    if kv_pool.is_cuda:
        from pdkv.kernels.kv_copy_triton import copy_blocks_triton

        copy_blocks_triton(kv_pool, block_ids, out, start, stop, to_pool=False)
    else:
        gather_blocks_reference(kv_pool, block_ids, out, (start, stop))


def gather_blocks_reference(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, layers: tuple[int, int] | None = None
) -> None:
    """What `gather_blocks` does, in torch."""
    torch.index_select(kv_pool[:, slice(*layers)] if layers else kv_pool, 0, block_ids, out=out)


def scatter_blocks(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, src: torch.Tensor, layers: tuple[int, int] | None = None
) -> None:
    """Copy a contiguous transfer buffer into blocks of the pool, the inverse of `gather_blocks`.

    Args:
        block_ids: (n,) int64, all different.
        src: (n, stop - start, 2, num_kv_heads, block_size, head_size), contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    start, stop = _check_copy(kv_pool, block_ids, src, layers)
    if kv_pool.is_cuda:
        from pdkv.kernels.kv_copy_triton import copy_blocks_triton

        copy_blocks_triton(kv_pool, block_ids, src, start, stop, to_pool=True)
    else:
        scatter_blocks_reference(kv_pool, block_ids, src, (start, stop))


def scatter_blocks_reference(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, src: torch.Tensor, layers: tuple[int, int] | None = None
) -> None:
    """What `scatter_blocks` does, in torch."""
    (kv_pool[:, slice(*layers)] if layers else kv_pool).index_copy_(0, block_ids, src)


def _check_pool(kv_pool: torch.Tensor) -> None:
    if kv_pool.dim() != 6 or kv_pool.shape[2] != 2 or not kv_pool.is_contiguous():
        raise ValueError(
            "kv_pool must be contiguous (blocks, layers, 2, heads, block_size, head_size), "
            f"got {tuple(kv_pool.shape)} with strides {kv_pool.stride()}"
        )


def _check_copy(
    kv_pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, layers: tuple[int, int] | None
) -> tuple[int, int]:
    _check_pool(kv_pool)
    start, stop = layers or (0, kv_pool.shape[1])
    if not 0 <= start < stop <= kv_pool.shape[1]:
        raise ValueError(f"layers [{start}, {stop}) are not a range within [0, {kv_pool.shape[1]})")
    expected = (block_ids.shape[0], stop - start, *kv_pool.shape[2:])
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64:
        raise ValueError(f"block_ids must be (n,) int64, got {block_ids.dtype} of {tuple(block_ids.shape)}")
    if buffer.shape != expected or not buffer.is_contiguous() or buffer.dtype != kv_pool.dtype:
        raise ValueError(
            f"the buffer must be contiguous {kv_pool.dtype} of {expected}, got {buffer.dtype} of {tuple(buffer.shape)}"
        )
    if block_ids.device != kv_pool.device or buffer.device != kv_pool.device:
        raise ValueError("all tensors must be on one device")
    return start, stop
