"""The cache of digests of weights: used where nothing changed, ignored where anything is odd; one process reads."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdkv.host.file_lock import FileLock
from pdkv.models import digest_cache, weight_files
from pdkv.models import identity as model_identity
from pdkv.models.digest_cache import DigestCache
from pdkv.models.identity import ModelSource
from pdkv.models.weight_files import WeightFile

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that keeps digests of files however young."""
    monkeypatch.setattr(weight_files, "_MIN_AGE_S", -1.0)
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from now on."""
    names: list[str] = []
    read = ModelSource._read_digests

    def counted(self: ModelSource, file: WeightFile) -> list[bytes]:
        names.append(file.path.name)
        return read(self, file)

    monkeypatch.setattr(ModelSource, "_read_digests", counted)
    return names


def identify(model_dir: Path, cache: Path) -> str:
    return model_identity.model_identity(model_dir, cache=cache)


def entry_of(cache: Path) -> Path:
    """The only entry."""
    (entry,) = [path for path in cache.iterdir() if not path.suffix]
    return entry


def test_the_second_time_nothing_is_read(model_dir: Path, cache: Path, reads: list[str]) -> None:
    identity = identify(model_dir, cache)
    with ModelSource(model_dir, cache=cache) as source:
        assert source.known() == source.identity() == identity
    assert reads == [WEIGHTS]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.iterdir())


def test_content_that_changed_under_the_same_size_and_mtime_is_read(
    model_dir: Path, cache: Path, reads: list[str]
) -> None:
    """In place, which changes the ctime, and by another inode."""
    file = model_dir / WEIGHTS
    identities = [identify(model_dir, cache)]
    status = file.stat()
    for content in (b"\1", b"\2"):
        if content == b"\2":
            shutil.copy(file, model_dir / "other")
            (model_dir / "other").replace(file)
        with file.open("r+b") as out:
            os.pwrite(out.fileno(), content, status.st_size - 1)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        identities.append(identify(model_dir, cache))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert len(set(identities)) == len(reads) == 3


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path: Path, model_dir: Path, reads: list[str]) -> None:
    """Its clock may not have ticked when it changes again."""
    (model_dir / WEIGHTS).touch()
    for _ in range(2):
        identify(model_dir, tmp_path / "cache")
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "empty", "longer", "huge", "other_entry", "directory", "fifo", "link"]
)
def test_a_damaged_entry_is_ignored_and_replaced(
    model_dir: Path, cache: Path, reads: list[str], damage: str, tmp_path: Path
) -> None:
    identity = identify(model_dir, cache)
    entry = entry_of(cache)
    content = entry.read_bytes()
    entry.unlink()
    match damage:
        case "flip":
            entry.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            entry.write_bytes(content[:-1])
        case "empty":
            entry.touch()
        case "longer":
            entry.write_bytes(content + b"x")
        case "huge":
            with entry.open("wb") as out:
                out.truncate(1 << 40)
        case "other_entry":
            poison = Path(shutil.copytree(model_dir, tmp_path / "poison"))
            with (poison / WEIGHTS).open("r+b") as out:
                os.pwrite(out.fileno(), b"\7", (poison / WEIGHTS).stat().st_size - 1)
            identify(poison, tmp_path / "other cache")
            shutil.copy(entry_of(tmp_path / "other cache"), entry)
        case "directory":
            entry.mkdir()
        case "fifo":
            os.mkfifo(entry)
        case "link":
            target = tmp_path / "target"
            target.write_bytes(content)
            entry.symlink_to(target)
    reads.clear()
    assert identify(model_dir, cache) == identity
    assert reads == [WEIGHTS]
    if damage != "directory":
        assert entry.read_bytes() == content


def test_entries_that_say_something_else_are_ignored(model_dir: Path, cache: Path, reads: list[str]) -> None:
    """A whole entry of another version, of fewer tensors, of short digests, or of no such shape at all."""
    import msgspec

    identity = identify(model_dir, cache)
    entry = entry_of(cache)
    version, path, stamp, digests = msgspec.msgpack.decode(entry.read_bytes()[16:])
    for body in (
        [version + 1, path, stamp, digests],
        [version, path, stamp, digests[1:]],
        [version, path, stamp, [digest[1:] for digest in digests]],
        [version, path, [0, *stamp[1:]], digests],
        [version, "00", stamp, digests],
        {"a": 1},
    ):
        data = msgspec.msgpack.encode(body)
        entry.write_bytes(digest_cache._checksum(data) + data)
        reads.clear()
        assert identify(model_dir, cache) == identity
        assert reads == [WEIGHTS]


@pytest.mark.parametrize("kind", ["world_writable", "foreign", "link", "file", "below_a_file"])
def test_a_directory_that_cannot_be_trusted_is_not_used(
    model_dir: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    identity = identify(model_dir, cache)
    used, before = cache, sorted(cache.iterdir())
    match kind:
        case "world_writable":
            cache.chmod(0o777)
        case "foreign":
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        case "link":
            used = tmp_path / "link"
            used.symlink_to(cache)
        case "file":
            used = tmp_path / "file"
            used.touch()
        case "below_a_file":
            (tmp_path / "file").touch()
            used = tmp_path / "file" / "cache"
    for _ in range(2):
        assert identify(model_dir, used) == identity
    assert len(reads) == 3
    assert str(used) in caplog.text
    assert sorted(cache.iterdir()) == before


def test_a_user_without_a_home_has_no_cache(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert model_identity.model_identity(model_dir)


def test_a_relative_xdg_cache_home_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert digest_cache.cache_directory() == tmp_path / ".cache" / "pdkv" / "weights"


def test_there_is_a_bound_on_what_is_kept(model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, and so does what a killed writer left long ago."""
    identity = identify(model_dir, cache)
    for age, name in enumerate(["one", "two", ".killed"], 1):
        (cache / name).touch()
        os.utime(cache / name, (0, 1e9 - age))
    entry_of_model = next(path for path in cache.iterdir() if len(path.name) == 32)
    entry_of_model.unlink()
    monkeypatch.setattr(digest_cache, "_MAX_FILES", 3)
    assert identify(model_dir, cache) == identity
    assert sorted(path.name for path in cache.iterdir()) == [entry_of_model.name, f"{entry_of_model.name}.lock", "one"]


