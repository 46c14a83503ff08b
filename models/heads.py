"""Processes queries and keys between their projection and attention: norms them if the model does, and rotates them.

Done by torch, or by a kernel on CUDA or a compiled pass, which also write keys and values to the cache.
"""

from typing import NamedTuple, Protocol

import torch

from pdkv.kernels.kv_copy import PagedSlots
from pdkv.kernels.passes import HeadPassArgs, dtype_number, pass_heads
from pdkv.models.linear import LinearKind
from pdkv.models.passes import RMSNorm, by_triton
from pdkv.models.rope import RopeTable, rotate


class KVSlots(NamedTuple):
    """Where to write the KV of a step's first tokens in one layer; checked to be within bounds."""

    kv: torch.Tensor  # (num_blocks, block_size, 2 * kv_heads, head_size), a view of the layer's part of the pool
    block_ids: torch.Tensor  # (n,) int64
    offsets: torch.Tensor  # (n,) int64, within the block

    def put(self, kv: torch.Tensor) -> None:
        """Write the keys and values of the first tokens of `kv` (at least n, 2 * kv_heads, head_size)."""
        self.kv.index_put_((self.block_ids, self.offsets), kv[: len(self.block_ids)])


Slots = KVSlots | PagedSlots
"""Where a step writes its KV: in host memory, or on a device, with padding."""


class Heads(Protocol):
    """One layer's pass over a step's (n, heads + 2 * kv_heads, head_size) queries, keys and values."""

    def apply(self, qkv: torch.Tensor) -> None:
        """Norm and rotate queries and keys in place. Without norms, `qkv` may be a part of each vector's numbers."""

    def apply_and_write(self, qkv: torch.Tensor, slots: Slots) -> None:
        """As `apply`, and write keys and values to their slots; keys need not be in `qkv` then."""


class Rotation(Protocol):
    """The part of rotation that all layers share."""

    def at(self, positions: torch.Tensor) -> "StepRotation":
        """The rotation of tokens at `positions` (n,), each below the table's length."""


