"""A step over requests with random KV in a pool of their own: to run on an attention backend, and in float64."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.engine.worker.attention.backend import AttentionBackend, Layer
from pdkv.engine.worker.attention.cpu import CpuAttention, TorchQueries
from pdkv.engine.worker.batch import PersistentBatch, StepInputs
from pdkv.models.latent_heads import LatentHeads
from pdkv.sampling.params import SamplingParams

MIXES = [
    [(0, 1)],
    [(0, 16), (0, 17), (0, 15)],
    [(0, 300)],
    [(0, 200), (37, 1), (0, 3), (150, 140), (16, 1), (15, 1)],
    [(length, 1) for length in (0, 1, 15, 16, 17, 31, 32, 33, 500, 501, 900)],
    [(length % 7, 1 + length % 5) for length in range(40)],
]
"""Steps as (computed, scheduled) of each request."""


class Shape(NamedTuple):
    """What a pool and the queries on it look like."""

    heads: int = 6
    kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    layers: int = 2


class Case:
    """Requests given as (computed, scheduled), with random K and V already in the pool; five blocks are nobody's.

    A single scheduled token is one of an output.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        shape: Shape | None = None,
    ) -> None:
        shape = self.shape = shape or Shape()
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-(computed + count) // shape.block_size) for computed, count in requests]
        ids = torch.randperm(sum(blocks) + 5, generator=generator).tolist()
        sizes = (len(ids), shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_size)
        self.pool = torch.randn(sizes, generator=generator).to(dtype)
        self.requests = requests
        self.batch = PersistentBatch(len(requests), 4096, shape.block_size)
        for i, ((computed, count), num_blocks) in enumerate(zip(requests, blocks, strict=True)):
            own = [ids.pop() for _ in range(num_blocks)]
            prompt, output = ([0] * computed, [0]) if count == 1 else ([0] * (computed + count), [])
            self.batch.add(NewRequest((str(i), 0), 0, prompt, output, SamplingParams(), [own]))
        self.inputs: StepInputs = self.batch.prepare(
            [ScheduledRequest((str(i), 0), c, n, [], True) for i, (c, n) in enumerate(requests)]
        )
        total = len(self.inputs.positions)
        rows = shape.heads + 2 * shape.kv_heads
        self.qkv = torch.randn(total, rows, shape.head_size, generator=generator).to(dtype)
        self.last_rows = self.inputs.cu_seqlens_q[1:] - 1
        self.layers = layers_of([None] * shape.layers)  # without windows

    def blocks(self, request: int) -> list[int]:
        """The request's blocks, in order."""
        computed, count = self.requests[request]
        num_blocks = -(-(computed + count) // self.shape.block_size)
        return [int(block) for block in self.batch.block_tables[0, request, :num_blocks]]

    def rows(self, request: int) -> slice:
        """The request's tokens in the step."""
        return slice(int(self.inputs.cu_seqlens_q[request]), int(self.inputs.cu_seqlens_q[request + 1]))

    def fill_foreign(self, value: float) -> None:
        """Put `value` wherever no request has computed KV: tails, places that this step writes, nobody's blocks."""
        foreign = torch.ones(self.pool.shape[0], self.shape.block_size, dtype=torch.bool)
        for i, (computed, _) in enumerate(self.requests):
            for j, block in enumerate(self.blocks(i)):
                foreign[block, : max(0, computed - j * self.shape.block_size)] = False
        self.pool.permute(0, 4, 1, 2, 3, 5)[foreign] = value

    def poison(self, request: int, value: float) -> None:
        """Put `value` into all that the request owns: its KV, and its rows of the step."""
        self.pool[self.blocks(request)] = value
        self.qkv[self.rows(request)] = value

    def to(self, device: torch.device) -> "Case":
        """The same step on another device."""
        self.pool, self.qkv = self.pool.to(device), self.qkv.to(device)
        return self

    def run(
        self, backend: AttentionBackend, layer: int, heads: LatentHeads | None = None, *, last_only: bool = False
    ) -> torch.Tensor:
        """(tokens, heads * head_size) of the backend; its padding rows are NaN on the way in."""
        backend.prepare(self.inputs, self.batch.block_tables, self.last_rows if last_only else None)
        wanted = len(self.last_rows) if last_only else len(self.qkv)
        padding = self.qkv.new_full((backend.padded(len(self.qkv)) - len(self.qkv), *self.qkv.shape[1:]), float("nan"))
        out = backend.attend(layer, torch.cat((self.qkv, padding)), heads)
        assert len(out) == backend.padded(wanted)
        return out[:wanted]

    def expected(self, layer: int, window: int | None = None) -> torch.Tensor:
        """In float64, request by request, with the step's own K and V taken from qkv."""
        heads, kv_heads, head_size = self.shape.heads, self.shape.kv_heads, self.shape.head_size
        out = []
        for i, (computed, count) in enumerate(self.requests):
            kv = self.pool[self.blocks(i), layer].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :computed]
            own = self.qkv[self.rows(i)].double().transpose(0, 1)
            fresh = own[heads:].view(2, kv_heads, count, head_size)
            k, v = torch.cat((kv, fresh), dim=2).repeat_interleave(heads // kv_heads, dim=1)
            visible = torch.ones(count, computed + count, device=k.device).tril(computed).bool()
            if window is not None:
                visible = visible.triu(computed - window + 1)
            attended = torch.nn.functional.scaled_dot_product_attention(own[:heads], k, v, attn_mask=visible)
            out.append(attended.transpose(0, 1).flatten(1))
        return torch.cat(out)


def latent_case(requests: Sequence[tuple[int, int]]) -> tuple[Case, LatentHeads, torch.Tensor]:
    """A step over latent rows of 32 + 16 numbers, one layer's queries, and the result (tokens, heads * 20) in float64
    where all of them are brought to the latents.
    """
    case = Case(requests, shape=Shape(6, 1, 48, layers=1))
    case.pool, case.qkv = case.pool[:, :, :1].contiguous(), case.qkv[:, :7].contiguous()
    case.layers = [Layer(0, 0, value_size=32)]
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(shape, generator=generator) for shape in ((len(case.qkv), 6, 24), (6, 8, 32), (6, 32, 20))
    )
    case.qkv[:, :6, 32:] = queries[..., 8:]
    exact = LatentHeads(queries.double(), keys.double(), values.double())
    rows = case.qkv.double()
    exact.absorb(rows, slice(None))
    backend = without_compiled_kernel(case.pool.double(), 6, case.layers)
    backend.prepare(case.inputs, case.batch.block_tables, None)
    return case, LatentHeads(queries, keys, values), exact.results(backend.attend(0, rows)[: len(rows)].view(-1, 6, 32))


def layers_of(windows: Sequence[int | None]) -> list[Layer]:
    """One KV group's layers with these windows."""
    return [Layer(0, index, window) for index, window in enumerate(windows)]


def without_compiled_kernel(kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer]) -> CpuAttention:
    """The CPU backend of a machine without a compiler."""
    backend = CpuAttention(kv_pool, num_heads, layers)
    backend._singles = backend._prompts = TorchQueries(kv_pool, num_heads)
    return backend
