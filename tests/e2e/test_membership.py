"""Engines join a router, leave it, are killed and move to other addresses while clients send requests: none is lost."""

import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Launch, Running
from steady_load import steady_load
from traffic import wait_until_true

ADDRESS = "127.{}.{}.{}".format(*(1 << 21 | os.getpid()).to_bytes(3))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(uuid.uuid4().hex)
    return path


class Engines:
    """`pd engine` processes that are stopped at the end."""

    def __init__(self, model: Path, key: Path) -> None:
        self._shared = ["--model", str(model), "--kv-cache-memory", "8MiB", "--threads", "1", "--drain-s", "20"]
        self._shared += ["--cluster-key-file", str(key), "--join", f"tcp://{ADDRESS}:6999"]
        self._running: list[Running] = []

    def start(self, name: str, role: str, port: int) -> Running:
        directory = Path(tempfile.mkdtemp(prefix="e2e-"))
        place = ["--name", name, "--role", role, "--listen", f"tcp://{ADDRESS}:{port}"]
        self._running.append(Running([*self._shared, *place], {}, directory, command="engine"))
        return self._running[-1]

    @contextlib.contextmanager
    def stopped_at_the_end(self) -> Iterator["Engines"]:
        try:
            yield self
            for engine in self._running:
                assert engine.stopped or engine.stop() == 0, engine.log
        finally:
            for engine in self._running:
                engine.discard()
                shutil.rmtree(engine.directory)


def table(launch: Running) -> dict[str, tuple[str, str]]:
    """State and port of each engine."""
    engines = launch.get("/topology", fresh=False).json()["engines"]
    return {e["name"]: (e["state"], e["endpoint"].rpartition(":")[2]) for e in engines}


@pytest.mark.slow
def test_engines_that_come_and_go_cost_no_request(launch: Launch, served_model: Path, key: Path) -> None:
    router = launch(
        "--prefill", "0", "--decode", "0", "--join-listen", f"tcp://{ADDRESS}:6999", "--cluster-key-file", str(key),
        "--drain-s", "20",
    )  # fmt: skip
    assert router.get("/ready", fresh=False).status_code == 503
    with Engines(served_model, key).stopped_at_the_end() as engines:
        engines.start("p-0", "prefill", 7000)
        first = engines.start("d-0", "decode", 7010)
        wait_until_true(lambda: len(table(router)) == 2, "both have joined")
        with steady_load(router, num_clients=2) as load:
            second = engines.start("d-1", "decode", 7020)
            wait_until_true(lambda: "d-1" in table(router), "another one has joined")
            load.wait_for_answers(3)
            assert first.stop() == 0, first.log  # it leaves
            assert "d-0" not in table(router)
            load.wait_for_answers(3)
            engines.start("d-0", "decode", 7030)  # another address
            wait_until_true(lambda: table(router).get("d-0") == ("ready", "7030"), "it is back elsewhere")
            os.kill(router.pids()["d-1"], signal.SIGKILL)  # its starter has it back
            second.wait_for_line("d-1 is ready again")
            load.wait_for_answers(3)
        twin = engines.start("d-1", "decode", 7040)
        assert twin.finish() == 2
        assert "is named d-1, as the one at" in twin.log
        os.kill(router.child_pid("pd router"), signal.SIGKILL)
        wait_until_true(lambda: {state for state, _ in table(router).values()} == {"ready"}, "all are announced again")
        assert set(table(router)) == {"p-0", "d-0", "d-1"}
        assert router.complete("after all", max_tokens=4).status_code == 200
