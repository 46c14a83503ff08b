"""The router process as `pd launch` starts it, in front of an engine that computes nothing (paced_engine)."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.paced_engine import NAME
from benchmarks.servers import end_process, process_cpu_seconds
from pdkv.config import AdmissionConfig, HttpLimits, RouterConfig
from pdkv.host.sockets import LISTEN_BACKLOG
from pdkv.launch.specs import RouterSpec, encode
from pdkv.router.engines.address import EngineAddress

_ROOT = Path(__file__).parent.parent


class Alone(NamedTuple):
    """A router that is ready, and its one engine."""

    url: str
    model: str
    pid: int
    endpoint: str  # of the engine

    def cpu_seconds(self) -> float:
        """The router's, since its start."""
        return process_cpu_seconds(self.pid)

    def memory_kib(self) -> int:
        """Resident memory of the router that is its own, without pages of files."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
        raise RuntimeError(f"/proc/{self.pid}/status names no RssAnon")


@contextlib.contextmanager
def router_alone(
    model: Path,
    *,
    pace_s: float,
    num_seqs: int,
    max_connections: int | None = None,
    max_queued_requests: int | None = None,
) -> Iterator[Alone]:
    """A router with the default options, but for these two, and an engine whose steps are `pace_s` apart."""
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as folder, contextlib.ExitStack() as stack:
        endpoint = f"ipc://{folder}/engine"
        engine_command = [sys.executable, "-m", "benchmarks.paced_engine", endpoint, str(pace_s), str(num_seqs)]
        engine = stack.enter_context(_process(engine_command, Path(folder, "engine.log"), stdout=subprocess.PIPE))
        assert engine.stdout is not None
        if engine.stdout.readline() != b"ready\n":
            raise RuntimeError("the paced engine did not start")
        http = HttpLimits() if max_connections is None else HttpLimits(max_connections=max_connections)
        queue = AdmissionConfig()
        if max_queued_requests is not None:
            queue = AdmissionConfig(max_queued_requests=max_queued_requests)
        spec = RouterSpec(
            router_id="bench", engines=[EngineAddress(NAME, "any", endpoint)], model=model.resolve(),
            served_model_name="bench", policy="prefix_aware", config=RouterConfig(http=http, admission=queue),
            log_level="info",
        )  # fmt: skip
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG))
        ack, ack_child = socket.socketpair()
        life_read, life_write = os.pipe()
        stack.callback(os.close, life_write)
        fds = [listener.fileno(), ack_child.fileno(), life_read]
        command = [sys.executable, "-m", "pdkv.launch.router_process", *map(str, fds)]
        log = Path(folder, "router.log")
        router = stack.enter_context(_process(command, log, stdin=subprocess.PIPE, pass_fds=fds))
        ack_child.close()
        os.close(life_read)
        assert router.stdin is not None
        with router.stdin:
            router.stdin.write(encode(spec))
        with ack:
            if b"Started" not in ack.recv(1 << 16):
                raise RuntimeError(f"the router did not start:\n{log.read_text(errors='replace')[-2000:]}")
        yield Alone(f"http://127.0.0.1:{listener.getsockname()[1]}", "bench", router.pid, endpoint)


@contextlib.contextmanager
def _process(command: list[str], log: Path, **options: object) -> "Iterator[subprocess.Popen[bytes]]":
    with log.open("wb") as out:
        process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            command, stderr=out, cwd=_ROOT, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        end_process(process)
        if process.stdout is not None:
            process.stdout.close()
