"""Attention by the compiled kernels, which read paged KV in place: for single queries, and for prompts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import USUAL, Scores
from pdkv.engine.worker.attention.runs import Prompts, Singles
from pdkv.engine.worker.batch import IntArray
from pdkv.kernels import host, prompts

Work = TypeVar("Work", Singles, Prompts)
Args = TypeVar("Args", host.AttentionArgs, prompts.PromptArgs)


class _Taken(NamedTuple):
    """A kernel's arguments taken from a step's work, by name, with the vectors kept alive."""

    work: object
    vectors: Sequence[IntArray]
    fields: Sequence[tuple[str, int]]


class _Queries(ABC, Generic[Work, Args]):
    """Attention over one pool. Call `prepare` once per step, then `attend` per layer."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, scores: Scores, row_heads: int | None = None) -> None:
        """`kv_pool` as in `KVLayout.pool_shape`, contiguous, of a dtype that the kernel supports. Latent rows are keys
        and values. `row_heads`: of a row of `qkv`; None: queries, keys and values.
        """
        self._pool = kv_pool
        _, num_layers, self._sides, kv_heads, block_size, head_size = kv_pool.shape
        side = kv_heads * block_size * head_size
        self._side_bytes = side * kv_pool.element_size()
        self._block_tables: IntArray = np.empty((0, 0), dtype=np.int64)
        self._taken: dict[int, _Taken] = {}  # of this step, by the identity of its work
        self._args: Args = self._make_args(
            heads=num_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            block_stride=num_layers * self._sides * side,
            row_stride=(row_heads or num_heads + self._sides * kv_heads) * head_size,
            dtype=host.DTYPES[_name(kv_pool.dtype)],
        )
        self._args.scale, self._args.softcap = scores.scale_of(head_size), scores.softcap

    @abstractmethod
    def _make_args(self, **fields: int) -> Args:
        """The kernel's arguments, with these fields."""

    @abstractmethod
    def _vectors(self, work: Work, tables: IntArray) -> Mapping[str, IntArray]:
        """The arrays that the kernel reads of `work`, by name; `tables` (slots of all groups, max_blocks)."""

    def _scalars(self, work: Work) -> Sequence[tuple[str, int]]:
        """The numbers that the kernel reads of `work`, by name."""
        return ()

    @abstractmethod
    def _run(self) -> None:
        """Call the kernel."""

    def prepare(self, block_tables: IntArray) -> None:
        """Take in a step's block tables, (groups, max_num_seqs, max_blocks) int64; `slots` count through all groups."""
        self._block_tables = block_tables.reshape(-1, block_tables.shape[2])
        self._taken.clear()
        self._args.num_threads = torch.get_num_threads()

    def attend(self, layer: int, qkv: torch.Tensor, work: Work, out: torch.Tensor) -> None:
        """Write each query's attention into its row of `out` (rows, heads * head_size).

        Args:
            layer: index in a block.
            qkv: (n, heads + sides * kv_heads, head_size), contiguous.
        """
        args = self._args
        first = self._pool.data_ptr() + self._sides * layer * self._side_bytes
        args.keys, args.values = first, first + (self._sides - 1) * self._side_bytes
        args.qkv, args.out = qkv.data_ptr(), out.data_ptr()
        taken = self._taken.get(id(work)) or self._take(work)
        for name, value in taken.fields:
            setattr(args, name, value)
        args.n = len(work.slots)
        self._run()

    def _take(self, work: Work) -> _Taken:
        named = self._vectors(work, self._block_tables)
        vectors = [np.ascontiguousarray(vector, dtype=np.int64) for vector in named.values()]
        fields = [(name, vector.ctypes.data) for name, vector in zip(named, vectors, strict=True)]
        fields += self._scalars(work)
        taken = self._taken[id(work)] = _Taken(work, vectors, fields)
        return taken


class SingleQueries(_Queries[Singles, host.AttentionArgs]):
    """Attention for tokens of outputs."""

    @classmethod
    def of(cls, kv_pool: torch.Tensor, num_heads: int, scores: Scores = USUAL) -> "SingleQueries | None":
        """The backend for a pool; None if the kernel is missing or does not support the dtype or the sizes."""
        block_size, head_size = kv_pool.shape[4:]
        fits = head_size % 16 == 0 and head_size <= host.MAX_HEAD_SIZE and block_size % 4 == 0
        if not fits or _name(kv_pool.dtype) not in host.DTYPES or not host.available():
            return None
        return cls(kv_pool, num_heads, scores)

    def _make_args(self, **fields: int) -> host.AttentionArgs:
        return host.AttentionArgs(**fields)

    def _vectors(self, work: Singles, tables: IntArray) -> Mapping[str, IntArray]:
        return {
            "q_rows": work.qkv_rows,
            "out_rows": work.out_rows,
            "seq_lens": work.seq_lens,
            "hidden": work.hidden,
            "first_blocks": work.slots * tables.shape[1] + work.first_blocks,
            "block_tables": tables,
        }

    def _run(self) -> None:
        host.attend(self._args)


class PromptQueries(_Queries[Prompts, prompts.PromptArgs]):
    """Attention for tokens of prompts."""

    @classmethod
    def of(
        cls, kv_pool: torch.Tensor, num_heads: int, scores: Scores = USUAL, *, row_heads: int | None = None
    ) -> "PromptQueries | None":
        """The backend for a pool; None if the kernel is missing or does not support the dtype or the sizes."""
        kv_heads, _, head_size = kv_pool.shape[3:]
        fits = prompts.takes(kv_pool.dtype, num_heads, kv_heads, head_size)
        return cls(kv_pool, num_heads, scores, row_heads) if fits else None

    def _make_args(self, **fields: int) -> prompts.PromptArgs:
        return prompts.PromptArgs(**fields)

    def _vectors(self, work: Prompts, tables: IntArray) -> Mapping[str, IntArray]:
        return {
            "q_rows": work.qkv_rows,
            "out_rows": work.out_rows,
            "positions": work.positions,
            "counts": work.counts,
            "tables": work.slots * tables.shape[1],
            "block_tables": tables,
        }

    def _scalars(self, work: Prompts) -> Sequence[tuple[str, int]]:
        return [("window", work.window)]

    def _run(self) -> None:
        prompts.attend_prompts(self._args)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
