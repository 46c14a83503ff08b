"""Passes over a step's rows, as the kernels' benchmark times them beside the device's copy."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

_SCALE = 0.25  # of the rows: so their rounding is small, too


class Pass(NamedTuple):
    """One kernel on rows of its own."""

    name: str
    shape: str
    num_bytes: int  # that it has to read and to write
    call: Callable[[], torch.Tensor]  # the first gives `expected`
    expected: torch.Tensor  # in float64


def make_passes(
    num_rows: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device, block_size: int
) -> Iterator[Pass]:
    """The passes of a model as wide as its heads, with an MLP 3.5 times as wide."""

    def rows(size: int) -> torch.Tensor:
        return (torch.randn(num_rows, size, device=device) * _SCALE).to(dtype)

    yield _norm(rows(heads * head_size))
    yield _gate(rows(7 * heads * head_size))
    yield _heads(rows((heads + 2 * kv_heads) * head_size).view(num_rows, -1, head_size), heads, kv_heads, block_size)


def _norm(x: torch.Tensor) -> Pass:
    from pdkv.kernels.passes_triton import rms_norm_triton

    weight = torch.full_like(x[0], _SCALE)
    expected = torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    return Pass("rms_norm", _shape(x), 2 * x.nbytes, lambda: rms_norm_triton(x, weight, 1e-5), expected)


def _gate(x: torch.Tensor) -> Pass:
    from pdkv.kernels.passes_triton import gated_triton

    gate, up = x.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    return Pass("silu_mul", _shape(x), x.nbytes * 3 // 2, lambda: gated_triton(x), expected)


def _heads(qkv: torch.Tensor, heads: int, kv_heads: int, block_size: int) -> Pass:
    """Queries in place, so that each call rotates on; keys and values into the blocks of a pool, which are checked."""
    from pdkv.kernels.kv_copy import PagedSlots
    from pdkv.kernels.passes_triton import pass_heads_triton
    from pdkv.models.rope import RopeTable, rotate

    num_rows, _, head_size = qkv.shape
    angles = torch.rand(num_rows, 1, head_size // 2, device=qkv.device) * 6.3
    cos, sin = angles.cos(), angles.sin()
    table = RopeTable(torch.cat((cos, cos), -1).to(qkv.dtype), torch.cat((-sin, sin), -1).to(qkv.dtype))
    positions = torch.randperm(num_rows, device=qkv.device)
    expected = qkv.double()
    rotate(expected[:, : heads + kv_heads], RopeTable(*(part.double() for part in table)).at(positions))
    pool = qkv.new_zeros(-(-num_rows // block_size), 1, 2, kv_heads, block_size, head_size)
    written = pool[:, 0].permute(0, 3, 1, 2, 4)[:, :num_rows]
    slots = PagedSlots(pool, 0, torch.arange(num_rows, device=qkv.device))

    def call() -> torch.Tensor:
        pass_heads_triton(qkv, positions, *table, heads, kv_heads, None, slots)
        return written

    num_bytes = 2 * qkv.nbytes + table.cos.nbytes + table.sin.nbytes
    return Pass("pass_heads", _shape(qkv), num_bytes, call, expected[:, heads:].reshape(written.shape))


def _shape(x: torch.Tensor) -> str:
    return " x ".join(map(str, x.shape))
