"""A front: a process for HTTP and text in front of the dispatcher (docs/fronts.md)."""

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pdkv.host.sockets import raise_open_files_limit
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.router.fronts.front_app import FrontApp
from pdkv.router.fronts.remote import RemoteDesk
from pdkv.router.garbage import ShortCollections
from pdkv.router.http.app import body_budget
from pdkv.router.http.server.certificates import Tls
from pdkv.router.http.server.connections import Connections, connection_limit
from pdkv.router.process import SWITCH_S, HttpServer, Stopping, listen_to_signals, loop_factory, server_config
from pdkv.router.spec import RouterSpec
from pdkv.text import load_tokenizer


def run_front(
    spec: RouterSpec,
    *,
    listen_fd: int,
    dispatcher_socket: Path,
    lifeline_fd: int | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve as `run_router` does, by the dispatcher behind this socket. `on_ready` is called when one has answered.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: a broken model directory or certificate.
    """
    config, model, limits = spec.config, spec.model, spec.config.http
    room = Connections(connection_limit(limits.max_connections, raise_open_files_limit(), 0))
    tls = Tls(config.tls) if config.tls.ssl_certfile is not None else None
    bodies = body_budget(limits)
    desk = RemoteDesk(config.admission, limits, bodies)
    app = FrontApp(
        desk,
        load_tokenizer(model),
        load_model_config(model.model, ignored_fields=model.ignore_config_fields),
        spec.served_model_names,
        config=config,
        bodies=bodies,
        sampling_defaults=read_sampling_defaults(model.model, model.generation_config),
        logits_processors=spec.logits_processors,
    )
    serving = HttpServer(server_config(app, limits, bodies, room, tls, lifespan="off"))
    stopping = Stopping(serving, desk, app.drain, room, spec.drain_s)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # objects that live as long as the process need not be examined again
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        reloads = [tls.reload] if tls is not None else [lambda: None]  # SIGHUP ends nothing
        runner.run(_serve(serving, desk, stopping, listen_fd, dispatcher_socket, lifeline_fd, on_ready, reloads))
    app.pool.close()
    return 0


async def _serve(
    serving: HttpServer,
    desk: RemoteDesk,
    stopping: Stopping,
    listen_fd: int,
    dispatcher_socket: Path,
    lifeline_fd: int | None,
    on_ready: Callable[[], None] | None,
    reloads: Sequence[Callable[[], None]],
) -> None:
    listen_to_signals(stopping, lifeline_fd, reloads)
    garbage = ShortCollections(desk.count)
    garbage.start()
    connecting = asyncio.create_task(desk.stay_connected(dispatcher_socket))
    announcing = asyncio.create_task(_announce(desk, on_ready))
    try:
        await serving.serve_on(socket.socket(fileno=listen_fd))
    finally:
        garbage.close()
        for task in (connecting, announcing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _announce(desk: RemoteDesk, on_ready: Callable[[], None] | None) -> None:
    await desk.welcomed.wait()
    if on_ready is not None:
        on_ready()
