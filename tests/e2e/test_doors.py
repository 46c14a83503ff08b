"""By which doors a deployment could be reached: SECURITY.md lists them all, and strangers get through none."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from another_user import as_nobody, intrude, needs_root
from deployments import Launch, Running
from doors import documented_doors, doors_of
from nixl_rig import HAS_NIXL
from soak.strangers import besiege, heap_of, run_directories_of

CROWD = 25
PUSH = ("--connector", "multi", "--connector-config", "connectors=p2p,shared_memory")
CONNECTORS = {"push": PUSH, **({"nixl": ("--connector", "nixl")} if HAS_NIXL else {})}


@pytest.fixture(scope="module")
def houses(module_launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Running]:
    """One deployment for each way; that of pushes has fronts, its decode engine, with two ranks, on TCP, and doors for
    engines that join and for readers of its KV events.
    """
    (key := tmp_path_factory.mktemp("doors") / "events.key").touch(mode=0o600)
    key.write_text(uuid.uuid4().hex)
    host = "127.{}.{}.{}".format(*(64 + os.getpid()).to_bytes(3))
    more = ("--join-listen", f"tcp://{host}:6000", "--publish-kv-events", f"tcp://{host}:6001")
    flags = dict.fromkeys(CONNECTORS, ("--prefill", "1", "--decode", "1"))
    flags["push"] = ("--prefill", "1", "--decode", "0", "--router-fronts", "2", *more)
    flags["push"] += ("--publish-kv-events-key-file", str(key))
    engines = {"push": (*PUSH, "--tp", "2")}
    started = {
        name: module_launch(*flags[name], *CONNECTORS[name], wait=False, engine=engines.get(name))
        for name in CONNECTORS
    }
    for deployment in started.values():
        deployment.wait_ready()
    return started


def test_every_door_is_listed_in_security_md_and_every_listed_one_is_there(houses: Mapping[str, Running]) -> None:
    found = {label for deployment in houses.values() for label in doors_of(deployment)}
    assert found <= documented_doors(), "a door that SECURITY.md does not list"
    if HAS_NIXL:
        private = {"memfd: pdkv-weights"}  # on older kernels, and of a model that was written just before
        assert documented_doors() - private <= found, "SECURITY.md lists a door that is not there"


def test_run_directories_are_for_their_owner_alone(houses: Mapping[str, Running]) -> None:
    for deployment in houses.values():
        for run_dir in run_directories_of(deployment):
            assert run_dir.stat().st_mode & 0o777 == 0o700
            assert run_dir.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("name", [n if n == "push" else pytest.param(n, marks=pytest.mark.slow) for n in CONNECTORS])
def test_strangers_disturb_no_answer_and_leave_nothing(houses: Mapping[str, Running], name: str) -> None:
    """Crowds at every door beside a load, datagrams where anybody may send them, and another user's attempts."""
    besiege(houses[name], CROWD)


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of this user that does nothing."""
    program = [sys.executable, "-c", "input('ready')"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        yield process.pid
        # Who traces a process is told of its stop as if it had ended: Popen would neither kill it nor wait for it.
        os.kill(process.pid, signal.SIGKILL)
        while not os.WIFSIGNALED(os.waitpid(process.pid, 0)[1]):
            pass


@needs_root
def test_what_another_user_tries_works_for_who_may(victim: int, tmp_path: Path) -> None:
    """Else that it gets nowhere would show nothing."""
    addresses = [heap_of(victim)]
    worked = intrude([victim], [[0]], addresses, [], str(tmp_path))
    assert {re.sub(r"\d+", "N", what.replace(str(tmp_path), "DIR")) for what in worked} == {
        "list the descriptors of N", "read the environment of N", "see the memory of N", "open the memory of N",
        "copy memory of N", "write memory of N", "trace N", "stop N", "read /proc/N/fd/N", "write /proc/N/fd/N",
        "take descriptor N of N", "list DIR", "write into DIR",
    }  # fmt: skip
    assert as_nobody(partial(intrude, [victim], [[0]], addresses, [], str(tmp_path))) == []
