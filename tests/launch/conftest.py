"""Children that stand in for engines: they acknowledge as told and live as long as the lifeline."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pdkv.launch.children import Child, LocalChild
from pdkv.launch.run_dir import RunDirectory

FAKE_CHILD = """
import os, signal, sys
ack_fd, lifeline_fd = map(int, sys.argv[1:3])
behaviour = sys.argv[3]
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "die":
    sys.exit(3)
if behaviour == "refuse":
    os.write(ack_fd, b'{"type":"StartFailed","message":"dtype is wrong","config":true}\\n')
    sys.exit(1)
if behaviour.startswith("miss a rank"):
    held = open(behaviour.split()[-1], "w")
    os.write(ack_fd, b'{"type":"StartFailed","message":"rank 0 went away","config":false,"rank_gone":true}\\n')
if behaviour.startswith("fail behind it"):
    open(behaviour.split()[-1]).read()  # until that one has been heard and ended
    os.write(ack_fd, b'{"type":"StartFailed","message":"no room","config":false}\\n')
    sys.exit(1)
def eat():
    with open(behaviour.split()[-1] + "/cgroup.procs", "w") as group:
        group.write(str(os.getpid()))
    return bytearray(200 << 20)
if behaviour.startswith("eat"):
    eat()
if behaviour == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
if behaviour.startswith("model"):
    os.write(ack_fd, b'{"type":"Identified","model":"%s"}\\n' % behaviour.split()[1].encode())
if behaviour != "silent" and not behaviour.startswith("miss"):
    os.write(ack_fd, b'{"type":"Progress","text":"half"}\\n{"type":"Started"}\\n')
    os.close(ack_fd)
if behaviour.startswith("serve and eat"):
    eat()
os.read(lifeline_fd, 1)
"""


@pytest.fixture
def run_dir() -> Iterator[RunDirectory]:
    with RunDirectory() as directory:
        yield directory


@pytest.fixture
def lifeline() -> Iterator[int]:
    """The reading end of a lifeline; children of the test die with it."""
    read_fd, write_fd = os.pipe()
    yield read_fd
    os.close(write_fd)
    os.close(read_fd)


@pytest.fixture
def fake_child(lifeline: int) -> Callable[[str, int, str], Child]:
    """Starts a stand-in: (name, ack descriptor, behaviour); to be called inside a running loop."""

    def start(name: str, ack_fd: int, behaviour: str) -> Child:
        arguments = [sys.executable, "-c", FAKE_CHILD, str(ack_fd), str(lifeline), behaviour]
        popen = subprocess.Popen(arguments, pass_fds=[ack_fd, lifeline], start_new_session=True)
        return LocalChild(name, popen.pid, popen)

    return start
