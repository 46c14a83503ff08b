"""A directory is this user's alone, or it is refused by name; what was checked is what is used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.host.private_directory import PrivateDirectory
from pdkv.kv_store.registry import open_store
from pdkv.vllm.peers import CardDirectory


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path / "a" / "b", "store")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(directory.fd)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_one_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """11: used without a warning, and 6 of 6 forged files were taken for values."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        PrivateDirectory(path, "file store")
    assert str(caught.value) == (
        f"file store {path} belongs to uid {os.geteuid()} and has mode {mode:04o}: others may write to it, but its "
        "files are trusted; chmod go-w it, or use a directory below it, which will be created for this user only"
    )


def test_one_that_others_may_only_read_is_taken(tmp_path: Path) -> None:
    (tmp_path / "read").mkdir(mode=0o755)
    PrivateDirectory(tmp_path / "read", "store").close()


def test_another_users_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give directories away")
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(
        ConfigError, match=r"theirs belongs to uid 12345 and has mode 0700: it must belong to this user"
    ):
        PrivateDirectory(path, "store")


@pytest.mark.parametrize("end", ["", "/", "/.", "//"])
def test_a_link_is_refused_however_it_is_written(tmp_path: Path, end: str) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"store .*/link is a symbolic link to .*/real, which may be"):
        PrivateDirectory(f"{tmp_path}/link{end}", "store")


def test_a_link_further_up_is_the_users_own_business(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    PrivateDirectory(tmp_path / "link" / "values", "store").close()
    assert (tmp_path / "real" / "values").is_dir()


def test_a_dangling_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for name, message in (("link", "is a symbolic link to"), ("file", "Not a directory")):
        with pytest.raises(ConfigError, match=message):
            PrivateDirectory(tmp_path / name, "store")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", ["file", "tiers", "cards"])
def test_whoever_uses_a_directory_checks_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    users: dict[str, Callable[[], object]] = {
        "file": lambda: open_store(f"file://{path}"),
        "tiers": lambda: open_store(f"memory://x,file://{path}"),
        "cards": lambda: CardDirectory(path, "a"),
    }
    with pytest.raises(ConfigError, match="others may write to it"):
        users[kind]()
    assert list(path.iterdir()) == []
