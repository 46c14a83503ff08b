"""The attention of devices over Triton, beside attention written out and float64; run by test_triton.py,
in a process of their own.
"""

import math

import pytest
import torch
from attention_case import MIXES, Case, Shape, latent_case, layers_of
from kernel_inputs import attention_inputs, randn

from pdkv.engine.worker.attention import cuda
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.engine.worker.attention.plain_latents import expand
from pdkv.kernels.kv_copy import FP8, write_kv_reference
from pdkv.kernels.kv_copy_triton import write_kv_triton
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.kernels.paged_attention_triton import paged_attention_triton


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("mix", [MIXES[0], [(0, 40), (37, 1), (0, 3), (30, 20), (15, 1)], MIXES[5][:9]], ids=len)
@pytest.mark.parametrize("shape", [Shape(), pytest.param(Shape(4, 4, 80, 48), marks=pytest.mark.slow)], ids=str)
def test_the_backend_equals_attention_written_out(
    mix: list[tuple[int, int]], shape: Shape, device: torch.device
) -> None:
    case = Case(mix, shape=shape).to(device)
    windows = [None, 20]
    expected = [case.expected(layer, windows[layer]) for layer in range(shape.layers)]
    backend = CudaAttention(case.pool, shape.heads, layers_of(windows))
    for layer in range(shape.layers):
        torch.testing.assert_close(case.run(backend, layer).double(), expected[layer], rtol=1e-5, atol=1e-5)
    some = case.run(backend, shape.layers - 1, last_only=True)
    torch.testing.assert_close(some.double(), expected[-1][case.last_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("few", [False, True])
def test_prompts_over_latent_rows_by_keys_and_values_of_their_own(
    few: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind outputs; a short prompt beside a long context keeps all of a step at the latents."""
    expanded = []
    monkeypatch.setattr(cuda, "expand", lambda heads, rows: expanded.append(len(rows)) or expand(heads, rows))
    case, heads, expected = latent_case([(37, 1), (15, 1), (0, 40), (90, 9) if few else (30, 40)])
    backend = CudaAttention(case.to(device).pool, 6, case.layers)
    found = case.run(backend, 0, heads._make(each.to(device) for each in heads))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert expanded == ([] if few else [2 * 5])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy remarks on what the neighbour computes
@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize(
    "poison",
    [
        math.nan,
        torch.finfo(torch.float32).max,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (math.inf, -math.inf)),
    ],
)
def test_the_backend_reads_only_what_a_request_owns(poison: float, device: torch.device) -> None:
    """Poison in tails, in nobody's blocks and in a neighbour: the others get what they get beside nothing odd."""
    mix = [(0, 20), (37, 1), (0, 3), (40, 10), (15, 1)]
    clean, poisoned = Case(mix).to(device), Case(mix).to(device)
    poisoned.fill_foreign(poison)
    poisoned.poison(3, poison)
    others = torch.ones(len(clean.qkv), dtype=torch.bool)
    others[clean.rows(3)] = False
    results = [
        case.run(CudaAttention(case.pool, case.shape.heads, case.layers), 0)[others] for case in (clean, poisoned)
    ]
    assert torch.equal(*results)


STEP = [(35, 65), (1, 130), (0, 9), (1, 16), (3, 100), (20, 20), (1, 1)]
"""(Queries, tokens): prompts with and without cached context, decodes, and a sequence that waits."""


@pytest.mark.parametrize(
    ("stored", "heads", "head_size", "block_size", "window"),
    [
        *(
            pytest.param(torch.bfloat16, *shape, marks=pytest.mark.slow)
            for shape in (((4, 4), 64, 16, None), ((4, 1), 128, 32, 40), ((8, 2), 128, 32, 40))
        ),
        pytest.param(FP8, (4, 2), 128, 16, 40, marks=pytest.mark.slow),
        (FP8, (4, 1), 32, 16, 40),
    ],
    ids=str,
)
def test_a_step_in_bfloat16_errs_by_its_roundings_alone(
    stored: torch.dtype,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> None:
    """K and V are written, then attended to, beside float64.

    FP8 keeps 3 bits behind the first: 2**-4 of a number, half of 2**-9 of what is subnormal, both times the scale.
    Attention rounds the weights and the result to bfloat16, 2**-8 of each; 2**-16 is left to sums in float32.
    """
    scales = (0.02, 0.5) if stored == FP8 else (1.0, 1.0)
    q, blank, tables, *lengths = (t.to(device) for t in attention_inputs(STEP, heads, head_size, block_size, 3))
    pool = torch.zeros_like(blank).to(stored)
    size = int(lengths[0].sum())
    keys, values = randn(2, size + 2, heads[1], head_size, dtype=torch.bfloat16, device=device)
    slots = [
        int(row[p // block_size]) * block_size + p % block_size
        for row, n in zip(tables, lengths[0].tolist(), strict=True)
        for p in range(n)
    ]
    slot_mapping = torch.tensor([*slots, -1, -1], device=device)
    write_kv_triton(pool, 1, keys, values, slot_mapping, scales)
    written = pool.double() * torch.tensor(scales, device=device)[:, None, None, None]
    whole = torch.zeros_like(blank).double()
    write_kv_reference(whole, 1, keys.double(), values.double(), slot_mapping)
    rounding, least = (2**-4, 2**-10) if stored == FP8 else (0.0, 0.0)
    least_of_sides = least * torch.tensor(scales, device=device)[:, None, None, None]
    assert ((written - whole).abs() <= rounding * whole.abs() + least_of_sides * (whole != 0)).all()

    q = q.bfloat16()
    index = (1, tables, *lengths, head_size**-0.5)
    result = paged_attention_triton(q, pool, *index, window=window, kv_scales=scales).double()
    expected = paged_attention_reference(q.double(), written, *index, window=window)
    written[:, 1, 1] = written[:, 1, 1].abs()
    size_of_terms = paged_attention_reference(q.double(), written, *index, window=window)
    assert ((result - expected).abs() <= (2**-8 + 2**-16) * (size_of_terms + expected.abs())).all()
    assert not result[len(q) - 3 :].any()
