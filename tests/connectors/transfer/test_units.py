"""Units out of a pool and into another one: any block sizes, head slices and layer ranges."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_streams import use_recorded

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.planning import as_ids, unit_index
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.kernels import kv_copy
from tests.conftest import EXAMPLES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_pool(num_blocks: int, block_size: int, *, layers: int = 3, heads: int = 4, dtype: Any = torch.float32) -> Any:
    values = torch.arange(num_blocks * layers * 2 * heads * block_size * 2) % 251
    return values.to(dtype).view(num_blocks, layers, 2, heads, block_size, 2)


def tokens(pool: torch.Tensor, block_ids: list[int], start: int, stop: int) -> torch.Tensor:
    """(tokens, layers, 2, heads, head_size)."""
    return pool[block_ids].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[start:stop]


def test_unit_index_names_block_and_position() -> None:
    assert unit_index([7, 3], 32, 0, 64).tolist() == [14, 15, 6, 7]
    assert unit_index([7, 3], 32, 16, 33).tolist() == [15, 6]
    assert unit_index([5, 9], 16, 16, 16).tolist() == []


@pytest.mark.parametrize(("block_size", "start", "stop"), [(24, 0, 24), (16, 8, 16), (16, 0, 33), (16, 16, 0)])
def test_unit_index_refuses_what_is_no_range_of_units(block_size: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError):
        unit_index([0, 1], block_size, start, stop)


@given(data=st.data())
@settings(max_examples=60 * EXAMPLES)
def test_units_survive_the_way_between_pools_of_unequal_blocks(data: st.DataObject) -> None:
    """Head slices and layer ranges included; nothing else of the receiving pool changes."""
    here_size, there_size = (data.draw(st.sampled_from([16, 32, 48, 64])) for _ in range(2))
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    dtype = data.draw(st.sampled_from(DTYPES))
    head_start, layer_start = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, layers - 1))
    part = UnitPart(
        head_start,
        data.draw(st.integers(head_start + 1, heads)),
        layer_start,
        data.draw(st.integers(layer_start + 1, layers)),
    )
    num_tokens = data.draw(st.integers(1, 200))
    start = data.draw(st.integers(0, (num_tokens - 1) // HASH_BLOCK_SIZE)) * HASH_BLOCK_SIZE
    here = make_pool(14, here_size, layers=layers, heads=heads, dtype=dtype)
    there = torch.full((14, layers, 2, heads, there_size, 2), -1, dtype=dtype)
    ids = data.draw(st.permutations(range(14))), data.draw(st.permutations(range(14)))
    source, target = UnitPool(here), UnitPool(there)
    units = unit_index(ids[0], here_size, start, num_tokens)
    buffer = np.zeros(units.size * source.unit_bytes(part), dtype=np.uint8)
    source.gather(units, part, buffer, after=ON_HOST, timeout_s=0.0)
    written = unit_index(ids[1], there_size, start, num_tokens)
    target.scatter(written, part, buffer)

    where = (slice(None), slice(part.layer_start, part.layer_stop), slice(None), slice(head_start, part.head_stop))
    expected = tokens(here, list(ids[0]), start, num_tokens)[where]
    assert torch.equal(tokens(there, list(ids[1]), start, num_tokens)[where], expected)
    num_written = units.size * HASH_BLOCK_SIZE * part.num_layers * part.num_heads * 2 * 2
    assert int((there != -1).sum()) == num_written


def test_places_are_where_scatter_writes_and_not_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.connectors.transfer.units.LEAST_PLACE_BYTES", 4 * HASH_BLOCK_SIZE * 2 * 4)  # a layer's K
    units = as_ids([5, 0, 3])
    for part, num_places in (((0, 4, 0, 3), 3), ((0, 4, 1, 3), 6), ((0, 2, 0, 3), None)):
        by_scatter, by_place = UnitPool(torch.zeros_like(make_pool(6, 16))), UnitPool(make_pool(6, 16))
        by_place.kv_cache.zero_()
        places = by_place.places(units, UnitPart(*part))
        assert (places and len(places)) == num_places
        image = np.arange(units.size * by_place.unit_bytes(UnitPart(*part))).astype(np.uint8)
        by_scatter.scatter(units, UnitPart(*part), image)
        done = 0
        for place in places or ():
            place[:] = memoryview(image)[done : done + len(place)]
            done += len(place)
        if places is not None:
            assert torch.equal(*(pool.kv_cache.view(torch.uint8) for pool in (by_place, by_scatter)))
    assert UnitPool(make_pool(6, 32)).places(units, UnitPart(0, 4, 0, 3)) is None
    with pytest.raises(ValueError):
        by_place.places(as_ids([6]), UnitPart(0, 4, 0, 3))


def test_an_image_is_layers_kv_heads_tokens() -> None:
    pool = make_pool(2, 32)
    part = UnitPart(1, 3, 1, 3)
    units = UnitPool(pool)
    buffer = np.zeros(2 * units.unit_bytes(part), dtype=np.uint8)
    units.gather(as_ids([3, 0]), part, buffer, after=ON_HOST, timeout_s=0.0)
    images = torch.from_numpy(buffer).view(torch.float32).view(2, 2, 2, 2, HASH_BLOCK_SIZE, 2)
    assert torch.equal(images[0], pool[1, 1:3, :, 1:3, 16:])
    assert torch.equal(images[1], pool[0, 1:3, :, 1:3, :16])


@pytest.mark.parametrize(
    ("units", "part", "size"),
    [
        ([4], (0, 4, 0, 3), None),
        ([-1], (0, 4, 0, 3), None),
        ([0], (0, 5, 0, 3), None),
        ([0], (0, 4, 2, 2), None),
        ([0], (0, 4, 0, 3), 8),
    ],
)
def test_what_the_pool_does_not_have_is_refused(units: list[int], part: Any, size: int | None) -> None:
    pool = UnitPool(make_pool(2, 32))
    part = UnitPart(*part)
    buffer = np.zeros(pool.unit_bytes(part) if size is None else size, dtype=np.uint8)
    with pytest.raises(ValueError):
        pool.gather(as_ids(units), part, buffer, after=ON_HOST, timeout_s=0.0)
    with pytest.raises(ValueError):
        pool.scatter(as_ids(units), part, buffer)


def test_pools_that_are_not_whole_units_are_refused() -> None:
    for shape in ((2, 3, 2, 4, 24, 2), (2, 3, 4, 16, 2), (2, 3, 3, 4, 16, 2)):
        with pytest.raises(ValueError):
            UnitPool(torch.zeros(shape))
    with pytest.raises(ValueError):
        UnitPool(torch.zeros(2, 3, 2, 4, 16, 4)[..., :2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("part", [(0, 4, 0, 3), (0, 4, 1, 3), (2, 4, 0, 3), (1, 2, 2, 3)])
def test_device_pools_give_the_same_images(block_size: int, part: tuple[int, int, int, int]) -> None:
    pool = make_pool(6, block_size, dtype=torch.bfloat16)
    units = unit_index([5, 0, 3], block_size, 16, 3 * block_size)
    host, device = UnitPool(pool), UnitPool(pool.cuda())
    chosen = UnitPart(*part)
    images = [np.zeros(units.size * host.unit_bytes(chosen), dtype=np.uint8) for _ in range(2)]
    host.gather(units, chosen, images[0], after=ON_HOST, timeout_s=0.0)
    device.gather(units, chosen, images[1], after=ON_HOST, timeout_s=0.0)
    assert np.array_equal(*images)
    empty = torch.zeros_like(pool)
    back = UnitPool(empty.cuda())
    back.scatter(units, chosen, images[1])
    UnitPool(empty).scatter(units, chosen, images[0])
    assert torch.equal(back.kv_cache.cpu(), empty)


def test_kernels_are_compiled_without_a_touch_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather and a scatter have been queued, and done, whatever the pool's own zeros wait for."""
    recorded = use_recorded(monkeypatch)
    pool = make_pool(6, 16)
    expected, asked, copy = pool.clone(), list[bool](), kv_copy.copy_units

    def copied(*args: Any, to_pool: bool) -> None:
        asked.append(to_pool)
        copy(*args, to_pool=to_pool)

    monkeypatch.setattr(kv_copy, "copy_units", copied)
    UnitPool(pool).compile_kernels()
    recorded.finish_all()
    assert asked == [False, True]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_a_device_has_not_made_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Its device hangs, and goes on when the memory would have been another's."""
    recorded = use_recorded(monkeypatch)
    monkeypatch.setattr("pdkv.connectors.transfer.units.COPY_TIMEOUT_S", 0.01)
    said = threading.Semaphore(0)
    monkeypatch.setattr("pdkv.connectors.transfer.units.logger.error", lambda *args: said.release())
    pool = UnitPool(make_pool(6, 16))
    ids, expected = as_ids([4, 1]), pool.kv_cache[[4, 1]].clone()
    image = recorded.make_pinned(2 * pool.unit_bytes(pool.whole)).numpy()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pool.gather, ids, pool.whole, image, after=ON_HOST, timeout_s=0.0).result(20.0)
        stream = recorded._streams[-1]
        stream.hold()
        if way == "out":
            image[:] = 0
            copy = thread.submit(pool.gather, ids, pool.whole, image, after=ON_HOST, timeout_s=0.0)
        else:
            pool.kv_cache.zero_()
            copy = thread.submit(pool.scatter, ids, pool.whole, image)
        for _ in range(3):
            assert said.acquire(timeout=20.0)
        assert not copy.done()
        stream.release()
        copy.result(20.0)
    arrived = torch.from_numpy(image).view(torch.float32).view(expected.shape) if way == "out" else pool.kv_cache[ids]
    assert torch.equal(arrived, expected)


def test_units_are_cut_by_the_bytes_of_their_images() -> None:
    pool = UnitPool(make_pool(8, 16))
    units, part = as_ids([5, 1, 7, 2, 0]), UnitPart(1, 3, 0, 3)
    size = pool.unit_bytes(part)
    assert [piece.tolist() for piece in pool.cut(units, part, 2 * size + 1)] == [[5, 1], [7, 2], [0]]
    assert [piece.tolist() for piece in pool.cut(units, part, 1)] == [[5], [1], [7], [2], [0]]
    assert not list(pool.cut(as_ids([]), part, size))
    with pytest.raises(ValueError, match="does not fit 4 heads and 3 layers"):
        next(pool.cut(units, UnitPart(2, 2, 0, 3), size))