class StepRotation(Protocol):
    """The part of rotation that all layers share in one step."""

    def of(self, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Heads:
        """One layer's `Heads`, valid until the next layer's is requested."""


class TorchRotation:
    """Rotates positions by torch, on any device."""

    def __init__(self, table: RopeTable, num_heads: int, num_kv_heads: int) -> None:
        self.table = table
        self._sizes = num_heads, num_kv_heads

    def at(self, positions: torch.Tensor) -> StepRotation:
        return _TorchHeads(self.table.at(positions), *self._sizes)


class _TorchHeads(NamedTuple):
    rope: RopeTable
    heads: int
    kv_heads: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def of(self, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Heads:
        return self if q_norm is k_norm is None else self._replace(q_norm=q_norm, k_norm=k_norm)

    def apply(self, qkv: torch.Tensor) -> None:
        heads, rotated = self.heads, self.heads + self.kv_heads
        if self.q_norm is not None:
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
        if self.k_norm is not None:
            qkv[:, heads:rotated] = self.k_norm(qkv[:, heads:rotated])
        rotate(qkv[:, :rotated], self.rope)

    def apply_and_write(self, qkv: torch.Tensor, slots: Slots) -> None:
        self.apply(qkv)
        slots.put(qkv[:, self.heads :])


class TritonRotation(TorchRotation):
    """By one kernel, on CUDA; rounds at the same places as torch."""

    def at(self, positions: torch.Tensor) -> StepRotation:
        return _TritonHeads(self.table, positions, *self._sizes)


class _TritonHeads(NamedTuple):
    table: RopeTable
    positions: torch.Tensor
    heads: int
    kv_heads: int
    norms: tuple[torch.Tensor, float, torch.Tensor, float] | None = None

    def of(self, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Heads:
        if q_norm is None or k_norm is None:
            assert q_norm is k_norm, "norms of queries alone, or of keys alone"
            return self
        return self._replace(norms=(q_norm.weight, q_norm.fused.epsilon, k_norm.weight, k_norm.fused.epsilon))

    def apply(self, qkv: torch.Tensor) -> None:
        self._run(qkv, None)

    def apply_and_write(self, qkv: torch.Tensor, slots: Slots) -> None:
        assert isinstance(slots, PagedSlots), "slots in host memory"
        self._run(qkv, slots)

    def _run(self, qkv: torch.Tensor, slots: PagedSlots | None) -> None:
        from pdkv.kernels.passes_triton import pass_heads_triton  # Triton, which a CPU need not have

        pass_heads_triton(qkv, self.positions, *self.table, self.heads, self.kv_heads, self.norms, slots)


class CompiledRotation:
    """By the compiled pass, in host memory; rounds at the same places as torch."""

    def __init__(self, table: RopeTable, num_heads: int, num_kv_heads: int) -> None:
        assert table.cos.is_contiguous()
        assert table.sin.is_contiguous()
        self.table = table
        self._fields = {
            "cosines": table.cos.data_ptr(),
            "sines": table.sin.data_ptr(),
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "rotary_size": table.cos.shape[-1],
            "dtype": dtype_number(table.cos.dtype),
        }

    def at(self, positions: torch.Tensor) -> "_CompiledHeads":
        assert (positions.dtype, positions.stride()) == (torch.int64, (1,)), positions.dtype
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.table.cos):
            raise IndexError(f"a position is not in [0, {len(self.table.cos)}), the table of rotations")
        threads = torch.get_num_threads()
        args = HeadPassArgs(positions=positions.data_ptr(), rows=len(positions), num_threads=threads, **self._fields)
        return _CompiledHeads(args, positions, self.table)


class _CompiledHeads:
    """Holds what its arguments point at."""

    def __init__(self, args: HeadPassArgs, positions: torch.Tensor, table: RopeTable) -> None:
        self._args = args
        self._positions = positions
        self.table = table
        self._norms: tuple[RMSNorm | None, RMSNorm | None] = (None, None)

    def of(self, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Heads:
        if (q_norm, k_norm) != self._norms:
            args, self._norms = self._args, (q_norm, k_norm)
            args.q_norm, args.q_epsilon = _pointer(q_norm)
            args.k_norm, args.k_epsilon = _pointer(k_norm)
        return self

    def apply(self, qkv: torch.Tensor) -> None:
        self._args.written = 0
        self._run(qkv)

    def apply_and_write(self, qkv: torch.Tensor, slots: Slots) -> None:
        if isinstance(slots, PagedSlots):  # of a pool in FP8
            self.apply(qkv)
            slots.put(qkv[:, self._args.heads :])
            return
        args, kv = self._args, slots.kv
        written = slots.block_ids.shape[0]
        assert written <= qkv.shape[0]
        args.kv, args.block_size, args.block_stride = kv.data_ptr(), kv.shape[1], kv.stride(0)
        args.block_ids, args.offsets = slots.block_ids.data_ptr(), slots.offsets.data_ptr()
        args.written = written
        self._run(qkv)

    def _run(self, qkv: torch.Tensor) -> None:
        size = qkv.stride(1)  # more than the shape's where it is a part
        expected = (self._args.rows, qkv.shape[1] * size, 1)
        assert (qkv.shape[0], qkv.stride(0), qkv.stride(2)) == expected, (qkv.shape, qkv.stride())
        args = self._args
        args.qkv, args.head_size = qkv.data_ptr(), size
        pass_heads(args)


def _pointer(norm: RMSNorm | None) -> tuple[int | None, float]:
    """A norm's weight address, and its epsilon."""
    return (None, 0.0) if norm is None else (norm.fused.address, norm.fused.epsilon)


def make_rotation(table: RopeTable, num_heads: int, num_kv_heads: int, kind: LinearKind) -> Rotation:
    """The rotation that matches linear layers of that kind."""
    if kind == "compiled":
        return CompiledRotation(table, num_heads, num_kv_heads)
    return (TritonRotation if by_triton(table.cos) else TorchRotation)(table, num_heads, num_kv_heads)
