"""Moves KV: new tokens into the paged pool, and blocks or parts of blocks between the pool and a contiguous transfer
buffer.
"""

from typing import NamedTuple

import torch

Range = tuple[int, int]
"""A range [start, stop)."""

Scales = tuple[float, float]
"""The values of 1.0 in FP8, for K and for V."""

NO_SCALES: Scales = (1.0, 1.0)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3fn, which has no infinity."""


class PagedSlots(NamedTuple):
    """Where the K and V of a step's tokens go in one layer of a paged pool; arguments of `write_kv`."""

    kv_pool: torch.Tensor
    layer: int
    slot_mapping: torch.Tensor
    kv_scales: Scales = NO_SCALES

    def put(self, kv: torch.Tensor) -> None:
        """Write K and V of (T, 2 * num_kv_heads, head_size), or latent rows (T, 1, row size)."""
        heads = self.kv_pool.shape[3]
        write_kv(self.kv_pool, self.layer, kv[:, :heads], kv[:, -heads:], *self[2:])

    def check(self, kv: torch.Tensor) -> None:
        """As `write_kv` does. Raises ValueError."""
        heads = self.kv_pool.shape[3]
        _check_write(self.kv_pool, self.layer, kv[:, :heads], kv[:, -heads:], self.slot_mapping)


def write_kv(
    kv_pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: Scales = NO_SCALES,
) -> None:
    """Write this step's K and V of one layer into the pool, in place.

    Args:
        kv_pool: (num_blocks, num_layers, sides, num_kv_heads, block_size, head_size).
        layer: which layer of the pool.
        k, v: (T, num_kv_heads, head_size), of the pool's dtype, or of any dtype if the pool is in FP8. Of a pool of
            latent rows, whose sides are one, both are the rows.
        slot_mapping: (T,) int64, block * block_size + offset; a negative one is padding and is never written.
        kv_scales: the values that 1.0 in an FP8 pool represents, for K and for V; values are divided by it, rounded to
            the nearest, and clamped to +-448. Non-finite values become NaN.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check_write(kv_pool, layer, k, v, slot_mapping)
    if kv_pool.is_cuda:
        from pdkv.kernels.kv_copy_triton import write_kv_triton

        write_kv_triton(kv_pool, layer, k, v, slot_mapping, kv_scales)
    else:
        write_kv_reference(kv_pool, layer, k, v, slot_mapping, kv_scales)


def write_kv_reference(
    kv_pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: Scales = NO_SCALES,
) -> None:
    """What `write_kv` does, in torch."""
    if bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        k, v, slot_mapping = k[real], v[real], slot_mapping[real]
    block_size = kv_pool.shape[4]
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    for side, values in enumerate((k, v)[: kv_pool.shape[2]]):
        stored = quantize(values, kv_scales[side]) if kv_pool.dtype == FP8 != values.dtype else values
        raw(kv_pool)[:, layer, side].transpose(1, 2)[blocks, offsets] = raw(stored)


def copy_units(
    kv_pool: torch.Tensor,
    unit_ids: torch.Tensor,
    buffer: torch.Tensor,
    layers: Range | None = None,
    heads: Range | None = None,
    *,
    to_pool: bool,
) -> None:
    """Copy blocks, or equal parts of blocks, out of the pool into a contiguous transfer buffer, or back.

    Args:
        kv_pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), contiguous.
        unit_ids: (n,) int64, unit = block * units_per_block + position; the buffer's shape gives the tokens per unit.
            All different, if the pool is written.
        buffer: (n, layers, sides, heads, tokens, head_size), of the pool's dtype, contiguous. `tokens` divides the
            block size.
        layers, heads: the ranges [start, stop); None: all of them.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    part = _check_copy(kv_pool, unit_ids, buffer, layers, heads)
    if kv_pool.is_cuda:
        from pdkv.kernels.kv_copy_triton import copy_units_triton

        copy_units_triton(kv_pool, unit_ids, buffer, *part, to_pool=to_pool)
    else:
        copy_units_reference(kv_pool, unit_ids, buffer, *part, to_pool=to_pool)


