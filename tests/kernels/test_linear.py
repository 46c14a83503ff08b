"""The compiled linear layers against torch in float64: every kernel, odd sizes, what lies beside what they may read."""

from itertools import product

import pytest
import torch
import warm
from isas import kernels_of
from rows import check_each

from pdkv.kernels.compiled import levels
from pdkv.kernels.linear import BLOCK_ROWS, GATED, EightBits, PackedExperts, PackedWeight, available, pack

pytestmark = pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [
    pytest.param(F32, F32, id="float32"),
    pytest.param(F32, BF16, id="widened"),
    pytest.param(BF16, BF16, id="bfloat16"),
    pytest.param(F32, (torch.int8, 0), id="int8"),
    pytest.param(BF16, (torch.int8, 128), id="int8 in groups, bfloat16"),
    pytest.param(F32, (torch.float8_e4m3fn, 64), id="fp8 in groups"),
    pytest.param(BF16, (torch.float8_e4m3fn, 0), id="fp8, bfloat16"),
]
WeightKind = torch.dtype | tuple[torch.dtype, int]
"""A dtype; of 8 bits with the size of a group, 0: all inputs."""
SIZES = [(1, 1), (31, 15), (32, 16), (33, 33), (100, 1000), (257, 31)]  # outputs, inputs
ROWS = [1, 2, 3, 5, 6, 7, 13, 14, 15, 29, 67]


