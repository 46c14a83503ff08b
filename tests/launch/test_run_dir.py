"""Run directories: private, named after their owner, and swept when that owner is gone."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.host.process_info import process_start_time
from pdkv.launch import run_dir
from pdkv.launch.run_dir import RunDirectory, run_root, running_launches, sweep_leftovers


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_dir, "run_root", lambda: tmp_path)
    monkeypatch.setattr(run_dir, "_MAX_DIRECTORY_BYTES", 4096)  # pytest's directories are long
    return tmp_path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_it_is_private_and_goes_at_the_end(root: Path) -> None:
    with RunDirectory() as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert directory.endpoint("prefill-0") == f"ipc://{directory.path}/prefill-0"
        (directory.path / "prefill-0").touch()
    assert not list(root.iterdir())


def test_two_of_one_process_do_not_collide(root: Path) -> None:
    with RunDirectory() as one, RunDirectory() as other:
        assert one.path != other.path


def test_who_has_ended_for_good_leaves_no_socket(root: Path) -> None:
    """pd scale up and down: the sockets of engines that were gone stayed."""
    with RunDirectory() as run_dir:
        for name in ("decode-1", "decode-1.beats", "decode-1.1", "decode-10", "decode-10.beats", "decode-0"):
            (run_dir.path / name).touch()
        run_dir.forget("decode-1")
        run_dir.forget("decode-2")
        assert sorted(path.name for path in run_dir.path.iterdir()) == ["decode-0", "decode-10", "decode-10.beats"]


def test_the_sweep_spares_the_living(root: Path) -> None:
    with RunDirectory() as directory:
        assert sweep_leftovers() == []
        assert directory.path.is_dir()


def test_the_sweep_takes_what_a_dead_process_left(root: Path) -> None:
    left = root / f"pdkv-{dead_pid()}-123-abc_x1"
    left.mkdir()
    (left / "socket").touch()
    assert sweep_leftovers() == [left]
    assert not left.exists()


def test_what_cannot_be_swept_yet_keeps_no_launch_from_starting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of the killed launch that is about to end may add a file meanwhile."""
    left = root / f"pdkv-{dead_pid()}-123-abc_x1"
    left.mkdir()
    (left / "socket").touch()
    real = os.rmdir

    def rmdir(path: str, **at: int) -> None:
        (left / "late").touch()
        real(path, **at)

    with monkeypatch.context() as during:
        during.setattr(os, "rmdir", rmdir)
        assert sweep_leftovers() == []
    assert sweep_leftovers() == [left]


def test_the_sweep_takes_what_an_earlier_owner_of_a_living_pid_left(root: Path) -> None:
    start = process_start_time(os.getpid())
    assert start is not None
    left = root / f"pdkv-{os.getpid()}-{start - 1}-abc"
    left.mkdir()
    assert sweep_leftovers() == [left]


def test_the_sweep_touches_nothing_else(root: Path) -> None:
    pid = dead_pid()
    (root / f"pdkv-{pid}").mkdir()
    (root / f"other-{pid}-1-abc").mkdir()
    (root / f"pdkv-{pid}-1-file").touch()
    (root / f"pdkv-{pid}-1-link").symlink_to(root / f"pdkv-{pid}")
    before = sorted(root.iterdir())
    assert sweep_leftovers() == []
    assert sorted(root.iterdir()) == before


def test_no_process_has_no_start_time() -> None:
    assert process_start_time(dead_pid()) is None
    assert process_start_time(os.getpid()) is not None


def test_a_long_temporary_directory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/x" * 60)
    assert run_root() == Path("/tmp")


def test_a_launch_is_found_by_its_port_pid_and_directory(root: Path) -> None:
    with RunDirectory() as directory:
        check_found(directory)


def check_found(run_dir: RunDirectory) -> None:
    assert run_dir.path not in [Path(launch.path) for launch in running_launches()], "it is not ready yet"
    run_dir.introduce("http://127.0.0.1:8123", "1 prefill, 1 decode")
    (launch,) = [launch for launch in running_launches() if launch.path == str(run_dir.path)]
    urls = ("http://127.0.0.1:8123", "http://localhost:8123/v1", "localhost:8123", "http://127.0.0.1:8123/")
    names = ("8123", str(os.getpid()), *urls, str(run_dir.path), run_dir.path.name)
    assert all(launch.is_called(name) for name in names)
    assert not any(launch.is_called(name) for name in ("", "812", "http://localhost:812", "http://other:8123"))


def test_a_link_is_no_launch(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever may write to the temporary directory could have commands speak with another launch, or with nobody's."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with RunDirectory() as directory:
        directory.introduce("http://127.0.0.1:8123", "1 prefill, 1 decode")
        (directory.path / "launch.json").rename(elsewhere / "launch.json")
        (root / f"{directory.path.name}x").symlink_to(elsewhere)
        assert running_launches() == []
