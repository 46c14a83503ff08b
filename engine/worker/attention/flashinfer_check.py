"""Decides whether FlashInfer may serve a pool: its known limits, and a small random step against the torch
reference.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import USUAL, Layer, Scores
from pdkv.engine.worker.attention.flashinfer import FlashInferAttention
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.kernels.paged_attention import paged_attention_reference

_HEAD_SIZES = (64, 128, 256)
_TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Tolerance for results of magnitude one, with weights and results rounded to the dtype."""

_REQUESTS = ((0, 70), (37, 1), (150, 40), (0, 1), (299, 1), (5, 3))
"""Requests of the step as (computed, new) tokens: prompts, a continued one, decodes, and more drafts than one."""

_WINDOW = 50
"""The window of some of the step's layers: no multiple of a tile, so that a tile has keys inside and outside of it."""


def make_flashinfer(
    kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer], scores: Scores = USUAL
) -> tuple[FlashInferAttention | None, str]:
    """The backend and FlashInfer's version, or None and the reason. Arguments as in `make_backend`.

    FlashInfer compiles kernels on first use, which takes minutes.
    """
    dtype, head_size = kv_pool.dtype, kv_pool.shape[5]
    if dtype not in _TOLERANCES:
        return None, f"KV is {str(dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if scores.softcap:
        return None, "the model has soft caps in attention"
    if kv_pool.shape[2] == 1:
        return None, "KV is latent rows"
    if head_size not in _HEAD_SIZES:
        return None, f"heads have {head_size} values, not one of {_HEAD_SIZES}"
    try:
        module = importlib.import_module("flashinfer")
        wrong = _find_wrong(module, kv_pool, num_heads, {layer.window is not None for layer in layers})
        if wrong is not None:
            return None, wrong
        backend = FlashInferAttention(kv_pool, num_heads, layers, module, scores)
    except ModuleNotFoundError as error:
        return None, f"{error}"
    except Exception as error:  # third-party code: its compilers, its loader, CUDA
        return None, f"{type(error).__name__}: {error}"
    return backend, f"{getattr(module, '__version__', 'of an unknown version')}"


def _find_wrong(module: Any, kv_pool: torch.Tensor, num_heads: int, have_windows: set[bool]) -> str | None:
    """The error of a step of _REQUESTS over a pool of that kind; None: there is none.

    Everything that no query may see is NaN: tails of blocks, other requests' blocks, keys before a window.
    """
    _, _, _, kv_heads, block_size, head_size = kv_pool.shape
    generator = torch.Generator().manual_seed(0)
    inputs, tables = _make_step(block_size, generator)
    layers = [Layer(0, 1 + i, _WINDOW if has_window else None) for i, has_window in enumerate(sorted(have_windows))]
    pool = torch.full((tables.size + 1, 1 + len(layers), 2, kv_heads, block_size, head_size), torch.nan)
    for _, layer, window, *_ in layers:
        _fill(pool[:, layer], tables[0], window, generator)
    pool = pool.to(kv_pool.device, kv_pool.dtype)
    backend = FlashInferAttention(pool, num_heads, layers, module)
    backend.prepare(inputs, tables, None)
    index = (tables[0], inputs.seq_lens, inputs.cu_seqlens_q)
    block_tables, seq_lens, cu_seqlens_q = (torch.from_numpy(array.astype(np.int32)) for array in index)
    rows, tolerance = num_heads + 2 * kv_heads, _TOLERANCES[pool.dtype]
    for i, (_, layer, window, *_) in enumerate(layers):
        qkv = torch.randn(len(inputs.positions), rows, head_size, generator=generator).to(pool.device, pool.dtype)
        result = backend.attend(i, qkv).view(-1, num_heads, head_size).cpu().float()
        q, scale = qkv[:, :num_heads].cpu().float(), float(head_size**-0.5)
        expected = paged_attention_reference(
            q, pool.cpu().float(), layer, block_tables, seq_lens, cu_seqlens_q, scale, window=window
        )
        if not torch.allclose(result, expected, rtol=tolerance, atol=tolerance):
            error = (result - expected).abs().max().item()
            where = "without a window" if window is None else "with a window"
            return f"a random step {where} is wrong by {error:.2g}, more than {tolerance}"
    return None


def _make_step(block_size: int, generator: torch.Generator) -> tuple[StepInputs, IntArray]:
    """The step of _REQUESTS, and block tables (1, requests, blocks)."""
    computed, new = np.array(_REQUESTS).T
    seq_lens, cu_seqlens_q = computed + new, np.concatenate([[0], new.cumsum()])
    requests = np.arange(len(new))
    max_blocks = -(-int(seq_lens.max()) // block_size)
    tables = torch.randperm(len(new) * max_blocks, generator=generator).view(1, len(new), max_blocks).numpy()
    of_token = requests.repeat(new)
    positions = np.arange(len(of_token)) - cu_seqlens_q[of_token] + computed[of_token]
    inputs = StepInputs(
        slots=requests,
        new_entries=np.arange(tables.size),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        token_ids=np.zeros_like(positions),
        positions=positions,
        block_ids=tables[:, of_token, positions // block_size],
        offsets=positions % block_size,
        num_prompt=seq_lens,
        sampling=requests,
        num_drafts=np.zeros_like(requests),
    )
    return inputs, tables


def _fill(kv: torch.Tensor, tables: IntArray, window: int | None, generator: torch.Generator) -> None:
    """Random K and V (blocks, 2, kv_heads, block_size, head_size) of all computed tokens that a query sees."""
    block_size = kv.shape[3]
    by_token = kv.permute(0, 3, 1, 2, 4)  # (blocks, block_size, 2, kv_heads, head_size)
    for table, (computed, _) in zip(tables, _REQUESTS, strict=True):
        tokens = np.arange(0 if window is None else max(computed - window + 1, 0), computed)
        shape = (len(tokens), *by_token.shape[2:])
        by_token[table[tokens // block_size], tokens % block_size] = torch.randn(shape, generator=generator)
