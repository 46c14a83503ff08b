"""What `pd launch` promises about its processes: ready, restarts, clean ends, nothing left behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from deployments import Launch
from traffic import stop_process

GATED_CONNECTOR = """
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.connectors.shared_memory.options import SharedMemoryOptions
from pdkv.base.options import option

class GatedOptions(SharedMemoryOptions):
    gate: str = option(help="a FIFO")

class Gated(SharedMemoryConnector):
    '''Starts when somebody has written to the FIFO that the option `gate` names.'''
    options_type = GatedOptions

    @classmethod
    def build(cls, config, notify):
        with open(config.plan.options["gate"]) as gate:
            gate.readline()
        return super().build(config, notify)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """The writing end of a FIFO that holds the engine's start up, and the flags and environment that make it do so.

    It is open for reading, too: nobody waits here for an engine that failed before it opened its end.
    """
    (tmp_path / "gated_connector.py").write_text(GATED_CONNECTOR)
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    flags = ["--prefill", "0", "--decode", "1", "--connector", "gated_connector:Gated"]
    end = os.open(fifo, os.O_RDWR)
    yield end, [*flags, "--connector-config", f"gate={fifo}"], {"PYTHONPATH": str(tmp_path)}
    os.close(end)


def test_health_is_503_until_the_ready_line_and_200_from_then_on(
    launch: Launch, gate: tuple[int, list[str], dict[str, str]]
) -> None:
    end, flags, environment = gate
    deployment = launch(*flags, wait=False, environment=environment)
    url = deployment.wait_for_line(r"starting .* on (http://\S+)")[1]
    before = httpx.get(url + "/health", timeout=30)
    assert before.status_code == 503
    assert "error" in before.json()
    os.write(end, b"go\n")
    assert deployment.wait_ready() == f"ready: {url} (1 aggregated, connector gated_connector:Gated)"
    assert httpx.get(url + "/health", timeout=60).status_code == 200


def test_a_stop_during_the_start_is_clean(launch: Launch, gate: tuple[int, list[str], dict[str, str]]) -> None:
    _, flags, environment = gate
    deployment = launch(*flags, wait=False, environment=environment)
    deployment.wait_for_line("allocating")
    assert deployment.stop(signal.SIGINT) == 0


def test_a_kill_during_the_start_leaves_no_process(launch: Launch, gate: tuple[int, list[str], dict[str, str]]) -> None:
    _, flags, environment = gate
    deployment = launch(*flags, wait=False, environment=environment)
    deployment.wait_for_line("allocating")
    assert deployment.stop(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.usefixtures("real_pd")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_it_with_0_while_a_stream_runs(launch: Launch, number: signal.Signals) -> None:
    deployment = launch("--prefill", "1", "--decode", "1", "--drain-s", "0")
    body = {"model": "served", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", deployment.url + "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        next(response.iter_lines())
        assert deployment.stop(number) == 0
    said = [line.partition("launcher: ")[2] for line in deployment.lines]
    assert said.index("stopping") < said.index("stopped")


def test_a_killed_launcher_leaves_no_process_that_was_stopped(launch: Launch) -> None:
    """F24: what is stopped cannot see that the launcher is gone, so the kernel continues it."""
    deployment = launch("--prefill", "1", "--decode", "1")
    children = psutil.Process(deployment.process.pid).children()
    assert len(children) == 4  # the router, the fork server, two engines
    for child in children:
        stop_process(child.pid)
    assert deployment.stop(signal.SIGKILL) == -signal.SIGKILL
    assert not list(deployment.directory.iterdir())


def test_where_all_were_killed_the_next_launch_sweeps(launch: Launch) -> None:
    """F24."""
    deployment = launch("--prefill", "0", "--decode", "1")
    children = psutil.Process(deployment.process.pid).children()
    stop_process(deployment.process.pid)  # or it would start them again
    for child in children:
        child.kill()
    assert deployment.stop(signal.SIGKILL) == -signal.SIGKILL
    (left,) = deployment.directory.iterdir()
    successor = launch("--prefill", "0", wait=False)
    successor.wait_for_line("starting")
    assert not left.exists()
    assert successor.stop() == 0
