"""The router process: uvicorn on an inherited listening socket, in front of a dispatcher."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import uvicorn
import zmq
from starlette.types import ASGIApp

from pdkv.config import AccessConfig, AdmissionConfig, HealthConfig, HttpApi, HttpLimits
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import Source, log_sampling_defaults, read_sampling_defaults
from pdkv.router.admission import Admission
from pdkv.router.budget import ByteBudget
from pdkv.router.dispatch import Dispatcher
from pdkv.router.engine_client import EngineClient
from pdkv.router.http.app import body_budget, create_app
from pdkv.router.http.connections import Connections, connection_limit, raise_open_files_limit
from pdkv.router.http.limits import LimitedProtocol
from pdkv.router.keys import KeyRing
from pdkv.router.policies import DEFAULT_POLICY
from pdkv.router.state import ORDERS
from pdkv.text import Tokenizer
from pdkv.wire.messages import Order

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1
"""How long connections may take to end after a stop; then they are cut. The launcher kills a router after 2 s."""


class EngineEndpoint(NamedTuple):
    """Where an engine listens."""

    name: str  # unique, such as "prefill-0"
    role: str  # "prefill", "decode" or "any"
    endpoint: str  # ipc:// or tcp://
    refusal: Path | None = None  # where a launcher says why it keeps the engine out (RefusalNote)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they end the process with the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_router(
    *,
    router_id: str,
    listen_fd: int,
    engines: Sequence[EngineEndpoint],
    model: Path,
    served_model_name: str,
    policy: str = DEFAULT_POLICY,
    orders: Sequence[Order] = ORDERS,
    await_all: bool = True,
    limits: HttpLimits | None = None,
    api: HttpApi | None = None,
    admission: AdmissionConfig | None = None,
    access: AccessConfig | None = None,
    health: HealthConfig | None = None,
    generation_config: Source = "auto",
    identity: str = "",
    lifeline_fd: int | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM, or until the writer of the lifeline is gone; call it in the main thread.

    `listen_fd` is a bound, listening TCP socket. `on_ready` is called once: when every engine has been ready, or
    without `await_all` when a prompt can be run and decoded. Requests before that are answered with 503 where they
    lack an engine.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: an unknown policy, a model directory that is broken, or engines that cannot work together.
    """
    dispatcher = Dispatcher(
        policy=policy,
        orders=orders,
        health=health or HealthConfig(),
        await_all=await_all,
        identity=identity,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for engine in engines:
        client = EngineClient(engine.name, engine.endpoint, router_id=router_id, context=context)
        dispatcher.add_backend(client, engine.role, engine.refusal)
    config = load_model_config(model)
    sampling_defaults = read_sampling_defaults(model, generation_config)
    log_sampling_defaults(model, sampling_defaults)
    limits = limits or HttpLimits()
    max_connections = connection_limit(limits.max_connections, raise_open_files_limit(), len(engines))
    bodies = body_budget(limits)
    access = access or AccessConfig()
    keys = KeyRing(access.api_key_file) if access.api_key_file is not None else None
    app = create_app(
        dispatcher,
        Tokenizer.from_dir(model),
        config,
        served_model_name,
        limits=limits,
        api=api,
        bodies=bodies,
        admission=Admission(dispatcher, admission),
        keys=keys,
        access=access,
        sampling_defaults=sampling_defaults,
    )
    server = _Server(server_config(app, limits, bodies, max_connections))
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(server, dispatcher, listen_fd, lifeline_fd, on_ready, keys))
    finally:
        context.term()
    return 0


def server_config(app: ASGIApp, limits: HttpLimits, bodies: ByteBudget, max_connections: int) -> uvicorn.Config:
    """uvicorn with our bounds; `bodies` is the application's budget."""
    protocol = functools.partial(LimitedProtocol, limits=limits, room=Connections(max_connections), bodies=bodies)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=cast(int, limits.idle_timeout_s),  # seconds for loop.call_later: fractions are fine
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


async def _serve(
    server: _Server,
    dispatcher: Dispatcher,
    listen_fd: int,
    lifeline_fd: int | None,
    on_ready: Callable[[], None] | None,
    keys: KeyRing | None,
) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        dispatcher.close()
        server.should_exit = True

    def lifeline_readable() -> None:
        assert lifeline_fd is not None
        if not os.read(lifeline_fd, 1):
            loop.remove_reader(lifeline_fd)
            logger.warning("the launcher is gone")
            stop()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; it sends SIGTERM
    loop.add_signal_handler(signal.SIGTERM, stop)
    if keys is not None:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, lifeline_readable)
    dispatcher.connect()
    announcement = loop.create_task(_announce(dispatcher, on_ready))
    announcement.add_done_callback(lambda task: stop() if not task.cancelled() and task.exception() else None)
    try:
        await server.serve(sockets=[socket.socket(fileno=listen_fd)])
    finally:
        dispatcher.close()
        announcement.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcement


async def _announce(dispatcher: Dispatcher, on_ready: Callable[[], None] | None) -> None:
    await dispatcher.wait_ready()
    if on_ready is not None:
        on_ready()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if sys.platform != "linux":
        return None
    import uvloop

    return uvloop.new_event_loop
