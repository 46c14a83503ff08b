"""By which doors a deployment could be reached: SECURITY.md lists them all, and another user gets through none."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from another_user import as_nobody, flood, intrude, needs_root
from deployments import Launch, Running
from doors import documented_doors, doors_of, processes_of
from nixl_rig import HAS_NIXL

from pdkv.connector_kit.rig.sockets import Listener, listeners

PROMPTS = [f"Door {i} is shut, and behind it somebody counts. " * 3 for i in range(4)]
CONNECTORS = {
    "push": ("--connector", "multi", "--connector-config", "connectors=p2p,shared_memory", "--decode-tp", "2"),
    **({"nixl": ("--connector", "nixl")} if HAS_NIXL else {}),
}


class House(NamedTuple):
    """A deployment, and what it said to the prompts at first."""

    deployment: Running
    answers: list[list[int]]


@pytest.fixture(scope="module")
def houses(module_launch: Launch) -> Mapping[str, House]:
    """One deployment for each way; links between its engines are there."""
    found = {}
    for name, flags in CONNECTORS.items():
        deployment = module_launch("--prefill", "1", "--decode", "1", *flags)
        found[name] = House(deployment, answers_of(deployment))
    return found


def answers_of(deployment: Running) -> list[list[int]]:
    """Greedy tokens of all prompts, whose KV is computed and travels anew."""
    fields = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "cache_salt": uuid.uuid4().hex}
    replies = [deployment.complete(prompt, **fields) for prompt in PROMPTS]
    assert [reply.status_code for reply in replies] == [200] * len(PROMPTS), replies[0].text
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


def sockets_of(deployment: Running) -> list[Listener]:
    return sorted({door for process in processes_of(deployment) for door in listeners(process.pid)})


def test_every_door_is_listed_in_security_md_and_every_listed_one_is_there(houses: Mapping[str, House]) -> None:
    found = {label for house in houses.values() for label in doors_of(house.deployment)}
    assert found <= documented_doors(), "a door that SECURITY.md does not list"
    if HAS_NIXL:
        assert documented_doors() <= found, "SECURITY.md lists a door that is not there"


def test_run_directories_are_for_their_owner_alone(houses: Mapping[str, House]) -> None:
    for house in houses.values():
        (run_dir,) = house.deployment.directory.glob(f"pdkv-{house.deployment.process.pid}-*")
        assert run_dir.stat().st_mode & 0o777 == 0o700
        assert run_dir.stat().st_uid == os.geteuid()


@needs_root
def test_another_user_gets_through_no_door_but_those_that_nobody_reads(houses: Mapping[str, House]) -> None:
    for name, house in houses.items():
        deployment = house.deployment
        (run_dir,) = deployment.directory.glob(f"pdkv-{deployment.process.pid}-*")
        pids = [process.pid for process in processes_of(deployment)]
        fds = [sorted(map(int, os.listdir(f"/proc/{pid}/fd"))) for pid in pids]
        unix = [door for door in sockets_of(deployment) if isinstance(door.address, str)]
        named = [door for door in unix if str(door.address).startswith("/")]
        nameless = [door for door in unix if door not in named]
        addresses = [heap_of(pid) for pid in pids]
        assert as_nobody(partial(intrude, pids, fds, addresses, named, str(run_dir))) == [], name
        for size in (1, 4096):
            as_nobody(partial(flood, nameless, size))
        assert [process.pid for process in processes_of(deployment)] == pids
        assert answers_of(deployment) == house.answers


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of this user that does nothing."""
    program = [sys.executable, "-c", "input('ready')"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        yield process.pid
        process.kill()


@needs_root
def test_what_is_tried_works_for_who_may(victim: int, tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    addresses = [heap_of(victim)]
    worked = intrude([victim], [[0]], addresses, [], str(tmp_path))
    assert {re.sub(r"\d+", "N", what.replace(str(tmp_path), "DIR")) for what in worked} == {
        "list the descriptors of N", "read the environment of N", "see the memory of N", "open the memory of N",
        "copy memory of N", "write memory of N", "trace N", "stop N", "read /proc/N/fd/N", "write /proc/N/fd/N",
        "take descriptor N of N", "list DIR", "write into DIR",
    }  # fmt: skip
    assert as_nobody(partial(intrude, [victim], [[0]], addresses, [], str(tmp_path))) == []


def heap_of(pid: int) -> int:
    """An address of a process that it can write to."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise AssertionError(f"{pid} has no heap")
