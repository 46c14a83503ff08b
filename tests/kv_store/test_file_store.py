"""Values as files: damage, dead writers, full disks, several processes and the size bound."""

import contextlib
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors

from pdkv.errors import ConfigError, StoreFull, StoreUnavailable
from pdkv.kv_store.file_store import FileStore, file_name
from pdkv.kv_store.options import StoreOptions

SIZE = 10_000
_WAIT_S = 20

# Puts one value and stops between writing the file and renaming it, until its standard input ends.
STALLED_WRITER = """
import os, sys
from pdkv.kv_store.file_store import FileStore, file_name
rename = os.rename
def stalled(*names, **directories):
    print("written", flush=True)
    sys.stdin.read()
    rename(*names, **directories)
os.rename = stalled
FileStore(sys.argv[1]).put([(b"key", memoryview(bytes(10_000)))])
"""

# Puts values under a limit of the file size, as on a full disk; prints how that ended.
FULL_WRITER = """
import resource, sys
from pdkv.errors import StoreError
from pdkv.kv_store.file_store import FileStore, file_name
store = FileStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    store.put([(b"small", memoryview(bytes(10_000))), (b"large", memoryview(bytes(50_000)))])
except StoreError as error:
    print(type(error).__name__, store.contains([b"small", b"large"]))
store.put([(b"more", memoryview(bytes(10_000)))])
print(store.contains([b"more"]))
"""


def value(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(SIZE))


def put(store: FileStore, *numbers: int) -> None:
    for number in numbers:
        store.put([(b"key%d" % number, value(number))])


def get(store: FileStore, number: int) -> bool:
    """Whether the value is there; it is then checked."""
    out = memoryview(bytearray(SIZE))
    found = store.get([b"key%d" % number], [out])[0]
    assert not found or out == value(number)
    return found


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def bounded(directory: Path, num_values: float) -> FileStore:
    """A store with room for so many values."""
    return FileStore(directory, StoreOptions(capacity=int(num_values * (SIZE + 1024))))


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    put(FileStore(tmp_path), 1)
    with safetensors.safe_open(only_file(tmp_path), "np") as file:
        assert file.get_tensor("value").tobytes() == value(1)
        assert file.metadata()["key"] == b"key1".hex()


@pytest.mark.parametrize("size", [0, 7, 8, 300, 511, 512, 5000, SIZE + 511])
def test_a_truncated_file_is_a_miss_and_goes(tmp_path: Path, size: int) -> None:
    """F10: what a crash of the machine left is never taken for a value."""
    store = FileStore(tmp_path)
    put(store, 1)
    os.truncate(only_file(tmp_path), size)
    assert not get(store, 1)
    assert list(tmp_path.iterdir()) == []
    assert store.num_damaged == 1
    put(store, 1)
    assert get(store, 1)


@pytest.mark.parametrize("offset", [0, 5, 20, 60, 120, 505, 511])
def test_a_changed_byte_of_the_header_is_a_miss_and_the_file_goes(tmp_path: Path, offset: int) -> None:
    store = FileStore(tmp_path)
    put(store, 1)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)
    assert not get(store, 1)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 600, b"\xff" * (SIZE + 512), b"\x08" + bytes(7) + b"[1, 2, 3"])
def test_a_file_of_something_else_is_a_miss_and_goes(tmp_path: Path, content: bytes) -> None:
    store = FileStore(tmp_path)
    put(store, 1)
    path = only_file(tmp_path)
    path.write_bytes(content)
    assert not get(store, 1)
    assert not path.exists()


