"""A front: a process for HTTP and text in front of the dispatcher (docs/fronts.md)."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pdkv.host.sockets import raise_open_files_limit
from pdkv.router.fronts.front_app import FrontApp
from pdkv.router.fronts.remote import RemoteDesk
from pdkv.router.http.app import body_budget
from pdkv.router.http.server.certificates import Tls
from pdkv.router.http.server.connections import Connections, connection_limit
from pdkv.router.metrics.tracing import Tracer
from pdkv.router.process import HttpServer, Stopping, model_of, run_until_stopped, server_config
from pdkv.router.spec import RouterSpec


def run_front(
    spec: RouterSpec, listen_fd: int, lifeline_fd: int | None, dispatcher: Path, on_ready: Callable[[], None]
) -> int:
    """Serve as `run_router` does, by the dispatcher at this socket. `on_ready` is called when one has answered.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: a broken model directory or certificate.
    """
    limits = spec.config.http
    room = Connections(connection_limit(limits.max_connections, raise_open_files_limit(), 0))
    tls = Tls(spec.config.tls) if spec.config.tls.ssl_certfile is not None else None
    bodies, desk = body_budget(limits), RemoteDesk(spec.config.admission.priorities)
    endpoint = spec.config.observability.otlp_endpoint
    tracer = Tracer(endpoint) if endpoint is not None else None
    app = FrontApp(desk, model_of(spec), spec.config, bodies, tracer)
    serving = HttpServer(server_config(app, limits, bodies, room, tls, lifespan="off"))
    stopping = Stopping(serving, desk.close, app.drain, room, spec.drain_s)
    reloads = [tls.reload] if tls is not None else [lambda: None]  # SIGHUP ends nothing
    connected = _connected(desk, dispatcher, on_ready)
    run_until_stopped(serving, socket.socket(fileno=listen_fd), connected, stopping, lifeline_fd, reloads, desk.count)
    app.pool.close()
    if tracer is not None:
        tracer.close()
    return 0


@contextlib.asynccontextmanager
async def _connected(desk: RemoteDesk, path: Path, on_ready: Callable[[], None]) -> AsyncIterator[None]:
    async def announce() -> None:
        await desk.welcomed.wait()
        on_ready()

    tasks = [asyncio.create_task(desk.stay_connected(path)), asyncio.create_task(announce())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
