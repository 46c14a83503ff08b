"""Memory for weights: side by side in regions that go back when nothing of them is held."""

import gc
import weakref

import torch

from pdkv.host import huge_pages
from pdkv.host.huge_pages import HugeMemory


def address(taken: memoryview) -> int:
    return torch.frombuffer(taken, dtype=torch.uint8).data_ptr()


def test_what_is_taken_is_zero_aligned_and_apart() -> None:
    memory = HugeMemory()
    taken = [memory.take(size) for size in (1, 100, 64, 5000)]
    assert [len(each) for each in taken] == [1, 100, 64, 5000]
    places = [address(each) for each in taken]
    assert all(place % 64 == 0 for place in places)
    assert [places[i + 1] - places[i] for i in range(3)] == [64, 128, 64]
    for i, each in enumerate(taken):
        assert not any(each)
        each[:] = bytes([i + 1]) * len(each)
    assert [set(each) for each in taken] == [{1}, {2}, {3}, {4}]


def test_a_region_that_is_full_is_followed_by_another_and_large_ones_have_their_own() -> None:
    memory, half = HugeMemory(), huge_pages._REGION_BYTES // 2
    first = memory.take(half)
    large = memory.take(2 * half + 1)
    beside, other = memory.take(half), memory.take(64)
    assert address(beside) == address(first) + half
    assert address(other) - address(first) not in range(2 * half)
    assert len(large) == 2 * half + 1


def test_a_region_goes_back_when_nothing_of_it_is_held() -> None:
    memory = HugeMemory()
    weight = torch.frombuffer(memory.take(4096), dtype=torch.float32)
    assert memory._region is not None
    region = memory._region
    gc.collect()
    assert region() is not None  # the tensor holds it
    del weight
    gc.collect()
    assert region() is None
    assert isinstance(memory._region, weakref.ref)
    assert not any(memory.take(4096))  # a new one