def test_a_writer_killed_before_the_rename_leaves_nothing_behind_the_next_start(tmp_path: Path) -> None:
    """F10, F24: what a writer had not finished is invisible; its temporary file goes, that of a live one stays."""
    writer = start(STALLED_WRITER, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    store = FileStore(tmp_path)
    assert store.contains([b"key"]) == [False]
    assert only_file(tmp_path).name.endswith(".tmp")
    writer.kill()
    writer.communicate(timeout=_WAIT_S)
    assert FileStore(tmp_path).contains([b"key"]) == [False]
    assert list(tmp_path.iterdir()) == []


def test_a_live_writer_is_not_disturbed_by_a_start(tmp_path: Path) -> None:
    writer = start(STALLED_WRITER, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    store = FileStore(tmp_path)
    writer.communicate("", timeout=_WAIT_S)
    assert writer.returncode == 0
    assert store.contains([b"key"]) == [True]


def test_a_full_disk_is_told_and_shows_nothing_of_the_value(tmp_path: Path) -> None:
    """F7, F10: the store says that it is full, and goes on with what fits."""
    output, _ = start(FULL_WRITER, tmp_path).communicate(timeout=_WAIT_S)
    assert output.splitlines() == ["StoreFull [True, False]", "[True]"]
    assert len(list(tmp_path.iterdir())) == 2


def test_no_call_waits_while_the_directory_is_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F67: a directory of 131,072 files on NFS is counted for minutes. What happens meanwhile counts all the same."""
    store = bounded(tmp_path, 40)
    put(store, *range(20))
    begun, may_go_on, entries = threading.Event(), threading.Event(), store._directory.entries

    @contextlib.contextmanager
    def held_up() -> Iterator[Iterator[os.DirEntry[str]]]:
        with entries() as found:
            listed = list(found)
            begun.set()
            assert may_go_on.wait(_WAIT_S)
            yield iter(listed)

    monkeypatch.setattr(store._directory, "entries", held_up)
    scan = threading.Thread(target=store._scan)
    scan.start()
    assert begun.wait(_WAIT_S)

    def others() -> None:
        assert get(store, 0)
        store.delete([b"key1"])
        put(store, 100)
        store._scan()  # one at a time
        done.set()

    done = threading.Event()
    calls = threading.Thread(target=others)
    calls.start()
    try:
        assert done.wait(_WAIT_S), "a call waits for the count"
    finally:
        may_go_on.set()
        scan.join(_WAIT_S)
        calls.join(_WAIT_S)
    names = [file_name(b"key%d" % number) for number in (*range(2, 20), 0, 100)]
    assert list(store._sizes) == names
    assert store._num_bytes == sum((tmp_path / name).stat().st_size for name in names)


def test_a_count_that_fails_changes_nothing_and_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = bounded(tmp_path, 40), bounded(tmp_path, 40)
    put(store, 1)
    put(other, 2)
    with monkeypatch.context() as patch:
        patch.setattr(store._directory, "entries", failing)
        with pytest.raises(OSError, match="not now"):
            store._scan()
    assert list(store._sizes) == [file_name(b"key1")]
    store._scan()
    assert list(store._sizes) == [file_name(b"key1"), file_name(b"key2")]


def failing() -> None:
    raise OSError("not now")


def test_the_bound_holds_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    store = bounded(tmp_path, 3)
    put(store, 1, 2, 3)
    assert get(store, 1)
    put(store, 4, 5)
    assert [get(store, number) for number in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    assert store.num_evicted == 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * (SIZE + 1024)


def test_the_end_of_a_batch_goes_before_its_beginning(tmp_path: Path) -> None:
    store = bounded(tmp_path, 3)
    store.put([(b"key%d" % number, value(number)) for number in (1, 2, 3)])
    put(store, 4)
    assert [get(store, number) for number in (1, 2, 3)] == [True, True, False]


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    store = bounded(tmp_path, 3)
    put(store, 1, 2, 3)
    assert get(store, 1)
    put(bounded(tmp_path, 3), 4)
    assert [get(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_smaller_bound_after_a_restart_is_reached(tmp_path: Path) -> None:
    put(FileStore(tmp_path), *range(10))
    put(bounded(tmp_path, 3), 20)
    assert len(list(tmp_path.iterdir())) <= 3


def test_what_other_processes_write_counts(tmp_path: Path) -> None:
    ours, theirs = bounded(tmp_path, 20), bounded(tmp_path, 20)
    for number in range(100):
        put(ours if number % 2 else theirs, number)
    assert len(list(tmp_path.iterdir())) <= 20 * (1 + 2 / 16) + 2


def test_a_file_that_another_process_removed_is_a_miss(tmp_path: Path) -> None:
    ours, theirs = bounded(tmp_path, 5), FileStore(tmp_path)
    put(ours, 1, 2)
    theirs.delete([b"key1"])
    assert ours.contains([b"key1", b"key2"]) == [False, True]
    assert not get(ours, 1)
    put(ours, 1)
    assert get(theirs, 1)


def test_a_value_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    store = bounded(tmp_path, 0.5)
    with pytest.raises(StoreFull, match="do not fit"):
        put(store, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_away_is_told_and_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "values"
    store = FileStore(directory)
    directory.rmdir()
    assert not get(store, 1)
    with pytest.raises(StoreUnavailable, match="No such file"):
        put(store, 1)
    directory.mkdir()
    put(store, 1)
    assert get(store, 1)


def test_a_directory_that_cannot_be_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file store .*/file/values: Not a directory"):
        FileStore(tmp_path / "file" / "values")


def test_a_directory_that_is_removed_under_a_call_is_never_mixed_up_with_another(tmp_path: Path) -> None:
    """The new directory of that name is looked at like the first one: a foreign one is no store."""
    directory = tmp_path / "values"
    store = FileStore(directory)
    put(store, 1)
    shutil.rmtree(directory)
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(StoreUnavailable, match="others may write to it"):
        store.get([b"key1"], [memoryview(bytearray(SIZE))])
    directory.chmod(0o700)
    assert not get(store, 1)


def test_a_directory_that_is_swapped_for_a_link_gains_nothing(tmp_path: Path) -> None:
    """B8: what was checked is what is used, whatever its name means later."""
    store = FileStore(tmp_path / "values")
    put(store, 1)
    forged = FileStore(tmp_path / "forged")
    forged.put([(b"key1", value(7)), (b"key2", value(7))])
    (tmp_path / "values").rename(tmp_path / "moved")
    (tmp_path / "values").symlink_to(tmp_path / "forged")
    assert get(store, 1)
    assert not get(store, 2)
    put(store, 3)
    assert len(list((tmp_path / "moved").iterdir())) == 2


def _fifo(path: Path, directory: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, directory: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _link_to_a_value(path: Path, directory: Path) -> None:
    path.symlink_to(directory / "whole")


def _dangling_link(path: Path, directory: Path) -> None:
    path.symlink_to(directory / "nothing")


def _directory(path: Path, directory: Path) -> None:
    path.mkdir()


def _unreadable(path: Path, directory: Path) -> None:
    path.touch(mode=0o000)


IN_ITS_PLACE = (_fifo, _socket, _link_to_a_value, _dangling_link, _directory, _unreadable)


@pytest.mark.parametrize("make", IN_ITS_PLACE, ids=lambda make: make.__name__[1:])
def test_what_is_no_file_is_a_counted_miss_that_waits_for_nobody(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """B8: a FIFO held the thread that read it for good, and a link was followed."""
    store = FileStore(tmp_path / "values")
    put(store, 1, 2)
    path = tmp_path / "values" / file_name(b"key1")
    path.rename(tmp_path / "whole")
    make(path, tmp_path)
    assert store.contains([b"key1", b"key2"]) == [path.is_file() and not path.is_symlink(), True]
    results: list[bool] = []
    reader = threading.Thread(target=lambda: results.append(get(store, 1)), daemon=True)
    reader.start()
    reader.join(_WAIT_S)
    assert results == [False]
    assert store.num_damaged == 1
    assert not os.path.lexists(path)
    make(path, tmp_path)
    if not path.is_dir():
        put(store, 1)
        assert store.contains([b"key1"]) == [True]


@pytest.mark.parametrize("make", [_fifo, _link_to_a_value, _dangling_link, _directory], ids=lambda make: make.__name__)
def test_a_start_is_not_held_up_by_what_looks_like_a_dead_writers_file(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "values").mkdir(mode=0o700)
    (tmp_path / "whole").write_bytes(b"not ours to touch")
    make(tmp_path / "values" / ".x.tmp", tmp_path)
    FileStore(tmp_path / "values").close()
    assert list((tmp_path / "values").iterdir()) == []
    assert (tmp_path / "whole").read_bytes() == b"not ours to touch"


def test_another_users_file_is_a_counted_miss(tmp_path: Path) -> None:
    """11: whoever could write here once has left nothing that is believed."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    store = FileStore(tmp_path)
    put(store, 1)
    os.chown(only_file(tmp_path), 12345, -1)
    assert store.contains([b"key1"]) == [False]
    assert not get(store, 1)
    assert store.num_damaged == 1


def test_a_store_that_is_closed_during_a_call_lets_it_end(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, 1)
    before = len(os.listdir("/proc/self/fd"))
    with store._io():
        store.close()
        assert store._directory.is_file(file_name(b"key1"))
        assert len(os.listdir("/proc/self/fd")) == before
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(StoreUnavailable, match="is closed"):
        get(store, 1)


def test_only_the_owner_may_look_into_the_directory(tmp_path: Path) -> None:
    """F23: values of one user are not readable by others."""
    store = FileStore(tmp_path / "values")
    put(store, 1)
    assert (tmp_path / "values").stat().st_mode & 0o777 == 0o700
    assert only_file(tmp_path / "values").stat().st_mode & 0o777 == 0o600
