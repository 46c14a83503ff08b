"""Attention of single queries by the compiled kernel: paged KV is read where it lies."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdkv.engine.attention.tiles import Singles
from pdkv.engine.batch import IntArray
from pdkv.kernels import host


class _Taken(NamedTuple):
    """What the kernel reads of Singles; the vectors are kept alive for it."""

    singles: Singles
    vectors: Sequence[IntArray]
    pointers: Sequence[int]


class SingleQueries:
    """Over one pool. `prepare` once per step, then `attend` per layer."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int) -> None:
        """`kv_pool` as in `pool_shape`, contiguous, of a dtype that the kernel takes."""
        self._pool = kv_pool
        _, num_layers, _, kv_heads, block_size, head_size = kv_pool.shape
        side = kv_heads * block_size * head_size
        self._side_bytes = side * kv_pool.element_size()
        self._block_tables: IntArray = np.empty((0, 0), dtype=np.int64)
        self._taken: dict[int, _Taken] = {}  # of this step, by the identity of their Singles
        self._args = host.AttentionArgs(
            heads=num_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            block_stride=num_layers * 2 * side,
            row_stride=(num_heads + 2 * kv_heads) * head_size,
            dtype=host.DTYPES[_name(kv_pool.dtype)],
            scale=head_size**-0.5,
        )

    @classmethod
    def of(cls, kv_pool: torch.Tensor, num_heads: int) -> "SingleQueries | None":
        """None where the kernel is not there or does not take the dtype or the sizes."""
        block_size, head_size = kv_pool.shape[4:]
        fits = head_size % 16 == 0 and head_size <= host.MAX_HEAD_SIZE and block_size % 4 == 0
        if not fits or _name(kv_pool.dtype) not in host.DTYPES or not host.available():
            return None
        return cls(kv_pool, num_heads)

    def prepare(self, block_tables: IntArray) -> None:
        """Take in a step's block tables, (groups, max_num_seqs, max_blocks) int64; `slots` count through all groups."""
        self._block_tables = block_tables.reshape(-1, block_tables.shape[2])
        self._taken.clear()
        self._args.num_threads = torch.get_num_threads()

    def attend(self, layer: int, qkv: torch.Tensor, singles: Singles, out: torch.Tensor) -> None:
        """Write each query's attention into its row of `out` (rows, heads * head_size).

        Args:
            layer: index in a block.
            qkv: (n, heads + 2 * kv_heads, head_size), contiguous.
        """
        args = self._args
        first = self._pool.data_ptr() + 2 * layer * self._side_bytes
        args.keys, args.values = first, first + self._side_bytes
        args.qkv, args.out = qkv.data_ptr(), out.data_ptr()
        taken = self._taken.get(id(singles)) or self._take(singles)
        args.q_rows, args.out_rows, args.seq_lens, args.hidden, args.first_blocks, args.block_tables = taken.pointers
        args.n = len(singles.slots)
        host.attend(args)

    def _take(self, singles: Singles) -> "_Taken":
        tables = self._block_tables
        first_blocks = singles.slots * tables.shape[1] + singles.first_blocks
        columns = (singles.qkv_rows, singles.out_rows, singles.seq_lens, singles.hidden, first_blocks, tables)
        vectors = [np.ascontiguousarray(column, dtype=np.int64) for column in columns]
        taken = self._taken[id(singles)] = _Taken(singles, vectors, [vector.ctypes.data for vector in vectors])
        return taken


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
