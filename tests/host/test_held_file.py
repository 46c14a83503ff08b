"""Files that another process holds open, by the address that it has told of."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdkv.host.held_file import HeldFile, held_here

WAIT_S = 20.0


@pytest.fixture(name="memfd")
def an_open_memfd() -> Iterator[int]:
    fd = os.memfd_create("held")
    yield fd
    os.close(fd)


def test_a_held_file_is_opened_and_anything_else_is_refused_by_what_it_is(memfd: int) -> None:
    held = HeldFile(*held_here(memfd))
    fd = held.open(os.O_RDONLY)
    assert os.path.samestat(os.fstat(fd), os.fstat(memfd))
    assert not os.get_inheritable(fd)
    os.close(fd)
    reading, writing = os.pipe()
    for changes, text in (
        ({"pid": 2**22 + 1}, "process 4194305 is gone"),
        ({"start_time": 1}, f"start time {held.start_time}, 1 was expected"),
        ({"fd": reading}, f"fd/{reading} is pipe:[{os.fstat(reading).st_ino}], /memfd:... was expected"),
        ({"inode": 1}, f"inode {held.inode}, 1 was expected"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            msgspec.structs.replace(held, **changes).open(os.O_RDONLY)
        assert text in str(caught.value)
    os.close(reading)
    os.close(writing)


def test_a_pipe_that_takes_a_files_place_before_it_is_opened_holds_up_nobody(
    memfd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened for reading, a named pipe without a writer waits for one."""
    held, number = HeldFile(*held_here(memfd)), os.open("/dev/null", os.O_RDONLY)
    os.dup2(memfd, number)
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    look, texts = os.readlink, list[str]()

    def look_and_change(path: str) -> str:
        name = look(path)
        os.dup2(reading, number)
        return name

    def open_it() -> None:
        with pytest.raises(FileNotFoundError) as caught:
            msgspec.structs.replace(held, fd=number).open(os.O_RDONLY)
        texts.append(str(caught.value))

    monkeypatch.setattr(os, "readlink", look_and_change)
    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert len(texts) == 1
    assert "is another file now" in texts[0]
    for fd in (number, reading):
        os.close(fd)