def copy_units_reference(
    kv_pool: torch.Tensor, unit_ids: torch.Tensor, buffer: torch.Tensor, layers: Range, heads: Range, *, to_pool: bool
) -> None:
    """What `copy_units` does, in torch."""
    units_per_block = kv_pool.shape[4] // buffer.shape[4]
    part = raw(kv_pool)[:, slice(*layers), :, slice(*heads)]
    blocks = unit_ids.div(units_per_block, rounding_mode="floor")
    everything = slice(None)
    index = (blocks, everything, everything, everything, unit_ids - blocks * units_per_block)
    units = part.view(*part.shape[:4], units_per_block, *buffer.shape[4:])
    if to_pool:
        units[index] = raw(buffer)
    else:
        raw(buffer).copy_(units[index])


def quantize(values: torch.Tensor, scale: float) -> torch.Tensor:
    """`values` / `scale` in FP8, rounded to the nearest; too large values become +-448, non-finite ones NaN."""
    scaled = values.float() / scale
    return torch.where(scaled.isfinite(), scaled.clamp(-FP8_MAX, FP8_MAX), torch.nan).to(FP8)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a dtype that torch can index: FP8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _check_pool(kv_pool: torch.Tensor) -> None:
    if kv_pool.dim() != 6 or kv_pool.shape[2] > 2 or not kv_pool.is_contiguous():
        raise ValueError(
            "kv_pool must be contiguous (blocks, layers, sides, heads, block_size, head_size), "
            f"got {tuple(kv_pool.shape)} with strides {kv_pool.stride()}"
        )


def _check_write(
    kv_pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Raise the errors of `write_kv`."""
    _check_pool(kv_pool)
    expected = (slot_mapping.shape[0], kv_pool.shape[3], kv_pool.shape[5])
    if k.shape != expected or v.shape != expected or slot_mapping.dim() != 1:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    if k.dtype != v.dtype or kv_pool.dtype not in (k.dtype, FP8):
        raise ValueError(f"k is {k.dtype}, v {v.dtype}, kv_pool {kv_pool.dtype}")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} is not in [0, {kv_pool.shape[1]})")
    if any(t.device != kv_pool.device for t in (k, v, slot_mapping)):
        raise ValueError("all tensors must be on one device")


def _check_copy(
    kv_pool: torch.Tensor, unit_ids: torch.Tensor, buffer: torch.Tensor, layers: Range | None, heads: Range | None
) -> tuple[Range, Range]:
    """The ranges of layers and heads."""
    _check_pool(kv_pool)
    layers = _check_range("layers", layers, kv_pool.shape[1])
    heads = _check_range("heads", heads, kv_pool.shape[3])
    if unit_ids.dim() != 1 or unit_ids.dtype != torch.int64:
        raise ValueError(f"unit_ids must be (n,) int64, got {unit_ids.dtype} of {tuple(unit_ids.shape)}")
    size = kv_pool.shape[4]
    tokens = (
        buffer.shape[4] if buffer.dim() == 6 and 0 < buffer.shape[4] <= size and not size % buffer.shape[4] else size
    )
    expected = (len(unit_ids), layers[1] - layers[0], kv_pool.shape[2], heads[1] - heads[0], tokens, kv_pool.shape[5])
    if buffer.shape != expected or not buffer.is_contiguous() or buffer.dtype != kv_pool.dtype:
        raise ValueError(
            f"the buffer must be contiguous {kv_pool.dtype} of {expected}, got {buffer.dtype} of {tuple(buffer.shape)}"
        )
    if any(tensor.device != kv_pool.device for tensor in (unit_ids, buffer)):
        raise ValueError("all tensors must be on one device")
    return layers, heads


def _check_range(what: str, given: Range | None, size: int) -> Range:
    start, stop = given or (0, size)
    if not 0 <= start < stop <= size:
        raise ValueError(f"{what} [{start}, {stop}) is not a range within [0, {size})")
    return start, stop
