"""Strangers at every door of a deployment under load: no answer is disturbed, nobody is let in, nothing is left.

python -m soak --strangers, once over each connector: every attack of strangers.py on all doors at once, a thousand
connections each, datagrams until nobody takes more, and what another user of the host can try.
"""

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from another_user import as_nobody, flood, intrude
from deployments import Running, launches
from doors import documented_doors, doors_of, processes_of
from equality import check_undisturbed
from serving_checks import read_books, serve_directory
from small_models import make_hf_model
from steady_load import steady_load
from strangers import ATTACKS, CROWD, Crowd
from traffic import wait_for_rest, wait_until_true

from pdkv.connector_kit.rig.sockets import Listener, listeners

MAX_GROWTH_BYTES = 32 << 20
"""What one process may take more than before."""

ANSWERS = 6
"""So many come while the strangers are there."""

ENGINE_ON_TCP = "p2p, an engine on TCP"
CONNECTORS: Mapping[str, tuple[str, ...]] = {
    "shared_memory": ("--connector", "shared_memory"),
    "p2p": ("--connector", "p2p"),
    "p2p tcp": ("--connector", "p2p", "--connector-config", "sockets=tcp"),
    "nixl": ("--connector", "nixl"),
    "nixl push": ("--connector", "nixl", "--connector-config", "mode=push"),
    ENGINE_ON_TCP: ("--connector", "p2p"),
}


class Held(NamedTuple):
    """What a process has."""

    descriptors: int
    threads: int


def main() -> int:
    """Every connector in turn. Returns 1 where something did not hold."""
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        model = serve_directory(make_hf_model(work / "model", "llama", "float32", initializer_range=0.2), work)
        for name, flags in CONNECTORS.items():
            began = time.monotonic()
            try:
                with launches(model) as launch:
                    roles = ("--prefill", "1", "--decode", "0" if name == ENGINE_ON_TCP else "1")
                    deployment = launch(*roles, *flags, engine=flags if name == ENGINE_ON_TCP else None)
                    report = besiege(deployment, CROWD)
            except AssertionError as error:
                num_failed += 1
                report = f"FAILED: {error}"
            print(f"{name}: {report} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if num_failed else 0


def besiege(deployment: Running, crowd_size: int) -> str:
    """Every attack on all doors at once, one after the other; what was seen, in a line.

    Raises:
        AssertionError: an answer or a transfer was disturbed, a process ended, or something was left; or a door is
            not documented.
    """
    num_refused = num_answers = num_taken = 0
    assert doors_of(deployment).keys() <= documented_doors()
    with steady_load(deployment, num_clients=2, max_tokens=8, fresh=True) as load:
        load.wait_for_answers(ANSWERS)  # links are made
    wait_for_rest(deployment)
    pids = [process.pid for process in processes_of(deployment)]
    held, resident = holdings_of(deployment), memory_of(deployment)
    before = read_books(deployment).sources("decode")["remote"]
    for attack in ATTACKS.values():
        with steady_load(deployment, num_clients=2, max_tokens=8, fresh=True) as load, ExitStack() as stack:
            crowds = [stack.enter_context(Crowd(door, crowd_size)) for door in doors_to_attack(deployment)]
            for crowd in crowds:
                attack(crowd)
            if attack.__name__ == "idle":
                num_taken += flood_as_nobody(deployment)
            load.wait_for_answers(ANSWERS)
            num_refused += sum(crowd.num_refused for crowd in crowds)
        num_answers += len(load.answers)
        assert [process.pid for process in processes_of(deployment)] == pids, deployment.log[-4000:]
        wait_until_true(partial(is_within, deployment, held), f"{attack.__name__}: descriptors and threads as before")
    try_as_nobody(deployment)
    wait_for_rest(deployment)
    check_undisturbed(read_books(deployment))
    assert read_books(deployment).sources("decode")["remote"] > before, "no KV has travelled"
    growth = {name: value - resident[name] for name, value in memory_of(deployment).items()}
    assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
    return (
        f"{len(ATTACKS)} attacks on {len(crowds)} doors, {num_refused} connections refused, {num_taken} datagrams "
        f"taken, {num_answers} answers right meanwhile, at most {max(growth.values()) >> 20} MiB taken"
    )


def doors_to_attack(deployment: Running) -> list[Listener]:
    """Stream sockets that listen, without the HTTP API's: that one has soak.clients and soak.http_fuzz."""
    port = urlsplit(deployment.url).port
    found = {door for process in processes_of(deployment) for door in listeners(process.pid)}
    return sorted(door for door in found if door.type == socket.SOCK_STREAM and door.address[1] != port)


def flood_as_nobody(deployment: Running) -> int:
    """Datagrams to all sockets that take them, by another user where this one may become one; how many were taken."""
    found = {door for process in processes_of(deployment) for door in listeners(process.pid)}
    takers = sorted(door for door in found if door.type == socket.SOCK_DGRAM)
    floods = [partial(flood, takers, size) for size in (1, 4096)]
    return sum(as_nobody(flooding) if os.geteuid() == 0 else flooding() for flooding in floods)


def try_as_nobody(deployment: Running) -> None:
    """All that another user of the host can try at the processes. Raises AssertionError where something works."""
    if os.geteuid() != 0:
        return
    pids = [process.pid for process in processes_of(deployment)]
    fds: Sequence[Sequence[int]] = [sorted(map(int, os.listdir(f"/proc/{pid}/fd"))) for pid in pids]
    run_dir, *others = run_directories_of(deployment)
    named = [door for door in doors_to_attack(deployment) if str(door.address).startswith("/")]
    worked = as_nobody(partial(intrude, pids, fds, [heap_of(pid) for pid in pids], named, str(run_dir)))
    for other in others:
        worked += as_nobody(partial(intrude, [], [], [], [], str(other)))
    assert worked == [], worked


def run_directories_of(deployment: Running) -> list[Path]:
    """The launch's, and those of engines elsewhere."""
    pids = [running.process.pid for running in (deployment, *deployment.elsewhere)]
    return [path for pid in pids for path in deployment.directory.glob(f"pdkv-{pid}-*")]


def heap_of(pid: int) -> int:
    """An address of a process that it can write to."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise AssertionError(f"{pid} has no heap")


def holdings_of(deployment: Running) -> dict[str, Held]:
    """Descriptors and threads, by process."""
    return {f"{p.name()} {p.pid}": Held(p.num_fds(), p.num_threads()) for p in processes_of(deployment)}


def memory_of(deployment: Running) -> dict[str, int]:
    """Resident bytes, by process."""
    return {f"{p.name()} {p.pid}": p.memory_info().rss for p in processes_of(deployment)}


def is_within(deployment: Running, before: Mapping[str, Held]) -> bool:
    """Whether no process has more than before."""
    now = holdings_of(deployment)
    return all(mine <= old for name in now for mine, old in zip(now[name], before[name], strict=True))
