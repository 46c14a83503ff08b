"""The lifeline ends a child when its launcher is gone, even one that is stuck."""

import os
import subprocess
import sys

from pdkv.launch.lifeline import EXIT_LAUNCHER_GONE

CHILD = """
import os, sys, threading
from pdkv.launch.lifeline import watch_lifeline
stop = threading.Event()
watch_lifeline(int(sys.argv[1]), stop.set, grace_s=float(sys.argv[2]))
os.write(1, b"x")
(stop if sys.argv[3] == "listens" else threading.Event()).wait()
"""


def exit_status(grace_s: float, behaviour: str) -> int:
    read_fd, write_fd = os.pipe()
    arguments = [sys.executable, "-c", CHILD, str(read_fd), str(grace_s), behaviour]
    with subprocess.Popen(arguments, pass_fds=[read_fd], stdout=subprocess.PIPE) as child:
        os.close(read_fd)
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        assert child.poll() is None
        os.close(write_fd)
        return child.wait(timeout=30)


def test_a_child_that_listens_ends_by_itself() -> None:
    assert exit_status(60.0, "listens") == 0


def test_a_stuck_child_is_ended() -> None:
    assert exit_status(0.05, "is stuck") == EXIT_LAUNCHER_GONE
