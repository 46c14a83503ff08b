"""Starting servers to be measured, waiting until they are ready, ending them, and counting their CPU seconds."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from pdkv.config import is_paced

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server(NamedTuple):
    """One that answers."""

    url: str
    model: str  # name in the API
    pid: int
    start_s: float  # from the start of its process to the first healthy answer


def free_port() -> int:
    """A free port; the next one, which an engine takes as well, is free, too."""
    while True:
        with socket.socket() as probe, socket.socket() as following, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            following.bind(("127.0.0.1", port + 1))
            return port


def get(url: str, timeout_s: float = 5.0) -> bytes:
    """The body of an HTTP GET. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        data: bytes = response.read()
        return data


def post(url: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> Any:
    """What a POST of JSON is answered. Raises OSError."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def wait_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait for a 200 of /health.

    Raises:
        RuntimeError: the process ended, or the time did.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            get(url + "/health")
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not become ready (exit status {process.poll()})")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    url: str,
    *,
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
    log: Path | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """A server as a process group of its own; its output goes to a file that is shown if it does not start."""
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as folder:
        log = log or Path(folder) / "log"
        with log.open("wb") as out:
            process = _spawn(command, out, Path(folder), environment or {})
        try:
            if wait:
                wait_healthy(url, process)
            yield process
        except Exception as error:
            error.add_note(f"the end of the log of {url}:\n{_tail(log)}")
            raise
        finally:
            end_process(process)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _spawn(
    command: Sequence[str], out: IO[bytes], folder: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    # Not in the repository: its root folders would shadow packages of the same names (kernels, models) there.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads a session of its own, and whatever it has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # what it started and did not end
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """A signal handler that ends the started servers."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def pdkv(
    model: Path | None, *, prefill: int, decode: int, options: Sequence[str] = (), log: Path | None = None
) -> Iterator[Server]:
    """`pd launch`, ready. `prefill` 0: aggregated engines. `log`: kept there.

    Every prompt is handed off, unless `options` say otherwise.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = launch_arguments(model, prefill, decode, port, options)
    began = time.monotonic()
    with running([sys.executable, "-P", "-m", "pdkv.cli", *command], url, log=log) as process:
        start_s = time.monotonic() - began
        [card] = json.loads(get(url + "/v1/models"))["data"]
        yield Server(url, card["id"], process.pid, start_s)


def launch_arguments(model: Path | None, prefill: int, decode: int, port: int, options: Sequence[str]) -> list[str]:
    """What `pd` is given by `pdkv`."""
    command = ["launch", "--prefill", str(prefill), "--decode", str(decode)]
    command += ["--port", str(port), "--log-level", "warning", "--local-turns", "never", *options]
    if model is not None:
        command += ["--model", str(model if is_paced(model) else model.resolve())]
    return command


class CpuSeconds(NamedTuple):
    """User and system time of a deployment's processes since their starts."""

    engines: dict[str, float]  # by engine name
    router: float

    def since(self, before: "CpuSeconds") -> "CpuSeconds":
        """What was used between two readings."""
        return CpuSeconds({n: s - before.engines[n] for n, s in self.engines.items()}, self.router - before.router)


def cpu_seconds(server: Server) -> CpuSeconds:
    """Read /proc for the engines that /topology names, and for the router."""
    topology: dict[str, Any] = json.loads(get(server.url + "/topology"))
    engines = {engine["name"]: process_cpu_seconds(engine["pid"]) for engine in topology["engines"]}
    return CpuSeconds(engines, process_cpu_seconds(router_pids(server.pid)[0]))


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a Prometheus metric over its labels, but for those given."""
    lines = get(server.url + "/metrics").decode().splitlines()
    own = [line for line in lines if line.startswith(name + "{")]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in own if all(each in line for each in wanted))


def process_cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def router_pids(launcher: int) -> list[int]:
    """The launcher's child that runs the router, or the dispatcher of its fronts, and then the fronts."""
    found: dict[int, bool] = {}
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"pdkv.launch.router_process" in command:
                found[child] = b"\0front-" in command
    if not found:
        raise RuntimeError(f"process {launcher} has no router among its children")
    return sorted(found, key=lambda pid: found[pid])
