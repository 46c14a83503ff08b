"""Random tensors for kernels."""

import pytest
import torch

MIXED = [(1, 33), (20, 20), (0, 9), (1, 16), (3, 130), (0, 0), (1, 1), (9, 65)]  # (queries, tokens) of a sequence

FLOAT32_FIRST = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.bfloat16)),
]
"""For the fixture `dtype`, where others differ by roundings alone."""

BFLOAT16_FIRST = [
    torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32)),
]
"""Of kernels that compute in float32 whatever they are given."""


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def attention_inputs(
    lengths: list[tuple[int, int]], heads: tuple[int, int], head_size: int, block_size: int, padding: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, pool (3 layers; float32, every block of it used at most once), block tables, lengths, cu_seqlens_q."""
    generator = torch.Generator().manual_seed(len(lengths))
    num_q = [q for q, _ in lengths]
    max_blocks = max(-(-s // block_size) for _, s in lengths) + 1
    q = torch.randn(sum(num_q) + padding, heads[0], head_size, generator=generator)
    pool = torch.randn(len(lengths) * max_blocks, 3, 2, heads[1], block_size, head_size, generator=generator)
    tables = torch.randperm(len(pool), generator=generator).view(len(lengths), max_blocks).int()
    seq_lens = torch.tensor([s for _, s in lengths], dtype=torch.int32)
    return q, pool, tables, seq_lens, torch.tensor([0, *num_q]).cumsum(0).int()
