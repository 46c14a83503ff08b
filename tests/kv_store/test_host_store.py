"""Segments of host memory: who writes which, what a successor finds, and what readers see of a writer at work."""

import errno
import fcntl
import logging
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, StoreFull, StoreUnavailable, StoreUnsupported
from pdkv.host.held_file import HeldFile, write_address
from pdkv.host.process_info import process_start_time
from pdkv.kv_store.base import Held, TierCounts
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_segment import PAGE_BYTES, Segment, format_segment, key_of
from pdkv.kv_store.host_store import _ASK_AGAIN_S, HostStore
from pdkv.kv_store.host_writer import SegmentWriter
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.tiers import TieredStore
from pdkv.testing import VirtualClock

CAPACITY = 2 << 20
SIZE = 3 * PAGE_BYTES - 100
_WAIT_S = 20

Open = Callable[[], HostStore]

# Puts values, says each number when its value is there, and stays.
WRITER = """
import sys
from pdkv.kv_store.registry import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
for number in range(int(sys.argv[2])):
    value = number.to_bytes(4, "little") * 40_000
    store.put([(b"key%d" % number, memoryview(value))])
    print(number, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "segments"


@pytest.fixture(name="open_")
def opener(directory: Path, keep: Callable[..., Any]) -> Open:
    return lambda: keep(HostStore(directory, StoreOptions(capacity=CAPACITY)))


def start_writer(url: str, num_values: int) -> "subprocess.Popen[str]":
    """A process with a store of its own."""
    command = [sys.executable, "-P", "-c", WRITER, url, str(num_values)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    return writer


def value(number: int, size: int = SIZE) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def key(number: int) -> bytes:
    return b"key%d" % number


def put(store: HostStore, *numbers: int) -> None:
    store.put([(key(number), value(number)) for number in numbers])


def has(store: HostStore, *numbers: int) -> list[bool]:
    """Which values are there; those that are must be right."""
    out = [memoryview(bytearray(SIZE)) for _ in numbers]
    found = store.get([key(number) for number in numbers], out)
    assert all(out[i] == value(number) for i, number in enumerate(numbers) if found[i])
    assert store.contains([key(number) for number in numbers]) == found
    return found


def own(store: HostStore) -> SegmentWriter:
    assert store.own is not None
    return store.own


def test_each_writes_a_segment_of_its_own_and_reads_all(open_: Open, directory: Path) -> None:
    first, second = open_(), open_()
    put(first, 1)
    put(second, 2)
    assert has(first, 1, 2) == has(second, 1, 2) == [True, True]
    assert [len(own(store)) for store in (first, second)] == [1, 1]
    put(second, 1)  # there already
    assert len(own(second)) == 1
    assert len(list(directory.iterdir())) == 2


def test_the_least_recently_used_go_first_and_the_end_of_a_batch_before_its_beginning(open_: Open) -> None:
    store = open_()
    room = own(store).segment.num_pages // 3
    put(store, *range(room))
    assert has(store, 0) == [True]
    put(store, 1000)
    assert has(store, 0, room - 1, room - 2, 1000) == [True, False, True, True]
    assert own(store).num_evicted == 1


def test_what_it_holds_and_gave_is_counted(open_: Open) -> None:
    store, other = open_(), open_()
    room = own(store).segment.num_pages // 3
    put(store, *range(room + 2))
    assert has(other, 0, room + 1) == [True, False]
    assert store.count_tiers() == {"0-host": TierCounts(0, 0, Held(room, room * 3 * PAGE_BYTES, CAPACITY, 2))}
    assert other.count_tiers() == {"0-host": TierCounts(1, 0, Held(0, 0, CAPACITY, 0))}
    store.delete([key(0)])
    assert store.count_held().values == room - 1


def test_what_is_larger_than_a_segment_does_not_fit_and_takes_nothing(open_: Open) -> None:
    store = open_()
    put(store, 1)
    with pytest.raises(StoreFull, match="do not fit"):
        store.put([(b"large", memoryview(bytes(CAPACITY + 1)))])
    assert has(store, 1) == [True]


def test_a_successor_goes_on_with_the_values_and_their_order(open_: Open, directory: Path) -> None:
    store = open_()
    room = own(store).segment.num_pages // 3
    put(store, *range(room))
    has(store, room - 1)
    store.close()
    again = open_()
    assert len(list(directory.iterdir())) == 1
    assert len(own(again)) == room
    put(again, 1000)
    assert has(again, room - 1, room - 2, 0, 1000) == [True, False, True, True]
    assert sum(has(again, *range(room))) == room - 1


def test_a_killed_writer_leaves_whole_values_and_nothing_else(open_: Open, directory: Path) -> None:
    """F10."""
    url = f"host://{directory}?capacity={CAPACITY}"
    for _ in range(3):
        writer = start_writer(url, 10**9)
        assert writer.stdout is not None
        reader = open_()
        for _ in range(200):
            last = int(writer.stdout.readline())
        writer.kill()
        last = max([last, *map(int, writer.stdout.read().split())])
        writer.communicate(timeout=_WAIT_S)
        reader.close()
        store = open_()
        kept = [number for number in range(last + 3) if _is_whole(store, number)]
        assert last in kept
        assert len(kept) >= 9
        store.close()


def _is_whole(store: HostStore, number: int) -> bool:
    """Whether the writer's value is there, and then whether it is right."""
    out = memoryview(bytearray(160_000))
    found = store.get([key(number)], [out])[0]
    assert not found or out == number.to_bytes(4, "little") * 40_000
    return found


