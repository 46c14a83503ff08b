"""The compiled pass over queries and keys against torch's: norms, rotation, and the write to paged KV."""

from typing import NamedTuple

import pytest
import torch
from isas import kernels_of

from pdkv.kernels.compiled import levels
from pdkv.kernels.linear import available
from pdkv.models.heads import CompiledRotation, Heads, KVSlots, TorchRotation, make_rotation
from pdkv.models.passes import RMSNorm
from pdkv.models.rope import RopeTable

compiled = pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")

F32, BF16 = torch.float32, torch.bfloat16
LENGTH, BLOCK_SIZE, NUM_BLOCKS = 50, 4, 9
ULPS = {F32: 2.0**-22, BF16: 2.0**-7}


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int
    rotary: int


SHAPES = [Shape(1, 1, 2, 2), Shape(3, 1, 20, 20), Shape(4, 2, 64, 64), Shape(2, 2, 80, 32), Shape(5, 1, 37, 6)]
SHAPES += [Shape(2, 1, 128, 128), Shape(2, 1, 300, 300)]


def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Case:
    """A step whose last rows are padding, and one layer of a pool full of `fill`."""

    def __init__(self, shape: Shape, dtype: torch.dtype, rows: int, padding: int, fill: float, *, norms: bool) -> None:
        self.shape, self.dtype, self.padding = shape, dtype, padding
        self.table = RopeTable(*(make(LENGTH, 1, shape.rotary + i, dtype=dtype)[..., i:].contiguous() for i in (0, 1)))
        self.qkv = make(rows + padding, shape.heads + 2 * shape.kv_heads, shape.head_size, dtype=dtype)
        self.positions = torch.arange(rows + padding).flip(0) % LENGTH
        places = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(rows))[:rows]
        self.places = places // BLOCK_SIZE, places % BLOCK_SIZE
        sizes = (NUM_BLOCKS, 3, 2, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        self.pool = torch.full(sizes, fill, dtype=dtype)
        self.norms = [RMSNorm(make(shape.head_size, dtype=dtype), 1e-5) if norms else None for _ in range(2)]

    def run(self, rotation: TorchRotation | CompiledRotation, *, writes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(qkv, pool) afterwards."""
        heads: Heads = rotation.at(self.positions).of(*self.norms)
        qkv, pool = self.qkv.clone(), self.pool.clone()
        if writes:
            heads.apply_and_write(qkv, KVSlots(pool[:, 1].flatten(1, 2).transpose(1, 2), *self.places))
        else:
            heads.apply(qkv)
        return qkv, pool

    def torch(self) -> TorchRotation:
        return TorchRotation(self.table, self.shape.heads, self.shape.kv_heads)

    def compiled(self) -> CompiledRotation:
        return CompiledRotation(self.table, self.shape.heads, self.shape.kv_heads)


@compiled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norms", [False, True])
def test_the_compiled_pass_is_torch_s_within_rounding(isa: str, dtype: torch.dtype, shape: Shape, norms: bool) -> None:
    for rows, padding in ((1, 0), (3, 0), (5, 3)):
        case = Case(shape, dtype, rows, padding, float("nan"), norms=norms)
        expected, expected_pool = case.run(case.torch(), writes=True)
        qkv, pool = case.run(case.compiled(), writes=True)
        # A sum of two products may cancel: what is allowed is of their size.
        size = case.qkv.abs().amax() * case.table.cos.abs().amax() * (1 if not norms else 30)
        torch.testing.assert_close(qkv, expected, rtol=ULPS[dtype], atol=float(size) * ULPS[dtype])
        torch.testing.assert_close(
            pool, expected_pool, rtol=ULPS[dtype], atol=float(size) * ULPS[dtype], equal_nan=True
        )
        assert torch.equal(pool.isnan(), expected_pool.isnan())
        without = case.run(case.compiled(), writes=False)
        assert torch.equal(without[0], qkv)
        assert bool(without[1].isnan().all())
        with kernels_of(levels()[0]):
            assert torch.equal(case.run(case.compiled(), writes=True)[0], qkv)


@compiled
def test_without_norms_bfloat16_is_torch_s_to_the_bit() -> None:
    case = Case(Shape(4, 2, 64, 64), BF16, 7, 2, 0.0, norms=False)
    for got, expected in zip(case.run(case.compiled(), writes=True), case.run(case.torch(), writes=True), strict=True):
        assert torch.equal(got, expected)


@compiled
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_neither_threads_nor_rows_beside_it_change_a_row(dtype: torch.dtype) -> None:
    case = Case(Shape(16, 8, 64, 64), dtype, 36, 200, 0.0, norms=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        qkv, pool = case.run(case.compiled(), writes=True)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, case.run(case.compiled(), writes=True), (qkv, pool)))
    finally:
        torch.set_num_threads(before)
    for row in (0, 17, 230):
        alone = case.qkv[row : row + 1].clone()
        case.compiled().at(case.positions[row : row + 1].clone()).of(*case.norms).apply(alone)
        assert torch.equal(alone[0], qkv[row])


@compiled
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_head(poison: float) -> None:
    case = Case(Shape(4, 2, 64, 64), F32, 5, 2, 0.0, norms=True)
    clean, _ = case.run(case.compiled(), writes=True)
    case.qkv[2, 1, 63] = poison
    case.qkv[6] = poison  # padding
    qkv, pool = case.run(case.compiled(), writes=True)
    qkv[2, 1], qkv[6] = clean[2, 1], clean[6]
    assert torch.equal(qkv, clean)
    assert bool(pool.isfinite().all())


@compiled
def test_a_position_outside_the_table_is_refused() -> None:
    rotation = Case(SHAPES[0], F32, 1, 0, 0.0, norms=False).compiled()
    for position in (-1, LENGTH):
        with pytest.raises(IndexError, match="table of rotations"):
            rotation.at(torch.tensor([0, position]))
    assert rotation.at(torch.tensor([0, LENGTH - 1])) is not None


def test_the_kind_of_the_linear_layers_settles_it() -> None:
    table = Case(SHAPES[0], F32, 1, 0, 0.0, norms=False).table
    for kind in ("plain", "packed"):
        assert isinstance(make_rotation(table, 1, 1, kind), TorchRotation)
    if available():
        assert isinstance(make_rotation(table, 1, 1, "compiled"), CompiledRotation)
