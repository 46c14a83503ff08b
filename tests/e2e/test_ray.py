"""Engines on a Ray cluster of several nodes on this machine: nodes go and come under load, and no request is lost."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from deployments import Launch, Running
from traffic import wait_until_true

from pdkv.launch.control import Scale, give_order

pytestmark = pytest.mark.slow

NUM_CPUS = 3
STORE_BYTES = 80 << 20
ENGINES = ("EngineActor", "engine_process")


class Nodes:
    """A head without CPUs, and nodes of three."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self._nodes = [self.add() for _ in range(2)]

    def add(self) -> Any:
        """Ray gives up after 30 s, which a busy machine may need."""
        for _ in range(2):
            with suppress(Exception):
                return self._cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES)
        return self._cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES)

    def kill(self) -> None:
        """kill -9 of all processes of Ray's on one node."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def shut_down(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    directory = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    nodes = Nodes()
    started = []
    try:
        yield nodes
        wait_until_true(lambda: not below(ENGINES), "no engine is left when its launch has ended")
        started = below(("site-packages/ray/", "ray::", "engine_process"))
    finally:
        nodes.shut_down()
        shutil.rmtree(directory, ignore_errors=True)
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


def below(names: Sequence[str]) -> list[psutil.Process]:
    """Processes below this one with one of these in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            text = " ".join(process.cmdline())
            found += [process] if any(name in text for name in names) else []
    return found


def names(deployment: Running, role: str) -> list[str]:
    engines = deployment.get("/topology", fresh=False).json()["engines"]
    return [e["name"] for e in engines if e["role"] == role and e["state"] == "ready"]


def test_nodes_go_and_come_and_no_request_is_lost(nodes: Nodes, launch: Launch) -> None:
    deployment = launch(
        "--cluster", "ray", "--address", nodes.address, "--prefill", "2", "--decode", "2",
        "--model", "paced:h100", "--served-model-name", "served", "--no-check-finite", "--drain-s", "5",
        "--kv-cache-memory", "256MiB",
    )  # fmt: skip
    (run_dir,) = Path(deployment.directory).glob("pdkv-*")
    over, numbers, statuses = Event(), count(), []

    def ask() -> None:
        while not over.is_set():
            statuses.append(deployment.complete([10 + next(numbers) % 300] * 40, max_tokens=32).status_code)

    def all_there(num_decode: int) -> bool:
        with suppress(OSError):
            return (len(names(deployment, "prefill")), len(names(deployment, "decode"))) == (2, num_decode)
        return False

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            before = deployment.pids()
            nodes.kill()
            nodes.add()
            wait_until_true(
                lambda: all_there(2) and not {*before.values()} <= {*deployment.pids().values()},
                "the engines of the lost node run on another one",
                bound_s=180,
            )
            for num_decode in (3, 1):
                asyncio.run(give_order(run_dir, Scale(decode=num_decode), lambda _: None))
                assert all_there(num_decode)
        finally:
            over.set()
        for client in clients:
            client.result()
    assert len(statuses) > 100
    assert statuses == [200] * len(statuses)


def test_an_engine_that_no_node_can_hold_is_refused_with_both_values(nodes: Nodes, launch: Launch) -> None:
    arguments = ("--cluster", "ray", "--address", nodes.address, "--threads", "4", "--start-timeout-s", "8")
    deployment = launch(*arguments, wait=False)
    assert deployment.finish() == 2
    assert "asks Ray for a node with 4 CPU free" in deployment.log
    assert "6 CPU of all that are free" in deployment.log