def test_a_value_that_goes_while_it_is_read_is_a_miss(open_: Open) -> None:
    writer, reader = open_(), open_()
    put(writer, 1)
    size = own(writer).segment.num_pages * PAGE_BYTES

    def overwrite(index: int, stop: int) -> None:
        if not overwritten:
            overwritten.append(stop)
            writer.put([(b"all", memoryview(b"\xff" * size))])

    overwritten: list[int] = []
    assert reader.read([key(1)], [memoryview(bytearray(SIZE))], overwrite) == [False]
    assert overwritten


def test_another_ones_value_that_was_deleted_is_not_found_until_it_is_new(open_: Open) -> None:
    writer, reader = open_(), open_()
    put(writer, 1, 2)
    reader.delete([key(1)])
    assert has(reader, 1, 2) == [False, True]
    assert has(writer, 1) == [True]
    put(reader, 1)
    assert has(reader, 1) == [True]
    writer.delete([key(2)])
    put(writer, 2)
    assert has(reader, 2) == [True]


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_index_costs_values_and_nothing_else(open_: Open, directory: Path, seed: int) -> None:
    store = open_()
    put(store, *range(8))
    store.close()
    rng = random.Random(seed)
    (path,) = directory.iterdir()
    index_bytes = path.stat().st_size - CAPACITY
    with path.open("r+b") as file:
        for _ in range(40):
            file.seek(rng.randrange(4096, index_bytes - 64))
            file.write(rng.randbytes(rng.choice([1, 8, 64])))
    bystander, successor = Segment(os.open(path, os.O_RDONLY), writable=False), open_()
    for number in range(8):
        bystander.find(key_of(key(number)))
    has(successor, *range(8))
    put(successor, *range(100, 130))
    assert has(successor, 100) == [True]
    writer = own(successor)
    held = sum(len(value.pages) for value in writer._held.values())
    assert held + writer.num_free_pages == writer.segment.num_pages
    bystander.close()


