"""Products of experts in Triton: each row by the weight of the expert that it chose, in tiles of rows of one expert.

Shapes alone decide the launches: nothing is read back from the device, and a captured graph stays valid.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_TILE_OUT, _TILE_IN = 64, 64
_MIN_ROWS, _MAX_ROWS = 16, 64


class Order(NamedTuple):
    """The rows of a step sorted by expert."""

    rows: torch.Tensor  # (n * chosen,) int64, the row of x in each place
    places: torch.Tensor  # (n, chosen) int64, where each row's experts are
    ends: torch.Tensor  # (experts,) int64, where each expert's places end
    tile_ends: torch.Tensor  # (experts,) int64, where its tiles of `tile_rows` do
    tile_rows: int

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int) -> "Order":
        """The order of `experts` (n, chosen) int64, each in [0, num_experts)."""
        flat, chosen = experts.flatten(), experts.shape[1]
        order = flat.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        wanted = triton.next_power_of_2(triton.cdiv(len(flat), num_experts))
        tile_rows = min(max(wanted, _MIN_ROWS), _MAX_ROWS)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        tiles = (counts + tile_rows - 1) // tile_rows
        return cls(order // chosen, places.view_as(experts), counts.cumsum(0), tiles.cumsum(0), tile_rows)


@jit()
def _grouped_kernel(
    out: tl.tensor,  # (places, SIZE_OUT)
    x: tl.tensor,
    weights: tl.tensor,  # (experts, SIZE_OUT, SIZE_IN)
    x_rows: tl.tensor,  # (places,); read with GATHERS
    ends: tl.tensor,
    tile_ends: tl.tensor,
    num_experts: tl.tensor,
    stride_x: tl.tensor,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    GATHERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    if tile >= tl.load(tile_ends + num_experts - 1):
        return
    low = 0  # the first expert whose tiles end behind this one
    high = num_experts - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends + middle) > tile:
            high = middle
        else:
            low = middle + 1
    first_tile = tl.load(tile_ends + low - 1, mask=low > 0, other=0)
    first = tl.load(ends + low - 1, mask=low > 0, other=0)
    places = first + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_mask = places < tl.load(ends + low)
    rows = places
    if GATHERS:
        rows = tl.load(x_rows + places, mask=row_mask, other=0)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    column_mask = columns < SIZE_OUT
    own = weights + tl.cast(low, tl.int64) * SIZE_OUT * SIZE_IN + columns[:, None].to(tl.int64) * SIZE_IN
    sums = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for start in range(0, SIZE_IN, TILE_IN):
        inputs = start + tl.arange(0, TILE_IN)
        mask = inputs < SIZE_IN
        some = tl.load(
            x + rows[:, None] * stride_x + inputs[None, :], mask=row_mask[:, None] & mask[None, :], other=0.0
        )
        weight = tl.load(own + inputs[None, :], mask=column_mask[:, None] & mask[None, :], other=0.0)
        sums += tl.dot(some, tl.trans(weight), input_precision="ieee")
    to = out + places[:, None] * SIZE_OUT + columns[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@jit()
def _add_weighted_kernel(
    out: tl.tensor,
    x: tl.tensor,
    places: tl.tensor,
    factors: tl.tensor,
    residual: tl.tensor,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < SIZE
    total = tl.zeros([TILE], tl.float32)
    for i in range(CHOSEN):
        place = tl.load(places + row * CHOSEN + i)
        total += tl.load(factors + row * CHOSEN + i) * tl.load(x + place * SIZE + at, mask=mask, other=0.0).to(
            tl.float32
        )
    if ADDS:
        total += tl.load(residual + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, total.to(out.dtype.element_ty), mask=mask)


def grouped_linear_triton(x: torch.Tensor, weights: torch.Tensor, order: Order, *, gathers: bool) -> torch.Tensor:
    """(places, outputs): the row of x of each place by its expert's weight.

    Args:
        x: (rows, inputs), contiguous rows; with `gathers` `order.rows` says which, else there is one for each place.
        weights: (experts, outputs, inputs), contiguous, of x's dtype.
    """
    num_experts, outputs, inputs = weights.shape
    if x.shape[1] != inputs or x.stride(1) != 1 or not weights.is_contiguous() or len(order.ends) != num_experts:
        raise ValueError(f"rows {tuple(x.shape)} do not fit contiguous weights {tuple(weights.shape)}")
    num_places = len(order.rows)
    out = torch.empty((num_places, outputs), dtype=x.dtype, device=x.device)
    if num_places:
        most = num_places // order.tile_rows + min(num_experts, num_places)
        _grouped_kernel[(triton.cdiv(outputs, _TILE_OUT), most)](
            out, x, weights, order.rows, order.ends, order.tile_ends, num_experts, x.stride(0), SIZE_IN=inputs,
            SIZE_OUT=outputs, GATHERS=gathers, TILE_ROWS=order.tile_rows, TILE_OUT=_TILE_OUT, TILE_IN=_TILE_IN,
            num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out


def add_weighted_triton(
    x: torch.Tensor, places: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """residual + the weighted sum of some rows of x (rows, size), rounded once: (n, size).

    Args:
        places: (n, chosen) int64, rows of x.
        factors: (n, chosen) float32, theirs.
        residual: (n, size); None: 0.
    """
    (n, chosen), size = places.shape, x.shape[1]
    out = torch.empty((n, size), dtype=x.dtype, device=x.device)
    if n:
        tile = min(triton.next_power_of_2(size), 1024)
        added = x if residual is None else residual.contiguous()
        _add_weighted_kernel[(n, triton.cdiv(size, tile))](
            out, x, places, factors.contiguous(), added, SIZE=size, CHOSEN=chosen, TILE=tile,
            ADDS=residual is not None, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out