def make(shape: tuple[int, ...], dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_weight(shape: tuple[int, int], kind: WeightKind) -> torch.Tensor | EightBits:
    if isinstance(kind, torch.dtype):
        return make(shape, kind)
    numbers, group = make(shape), kind[1] or shape[1]
    numbers = (numbers * 40).round().clamp(-127, 127) if kind[0] == torch.int8 else numbers
    scales = make((shape[0], -(-shape[1] // group))).abs() + 0.1
    return EightBits(numbers.to(kind[0]), scales, group)


def dense(weight: torch.Tensor | EightBits) -> torch.Tensor:
    return weight.dense() if isinstance(weight, EightBits) else weight


def check(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor) -> None:
    """Within the rounding of a chain of additions in float32, and of one to the dtype of the output."""
    exact = x.double() @ weight.double().T + sum(a.double() for a in added)
    size = x.double().abs() @ weight.double().abs().T + sum(a.double().abs() for a in added)
    allowed = size * (x.shape[1] + 4) * 2.0**-24 + (exact.abs() * 2.0**-8 if out.dtype == BF16 else 0.0)
    assert bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_every_size_is_within_rounding(isa: str, dtype: torch.dtype, weight_dtype: WeightKind) -> None:
    check_each(SIZES, lambda size: check_size(dtype, weight_dtype, *size))


def check_size(dtype: torch.dtype, weight_dtype: WeightKind, outputs: int, inputs: int) -> None:
    numbers, bias = make_weight((outputs, inputs), weight_dtype), make((outputs,), dtype)
    plain = PackedWeight(numbers, None, dtype)
    biased = PackedWeight(numbers, bias, dtype)
    weight = dense(numbers)
    for rows in ROWS:
        x, residual = make((rows, inputs), dtype), make((rows, outputs), dtype)
        out, more = plain.multiply(x, None, 1), biased.multiply(x, residual, 1)
        check(out, x, weight)
        check(more, x, weight, bias, residual)
        for threads in (2, 5):
            assert torch.equal(plain.multiply(x, None, threads), out)
            assert torch.equal(biased.multiply(x, residual, threads), more)


def test_a_weight_is_laid_out_on_all_cpus_of_a_process_whose_steps_have_one_thread() -> None:
    count = "len(os.listdir('/proc/self/task'))"
    code = f"""import os, torch; torch.set_num_threads(1); from pdkv.kernels.linear import pack; before = {count}
pack([torch.zeros(640, 64)]); print({count} - before, len(os.sched_getaffinity(0)) - 1)"""
    added, expected = warm.run([*warm.PYTHON, "-c", code]).stdout.split()
    assert added == expected


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(
    isa: str, dtype: torch.dtype, weight_dtype: WeightKind
) -> None:
    weight = PackedWeight(make_weight((70, 300), weight_dtype), make((70,)), dtype)
    x, residual = make((BLOCK_ROWS + 21, 300), dtype), make((BLOCK_ROWS + 21, 70), dtype)
    alone = torch.cat([weight.multiply(x[i : i + 1], residual[i : i + 1], 1) for i in range(len(x))])
    for rows in (*range(2, 15), 16, 29, 67, BLOCK_ROWS, BLOCK_ROWS + 1, len(x)):
        threads = 1 + rows % 3
        assert torch.equal(weight.multiply(x[:rows], residual[:rows], threads), alone[:rows])
        assert torch.equal(weight.multiply(x[-rows:], residual[-rows:], threads), alone[-rows:])


def test_float32_has_the_same_bits_at_every_level_and_with_widened_weights() -> None:
    narrow, x = make((70, 300), BF16), make((29, 300))
    outs = [PackedWeight(weight, None, F32).multiply(x, None, 2) for weight in (narrow, narrow.float())]
    eights = [make_weight((70, 300), (kind, 64)) for kind in (torch.int8, torch.float8_e4m3fn)]
    outs += [PackedWeight(weight, None, F32).multiply(x, None, 2) for weight in eights]
    for isa in levels():
        with kernels_of(isa):
            same = [PackedWeight(w, None, F32).multiply(x, None, 2) for w in (narrow, narrow.float(), *eights)]
        assert torch.equal(*same[:2])
        assert isa == "v2" or all(map(torch.equal, same, outs))  # v2 rounds products and sums apart


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_nothing_beside_the_operands_is_read_or_written(isa: str, dtype: torch.dtype, weight_dtype: WeightKind) -> None:
    """Inputs and residual are unaligned columns of larger tensors full of NaN or infinity; so was the scratch."""
    outputs, inputs = 45, 37
    weight = PackedWeight(make_weight((outputs, inputs), weight_dtype), None, dtype)

    def check_rows(row: tuple[float, int]) -> None:
        poison, rows = row
        weight.multiply(torch.full((100, inputs), poison, dtype=dtype), None, 2)
        x, residual = make((rows, inputs), dtype), make((rows, outputs), dtype)
        inside = []
        for part in (x, residual):
            whole = torch.full((rows + 2, part.shape[1] + 7), poison, dtype=dtype)
            whole[1:-1, 3 : 3 + part.shape[1]] = part
            inside.append(whole[1:-1, 3 : 3 + part.shape[1]])
        before = inside[1].clone()
        out = weight.multiply(*inside, 2)
        assert torch.equal(out, weight.multiply(x, residual, 1))
        assert bool(out.isfinite().all())
        assert torch.equal(inside[1], before)

    check_each(product([float("nan"), float("inf")], [1, 3, 20]), check_rows)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype, weight_dtype: WeightKind) -> None:
    numbers = make_weight((40, 64), weight_dtype)
    layer, weight = PackedWeight(numbers, None, dtype), dense(numbers)
    x = make((15, 64), dtype)
    clean = layer.multiply(x, None, 1)
    x[4, 63], x[9, 0] = float("nan"), float("inf")
    out = layer.multiply(x, None, 1)
    rest = [i for i in range(15) if i not in (4, 9)]
    assert torch.equal(out[rest], clean[rest])
    assert bool(out[4].isnan().all())
    torch.testing.assert_close(out[9], (weight[:, 0] * float("inf")).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_rows_of_any_strides_and_none_at_all(isa: str) -> None:
    weight = PackedWeight(make((40, 64)), None, F32)
    x, residual = make((64, 20)).T, make((40, 20)).T
    expected = weight.multiply(x.contiguous(), residual.contiguous(), 1)
    assert torch.equal(weight.multiply(x, residual, 2), expected)
    assert torch.equal(weight.multiply(x[:1].expand(20, -1), None, 1), weight.multiply(x[:1], None, 1).expand(20, -1))
    assert weight.multiply(x[:0], None, 2).shape == (0, 40)


def test_operands_that_do_not_fit_are_refused() -> None:
    weight = PackedWeight(make((40, 64)), None, F32)
    with pytest.raises(AssertionError):
        weight.multiply(make((2, 65)), None, 1)
    with pytest.raises(AssertionError):
        weight.multiply(make((2, 64), BF16), None, 1)
    with pytest.raises(AssertionError):
        weight.multiply(make((2, 64)), make((2, 39)), 1)


@pytest.mark.parametrize(("dtype", "in_pair"), [(F32, 1), (BF16, 2)])
def test_packed_weights_are_panels_of_32_outputs_by_input(dtype: torch.dtype, in_pair: int) -> None:
    weight = make((33, 35), dtype)
    packed = pack([weight[:7], weight[7:]])
    assert packed.shape == (2, 48 // in_pair if in_pair == 1 else 32, 32, in_pair)
    assert packed[0, 34 // in_pair, 31, 34 % in_pair] == weight[31, 34]
    assert torch.equal(packed[1, : 34 // in_pair, 0].reshape(-1), weight[32, :34])
    assert not packed[1, :, 1:].any()
    assert not packed[:, -(-35 // in_pair) :].any()


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_rows_of_a_packed_weight_are_an_embeddings(dtype: torch.dtype, weight_dtype: WeightKind) -> None:
    numbers, ids = make_weight((45, 130), weight_dtype), torch.tensor([44, 0, 31, 32, 0])
    assert torch.equal(PackedWeight(numbers, None, dtype).rows(ids), dense(numbers)[ids].to(dtype))


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_experts_give_each_row_the_bits_of_its_own_weights(
    isa: str, dtype: torch.dtype, weight_dtype: WeightKind
) -> None:
    """Some experts without rows, one with more than are laid out at once."""
    counts, hidden, neurons = (1, 0, BLOCK_ROWS + 40, 3, 60, 0), 70, 96
    gate_up, down = (
        [PackedWeight(make_weight(shape, weight_dtype), make(shape[:1], dtype) * i, dtype) for i in range(len(counts))]
        for shape in ((2 * neurons, hidden), (hidden, neurons))
    )
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    chosen = torch.stack([chosen, chosen.flip(0)], 1)
    x, weights = make((len(chosen), hidden), dtype), make((len(chosen), 2))
    residual = x.flip(0)
    sums = torch.zeros(x.shape)
    for j in range(2):
        for expert in chosen[:, j].unique().tolist():
            rows = chosen[:, j] == expert
            product = down[expert].multiply(gate_up[expert].multiply(x[rows], None, 1), None, 1, GATED)
            sums[rows] += weights[rows, j, None] * product.float()
    for threads in (1, 2, 5):
        experts = PackedExperts(gate_up, down)
        assert torch.equal(experts.add(x, chosen, weights, residual, threads), (sums + residual.float()).to(dtype))
        assert torch.equal(experts.add(x[:1], chosen[:1], weights[:1], None, threads), sums[:1].to(dtype))
