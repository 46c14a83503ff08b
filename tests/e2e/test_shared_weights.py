"""Engines of a launch share their weights: tokens are those of transformers, before and after kills."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from equality import Workload, deployed, run_all
from traffic import wait_until_true

from pdkv.host.huge_pages import can_share_huge_pages
from pdkv.kernels.linear import available
from pdkv.models.weight_files import WeightFile

pytestmark = [
    pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed"),
    pytest.mark.skipif(not can_share_huge_pages(), reason="the kernel gives memfds no huge pages"),
]


def inodes(pid: int) -> set[str]:
    """Of the memfds with weights that a process maps; all of these maps are read-only."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "pdkv-weights" in line]
    assert {line[1] for line in lines} <= {"r--s"}
    return {line[4] for line in lines}


def is_settled(path: Path) -> bool:
    """Whether a file is so old that its weights are shared."""
    with contextlib.closing(WeightFile(path)) as file:
        return file.is_settled


def test_one_engine_lays_out_and_the_others_map(workload: Workload) -> None:
    files = list(workload.path.glob("*.safetensors"))
    wait_until_true(lambda: all(map(is_settled, files)), "they are old enough")
    with deployed(workload, "--prefill", "1", "--decode", "2", "--log-level", "info") as deployment:

        def said() -> list[str]:
            return [m[1] for line in deployment.lines if (m := re.search(r"(\S+): .* weights are another", line))]

        names = {"prefill-0", "decode-0", "decode-1"}
        run_all(deployment, workload)
        pids = deployment.pids()
        assert len([line for line in deployment.lines if "laid out to be shared" in line]) == 1
        assert len(said()) == 2
        assert len(set[str]().union(*(inodes(pids[name]) for name in names))) == 1
        (first,) = names - set(said())

        os.kill(pids[first], signal.SIGKILL)
        wait_until_true(lambda: first in said(), "the killed one maps what the others hold")
        wait_until_true(lambda: deployment.pids().get(first) not in (None, pids[first]), "it is back")
        run_all(deployment, workload)
        assert len([line for line in deployment.lines if "laid out to be shared" in line]) == 1

        deployment.stop(signal.SIGKILL)
        assert not deployment.pids_left()
