"""Weights are in the page cache before an engine asks for them."""

import os
from pathlib import Path

import pytest
from traffic import wait_until_true

from pdkv.config import DEFAULT_MODEL
from pdkv.launch.pre_read import pre_read


def is_cached(fd: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size - 1, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_weights_are_read_ahead(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((DEFAULT_MODEL / "model.safetensors").read_bytes())
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(file.fileno()):
            pytest.skip("this file system keeps its pages")
        pre_read(tmp_path).join()
        wait_until_true(lambda: is_cached(file.fileno()), "the last page is in memory")


def test_what_is_no_model_is_left_to_the_engine(tmp_path: Path) -> None:
    pre_read(tmp_path / "nothing").join()
