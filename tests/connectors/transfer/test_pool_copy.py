"""Copies between two pools: every byte at its place, nothing else touched, nothing from beside a pool."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.connectors.transfer.planning import Bytes, as_ids
from pdkv.connectors.transfer.pool_copy import block_pieces, copy_pieces, unit_pieces
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import TransferError
from pdkv.kernels import host
from pdkv.wire.kv import KVLayout
from tests.conftest import EXAMPLES


@cache
def _noise(num_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def _pool(num_blocks: int, block_bytes: int, seed: int) -> Bytes:
    return _noise(num_blocks * block_bytes, seed).reshape(num_blocks, block_bytes).copy()


def _layout(block_size: int = 16, num_heads: int = 2, head_size: int = 4, num_layers: int = 3) -> KVLayout:
    return KVLayout(num_layers, num_heads, head_size, block_size, "float32", 4)


_IDS = {
    "adjacent": (list(range(3, 40)), list(range(20, 57))),
    "destination adjacent": (list(range(60, 10, -1)), list(range(5, 55))),
    "destination adjacent, backwards": (list(range(3, 40)), list(range(60, 23, -1))),
    "source adjacent": (list(range(32)), [i * 37 % 64 for i in range(32)]),
    "scattered": ([i * 29 % 64 for i in range(50)], [i * 37 % 64 for i in range(50)]),
    "one": ([5], [9]),
    "none": ([], []),
}


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernel, and as where there was no compiler."""
    if not request.param:
        monkeypatch.setattr(host, "available", lambda: False)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("head_size", [4, 1600, pytest.param(160, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers", [range(3), range(1, 3)])
@pytest.mark.parametrize("case", _IDS)
def test_copied_blocks_are_equal_and_others_untouched(case: str, layers: range, head_size: int) -> None:
    layout = _layout(head_size=head_size)
    source, target = _pool(64, layout.block_bytes, 1), _pool(64, layout.block_bytes, 2)
    source_ids, target_ids = map(as_ids, _IDS[case])
    expected = target.reshape(64, 3, -1).copy()
    expected[target_ids, layers.start : layers.stop] = source.reshape(64, 3, -1)[source_ids, layers.start : layers.stop]
    copy_pieces(target.reshape(-1), source.reshape(-1), block_pieces(layout, source_ids, target_ids, layers))
    assert np.array_equal(target.reshape(64, 3, -1), expected)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("source_ids", "target_ids"), [([64], [0]), ([-1], [0]), ([0], [64]), ([0], [-1]), ([0], [0, 1])], ids=str
)
def test_blocks_that_are_not_there_are_not_copied(source_ids: list[int], target_ids: list[int]) -> None:
    """The kernel is told addresses and looks at nothing: whatever it is asked for must lie in both pools."""
    layout = _layout()
    whole = _pool(66, layout.block_bytes, 2)
    target, before = whole[1:65], whole.copy()  # what lies before and behind it is in reach
    source = _pool(64, layout.block_bytes, 1)
    with pytest.raises(TransferError):
        copy_pieces(
            target.reshape(-1),
            source.reshape(-1),
            block_pieces(layout, as_ids(source_ids), as_ids(target_ids), range(3)),
        )
    assert np.array_equal(whole, before)


@pytest.mark.usefixtures("kernel")
def test_a_copy_is_cut_so_that_it_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _layout(head_size=160)
    pieces = block_pieces(layout, np.arange(40), np.arange(40)[::-1], range(3))
    parts = list(pieces.cut(3 * layout.block_bytes))
    assert {part.num_bytes for part in parts[:-1]} == {3 * layout.block_bytes}
    assert sum(part.num_bytes for part in parts) == pieces.num_bytes == 40 * layout.block_bytes


@settings(max_examples=20 * EXAMPLES)
@given(
    sizes=st.sampled_from([(16, 32), (32, 16), (48, 16), (32, 48), (16, 16)]),
    heads=st.sampled_from([(4, 4, 0, 0, 4), (2, 4, 2, 0, 2), (4, 2, 1, 2, 1), (1, 4, 0, 3, 1)]),
    layers=st.sampled_from([(0, 3), (1, 2)]),
    compiled=st.booleans(),
    data=st.data(),
)
def test_units_move_between_unequal_blocks_and_ranks(
    sizes: tuple[int, int], heads: tuple[int, int, int, int, int], layers: tuple[int, int], compiled: bool,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Against the plain definition: row by row, of each layer, of K and V, and of each head."""
    our_heads, their_heads, first, their_first, count = heads
    first = min(first, our_heads - count)
    their_first = min(their_first, their_heads - count)
    own, peer = _layout(sizes[0], our_heads), _layout(sizes[1], their_heads)
    shapes = [(24, 3, 2, layout.num_kv_heads, layout.block_size, 16) for layout in (own, peer)]
    target, source = (_pool(24, layout.block_bytes, seed) for seed, layout in enumerate((own, peer)))
    num_units = data.draw(st.integers(0, 20))
    ours = data.draw(st.permutations(range(24 * sizes[0] // 16)))[:num_units]
    theirs = data.draw(st.permutations(range(24 * sizes[1] // 16)))[:num_units]
    expected, there = target.copy().reshape(shapes[0]), source.reshape(shapes[1])
    for our, their in zip(ours, theirs, strict=True):
        (block, at), (their_block, their_at) = divmod(our, sizes[0] // 16), divmod(their, sizes[1] // 16)
        expected[block, slice(*layers), :, first : first + count, at * 16 : at * 16 + 16] = there[
            their_block, slice(*layers), :, their_first : their_first + count, their_at * 16 : their_at * 16 + 16
        ]
    part = UnitPart(first, first + count, *layers)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(host, "available", lambda: False)
        pieces = unit_pieces(own, peer, as_ids(theirs), their_first, as_ids(ours), part)
        copy_pieces(target.reshape(-1), source.reshape(-1), pieces)
    assert np.array_equal(target.reshape(shapes[0]), expected)