def test_a_directory_with_other_things_is_used_all_the_same(
    open_: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir(mode=0o700)
    (directory / "0-a.segment").symlink_to("/etc/passwd")
    os.mkfifo(directory / "0-b.segment")
    (directory / "0-c.segment").write_bytes(b"no segment")
    (directory / "0-d.memfd").write_text("{}")
    (directory / "0-e.memfd").write_text('{"pid": 1, "start_time": 1, "fd": 0, "inode": 1}')
    (directory / "notes.txt").write_text("mine")
    (directory / "0-d.memfd").unlink()
    (directory / "0-e.memfd").unlink()
    with caplog.at_level(logging.WARNING):
        store = open_()
    put(store, 1)
    assert has(store, 1) == [True]
    assert "0-c.segment" in caplog.text


def test_no_room_is_told_and_leaves_what_was_there(directory: Path) -> None:
    """F15: a system without memory, here by a limit on files."""
    script = (
        "import resource, sys; from pdkv.kv_store.registry import open_store; from pdkv.errors import StoreFull\n"
        "store = open_store(sys.argv[1]); store.put([(b'a', memoryview(b'a' * 70000))])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "try: store.put([(b'b', memoryview(b'b' * 70000))])\n"
        "except StoreFull as error: print(error.code)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "store.put([(b'c', memoryview(b'c' * 70000))]); print(store.contains([b'a', b'b', b'c']))"
    )
    url = f"host://{directory}?capacity={CAPACITY}"
    done = subprocess.run([sys.executable, "-P", "-c", script, url], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["store_full", "[True, False, True]"]


@pytest.fixture(params=[fcntl.F_SEAL_SHRINK, 0], ids=["sealed", "unsealed"])
def memfd(directory: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """One, kept by this process and named in the directory. What is sealed is read from a mapping."""
    directory.mkdir(mode=0o700)
    fd = os.memfd_create("pdkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    format_segment(fd, CAPACITY)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, request.param)
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    write_address(directory, "0", HeldFile(os.getpid(), start_time, fd, os.fstat(fd).st_ino))
    yield fd
    os.close(fd)


def is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def test_who_can_write_nothing_reads_on_beside_other_tiers(directory: Path, memfd: int) -> None:
    writer = HostStore(directory)
    put(writer, 0)
    with TieredStore([HostStore(directory), MemoryStore("below")]) as store:
        with pytest.raises(StoreUnsupported):  # nobody else sees what the other tier took
            store.put([(b"new", memoryview(b"value"))])
        assert store.contains([key(0), b"new"]) == [True, True]
    writer.close()


def test_memfds_outlive_their_writers(open_: Open, directory: Path, memfd: int) -> None:
    writer = start_writer(f"host://{directory}", 3)
    assert writer.stdout is not None
    assert [writer.stdout.readline() for _ in range(3)][-1] == "2\n"
    reader = open_()
    assert reader.own is None
    assert _is_whole(reader, 0)
    with pytest.raises(StoreUnsupported, match="belong to other processes"):
        put(reader, 1)
    assert [segment._pages is not None for segment in reader._others.values()] == [is_sealed(memfd)]
    writer.kill()
    writer.communicate(timeout=_WAIT_S)
    reader.close()
    successor = open_()
    assert len(own(successor)) == 3
    assert _is_whole(successor, 0)
    assert not list(directory.glob("*.segment"))


def test_an_address_of_something_else_is_refused(directory: Path, memfd: int) -> None:
    inode, start_time = os.fstat(memfd).st_ino, process_start_time(os.getpid())
    assert start_time is not None
    right = HeldFile(os.getpid(), start_time, memfd, inode)
    os.close(right.open(os.O_RDONLY))
    wrong = [(start_time + 1, memfd, inode), (start_time, 0, inode), (start_time, memfd, inode + 1)]
    for fields in wrong:
        with pytest.raises(FileNotFoundError):
            HeldFile(os.getpid(), *fields).open(os.O_RDONLY)


def test_a_segment_that_cannot_be_opened_now_is_opened_later(
    open_: Open, memfd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a process has no descriptor left: it is not refused for good, though nothing changes there."""

    def refuse(address: HeldFile, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    writer, reader = open_(), open_()
    put(writer, 1)
    long_ago = os.stat(reader._directory.fd).st_mtime_ns - 1_000_000_000
    os.utime(reader._directory.fd, ns=(long_ago, long_ago))
    with monkeypatch.context() as patch:
        patch.setattr(HeldFile, "open", refuse)
        assert [has(reader, 1) for _ in range(3)] == [[False]] * 3
    assert has(reader, 1) == [True]
    assert caplog.text.count("cannot be opened now") == 1


def test_without_descriptors_a_call_fails_and_holds_nothing(open_: Open, directory: Path) -> None:
    """The directory has changed, a while ago, and cannot be read now: it is looked at again."""
    store, another = open_(), open_()
    put(another, 1)
    long_ago = time.time_ns() - 10**9
    os.utime(directory, ns=(long_ago, long_ago))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            store.contains([key(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.contains([key(1)]) == [True]
    store.close()
    assert store.own is not None
    assert store.own.segment.fd < 0


def test_a_directorys_scope_is_its_own(tmp_path: Path) -> None:
    stores = [HostStore(tmp_path / name) for name in ("a", "a", "b")]
    scopes = [store.scope for store in stores]
    assert scopes[0] == scopes[1] != scopes[2]
    tiers = TieredStore([stores[0], MemoryStore("below")])
    assert tiers.scope == scopes[0], "nobody else reaches the other tier"
    files = FileStore(tmp_path / "files")
    assert TieredStore([stores[1], files]).scope == ""
    assert TieredStore([stores[1], files], write=["all", "evicted"]).scope == scopes[0], "it lacks what is in memory"
    for store in stores:
        store.close()


def test_a_capacity_that_is_none_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1048576 bytes, got 4096"):
        HostStore(directory, StoreOptions(capacity=4096))


@pytest.fixture
def kept(directory: Path) -> Iterator[Callable[[str], Path]]:
    """Makes memfds that this process keeps: kept(name) -> the file with its address."""
    directory.mkdir(mode=0o700)
    fds: list[int] = []

    def keep(name: str) -> Path:
        fd = os.memfd_create("pdkv-test", os.MFD_CLOEXEC)
        fds.append(fd)
        format_segment(fd, CAPACITY)
        start_time = process_start_time(os.getpid())
        assert start_time is not None
        return write_address(directory, name, HeldFile(os.getpid(), start_time, fd, os.fstat(fd).st_ino))

    yield keep
    for fd in fds:
        os.close(fd)


def test_an_engine_writes_the_segments_of_its_name_and_reads_all(directory: Path, kept: Callable[[str], Path]) -> None:
    for name in ("decode-1.0-a", "decode-10.0-a", "prefill-1.0-a"):
        kept(name)
    stores = {name: HostStore(directory, StoreOptions(segment=name)) for name in ("decode-10", "decode-1", "prefill-1")}
    stores["decode-1 again"] = HostStore(directory, StoreOptions(segment="decode-1"))
    assert {name: store._own_name for name, store in stores.items()} == {
        "decode-10": "decode-10.0-a.memfd", "decode-1": "decode-1.0-a.memfd", "prefill-1": "prefill-1.0-a.memfd",
        "decode-1 again": "",
    }  # fmt: skip
    put(stores["decode-10"], 1)
    assert all(has(store, 1) == [True] for store in stores.values())
    for store in stores.values():
        store.close()


def test_a_segment_that_was_still_held_is_taken_when_it_is_free(directory: Path, kept: Callable[[str], Path]) -> None:
    """As by a start that waits for a server: the engine must not stay without a segment for good."""
    kept("decode-0.0-a")
    holder = HostStore(directory, StoreOptions(segment="decode-0"))
    put(holder, 1)
    clock = VirtualClock()
    store = HostStore(directory, StoreOptions(segment="decode-0"), clock=clock)
    with pytest.raises(StoreUnsupported, match="belong to other processes"):
        put(store, 2)
    assert has(store, 1) == [True]
    holder.close()
    with pytest.raises(StoreUnsupported):  # it looks now and then
        put(store, 2)
    clock.advance(_ASK_AGAIN_S)
    put(store, 2)
    assert has(store, 1, 2) == [True, True]
    assert len(own(store)) == 2
    assert not store._others
    store.close()


def test_a_segment_that_goes_is_let_go_of_also_by_who_reads_it(directory: Path, kept: Callable[[str], Path]) -> None:
    kept("a.0-a")
    address = kept("b.0-a")
    reader, writer = (HostStore(directory, StoreOptions(segment=name)) for name in "ab")
    put(writer, 1)
    assert has(reader, 1) == [True]
    (segment,) = reader._others.values()
    fd = segment.fd

    def remove(index: int, stop: int) -> None:
        address.unlink(missing_ok=True)
        assert reader.contains([key(2)]) == [False]  # looks around
        assert not reader._others

    assert reader.read([key(1)], [memoryview(bytearray(SIZE))], remove) == [True]
    del segment
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert has(reader, 1) == [False]
    for store in (reader, writer):
        store.close()


def test_pinned_values_stay_until_they_are_unpinned(open_: Open) -> None:
    store = open_()
    keys = [b"key%d" % i for i in range(4)]
    for key in keys:
        store.put([(key, memoryview(bytes(SIZE)))])
    assert store.pin([*keys[:2], b"nobody's"], None) == [True, True, False]
    for number in range(40):  # several times what there is room for
        store.put([(b"other%d" % number, memoryview(bytes(SIZE)))])
    assert store.contains(keys) == [True, True, False, False]
    assert store.unpin([keys[0], keys[3]]) == 1
    for number in range(40):
        store.put([(b"more%d" % number, memoryview(bytes(SIZE)))])
    assert store.contains(keys) == [False, True, False, False]
    assert store.unpin(None) == 1
    assert store.unpin(None) == 0


def test_a_pin_ends_with_its_time_and_with_its_process(open_: Open) -> None:
    store = open_()
    store.put([(b"a", memoryview(bytes(SIZE))), (b"b", memoryview(bytes(SIZE)))])
    assert store.pin([b"a"], 1e-6) == [True]
    assert store.pin([b"b"], 60.0) == [True]
    assert store.unpin(None) == 1, "one is over"
    assert store.pin([b"b"], None) == [True]
    store.close()
    successor = open_()
    assert successor.contains([b"b"]) == [True]
    assert successor.unpin(None) == 0


def test_pins_leave_half_of_the_segment_to_others(open_: Open) -> None:
    store = open_()
    keys = [b"key%d" % i for i in range(10)]
    for key in keys:
        store.put([(key, memoryview(bytes(SIZE)))])  # three pages each, of 32
    assert store.pin(keys[:5], None) == [True] * 5
    with pytest.raises(
        StoreFull, match=f"{18 * PAGE_BYTES} bytes would be pinned, 5 values .* at most {16 * PAGE_BYTES} of"
    ):
        store.pin(keys[4:6], None)
    assert store.pin(keys[:5], 60.0) == [True] * 5, "again: no more than before"
    for number in range(40):
        store.put([(b"other%d" % number, memoryview(bytes(SIZE)))])
        assert store.contains([b"other%d" % number]) == [True]
    assert store.contains(keys) == [True] * 5 + [False] * 5


def test_what_is_discarded_is_gone_pinned_or_not_and_others_values_stay(open_: Open) -> None:
    store, other = open_(), open_()
    for key in (b"a", b"b", b"c"):
        store.put([(key, memoryview(bytes(SIZE)))])
    other.put([(b"theirs", memoryview(bytes(SIZE)))])
    store.pin([b"a"], None)
    assert store.discard([b"a", b"theirs", b"nobody's"]) == 1
    assert store.contains([b"a", b"b", b"theirs"]) == [False, True, True]
    assert store.discard(None) == 2
    assert store.count_held().num_bytes == store.unpin(None) == 0
    assert other.contains([b"b", b"theirs"]) == [False, True]


def test_a_key_that_is_named_twice_counts_once(open_: Open) -> None:
    store = open_()
    put(store, 0)
    store.pin([key(0), key(0)], None)
    assert store.unpin([key(0), key(0)]) == 1
    assert store.discard([key(0), key(0)]) == 1


def test_what_is_expected_goes_last_and_the_latest_needed_first(open_: Open) -> None:
    """Whether it was there when it became so, or came later; and what is not expected any more is like all others."""
    store = open_()
    room = own(store).segment.num_pages // 3
    for number in range(room - 1):
        put(store, number)
    store.expect([key(0), key(1), key(500)])
    put(store, 500)
    for number in range(1000, 1000 + 2 * room):
        put(store, number)
    assert has(store, 0, 1, 500, 2) == [True, True, True, False]
    assert own(store).num_evicted == 2 * room
    assert [name for name, _ in store.coldest(CAPACITY)][-3:] == [key(500), key(1), key(0)]
    store.unexpect([key(0), key(500)])
    assert [name for name, _ in store.coldest(CAPACITY)][-3:] == [key(500), key(0), key(1)]
    for number in range(2000, 2000 + room):
        put(store, number)
    assert has(store, 0, 1, 500) == [False, True, False]


def test_a_segment_of_which_all_is_expected_still_takes_values(open_: Open) -> None:
    store = open_()
    room = own(store).segment.num_pages // 3
    store.expect([key(number) for number in range(room + 1)])
    for number in range(room + 1):
        put(store, number)
    assert has(store, 0, room - 2, room - 1, room) == [True, True, False, True]
    assert len(own(store)) == room
    store.delete([key(0)])
    assert has(store, 0) == [False]


def test_absent_keys_are_not_looked_for_in_each_segment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F69: most buckets are empty, which one look at all of them tells."""
    stores = [HostStore(directory, StoreOptions(capacity=16 << 20)) for _ in range(16)]
    try:
        for number, store in enumerate(stores):
            store.put([(key(number), value(number))])
        absent, looked_for = [b"absent %d" % number for number in range(2048)], []
        find = Segment.find
        monkeypatch.setattr(Segment, "find", lambda self, wanted: looked_for.append(wanted) or find(self, wanted))
        assert stores[0].contains([*absent, *map(key, range(16))]) == [False] * 2048 + [True] * 16
        assert len(looked_for) < 2048
        assert stores[0].contains([]) == []
    finally:
        for store in stores:
            store.close()


def test_a_capacity_that_a_segment_does_not_have_is_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F68: its values are worth more than its size."""
    for capacity, is_said in ((4 << 20, False), (4 << 20, False), (None, False), (8 << 20, True)):
        caplog.clear()
        with HostStore(directory, StoreOptions(capacity=capacity)) as store:
            assert store.own_capacity == 4 << 20
        assert ("capacity=8388608 is not taken" in caplog.text) == is_said
