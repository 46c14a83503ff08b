"""Products of experts in Triton against torch, expert by expert; run by test_triton.py, in a process of its own."""

import pytest
import torch
from kernel_inputs import BFLOAT16_FIRST, randn

from pdkv.models.decoder import GatedMlp
from pdkv.models.experts import TorchExperts, TritonExperts
from pdkv.models.linear import PlainLinear

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", BFLOAT16_FIRST, ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "chosen"), [(1, 5, 2), (70, 3, 2), (9, 40, 1)])
def test_experts_add_what_they_do_one_by_one(
    rows: int, num_experts: int, chosen: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, size = 72, 40
    weights = [[randn(*shape, dtype=dtype, device=device) * 0.1 for _ in range(num_experts)] for shape in
               ((2 * size, hidden), (hidden, size))]  # fmt: skip
    x, residual = (randn(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    scores = randn(rows, num_experts, dtype=torch.float32, device=device)
    scores[:, 0] -= 100.0  # which nobody chooses
    factors, experts = scores.softmax(-1).topk(chosen)
    mlps = [GatedMlp(*map(PlainLinear, pair)) for pair in zip(*weights, strict=True)]
    expected = TorchExperts(mlps).add(x, experts, factors, residual.clone())
    made = TritonExperts(*(torch.stack(each) for each in weights))
    close = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(made.add(x, experts, factors, residual), expected, **close)
    torch.testing.assert_close(made.add(x, experts, factors, None), expected - residual, **close)


def test_weights_that_do_not_fit_are_refused(device: torch.device) -> None:
    made = TritonExperts(*(torch.zeros(2, *shape, device=device) for shape in ((8, 5), (5, 4))))
    with pytest.raises(ValueError, match=r"rows \(1, 6\)"):
        made.add(torch.zeros(1, 6, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device),
                 torch.ones(1, 1, device=device), None)  # fmt: skip
