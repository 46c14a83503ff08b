"""Memory for weights: side by side in regions that go back when nothing of them is held."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from no_threads import no_threads

from pdkv.host import huge_pages
from pdkv.host.huge_pages import HugeMemory, address_of, can_share_huge_pages, extend_shared, map_shared


def test_what_is_taken_is_zero_aligned_and_apart() -> None:
    memory = HugeMemory()
    taken = [memory.take(size) for size in (1, 100, 64, 5000)]
    assert [len(each) for each in taken] == [1, 100, 64, 5000]
    places = [address_of(each) for each in taken]
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
    assert address_of(beside) == address_of(first) + half
    assert address_of(other) - address_of(first) not in range(2 * half)
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


def pmd_mapped_bytes(view: memoryview) -> int:
    """Bytes of a memfd's map that are mapped in huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address_of(view):x}-"):
            return next(int(each.split()[1]) << 10 for each in lines if each.startswith("ShmemPmdMapped:"))
    raise AssertionError("it is not mapped")


@pytest.mark.skipif(not can_share_huge_pages(), reason="the kernel gives memfds no huge pages")
def test_a_memfd_grows_in_huge_pages_that_other_maps_have_too() -> None:
    fd, huge = os.memfd_create("test", os.MFD_CLOEXEC), huge_pages.HUGE_BYTES
    view = map_shared(fd, 8 * huge, writable=True)
    assert address_of(view) % huge == 0
    assert extend_shared(fd, view, 0, huge)
    assert extend_shared(fd, view, huge, 6 * huge)
    assert os.fstat(fd).st_size == 6 * huge
    view[:3], view[6 * huge - 3 : 6 * huge] = b"abc", b"xyz"
    assert pmd_mapped_bytes(view) == 6 * huge
    with pytest.raises(OSError, match="is full"):
        extend_shared(fd, view, 6 * huge, 9 * huge)

    other = map_shared(os.dup(fd), 6 * huge, writable=False)
    assert (other[:3], other[-3:]) == (b"abc", b"xyz")
    assert not any(other[3:huge])
    for at in range(0, len(other), huge):
        assert other[at] in (0, ord("a"))
    assert pmd_mapped_bytes(other) == 6 * huge


def test_without_threads_there_is_no_memory_and_an_error_that_says_so() -> None:
    view = map_shared(fd := os.memfd_create("test", os.MFD_CLOEXEC), huge_pages.HUGE_BYTES, writable=True)
    with no_threads(), pytest.raises(OSError, match="can't start new thread"):
        extend_shared(fd, view, 0, huge_pages.HUGE_BYTES)
    extend_shared(fd, view, 0, huge_pages.HUGE_BYTES)


def test_a_memfd_is_closed_with_its_map() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    weight = torch.frombuffer(map_shared(fd, 4096, writable=True), dtype=torch.float32)
    os.fstat(fd)
    del weight
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    closed = os.memfd_create("test", os.MFD_CLOEXEC)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        map_shared(closed, 1 << 60, writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed)