READER = """
import sys
from pathlib import Path
from pdkv.models import identity, weight_files
weight_files._MIN_AGE_S = -1.0
read = identity.ModelSource._read_digests
def counted(self, file):
    print("reads", flush=True)
    sys.stdin.readline()
    return read(self, file)
identity.ModelSource._read_digests = counted
print(identity.model_identity(Path(sys.argv[1]), cache=Path(sys.argv[2])), flush=True)
"""


@pytest.fixture
def reader(model_dir: Path, cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has begun to read the model, and goes on when it is told to."""
    command = [sys.executable, "-P", "-c", READER, str(model_dir), str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reads\n"
        yield process
        process.kill()


def test_of_two_processes_one_reads_and_the_other_waits_for_it(
    model_dir: Path, cache: Path, reads: list[str], reader: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    acquire = FileLock.acquire

    def acquire_and_say(self: FileLock, timeout_s: float) -> bool:
        waiting.set()
        return acquire(self, timeout_s)

    monkeypatch.setattr(FileLock, "acquire", acquire_and_say)
    with ModelSource(model_dir, cache=cache) as source:
        assert waiting.wait(20)
        answer, _ = reader.communicate("go\n", timeout=20)
        assert source.identity() == answer.strip()
    assert reads == []


def test_a_reader_that_is_stopped_is_not_awaited_for_ever(
    model_dir: Path, cache: Path, reads: list[str], reader: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_identity, "_LOCK_BASE_S", 0.05)
    identity = identify(model_dir, cache)
    assert reads == [WEIGHTS]
    assert reader.communicate("go\n", timeout=20)[0].strip() == identity


def test_a_killed_readers_lock_is_free(
    model_dir: Path, cache: Path, reads: list[str], reader: "subprocess.Popen[str]"
) -> None:
    reader.kill()
    reader.wait(20)
    assert identify(model_dir, cache)
    assert reads == [WEIGHTS]


def test_a_wait_that_is_given_up_ends_and_leaves_the_lock_alone(
    model_dir: Path, cache: Path, reader: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_identity, "_LOCK_BASE_S", 20.0)
    source = ModelSource(model_dir, cache=cache)
    source.close()
    assert not source._thread.is_alive
    answer, _ = reader.communicate("go\n", timeout=20)
    with contextlib.closing(DigestCache(cache)) as later:
        file = WeightFile(model_dir / WEIGHTS)
        lock = later.lock(file)
        assert lock is not None
        assert lock.acquire(20)
        lock.release()
        file.close()
    assert identify(model_dir, cache) == answer.strip()
