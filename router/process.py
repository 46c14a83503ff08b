"""The router process: uvicorn on an inherited listening socket, in front of a dispatcher."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import uvicorn
import zmq
from starlette.types import ASGIApp

from pdkv.base.clock import MONOTONIC
from pdkv.config import HttpLimits, ModelFiles, is_paced
from pdkv.host.sockets import LISTEN_BACKLOG, raise_open_files_limit
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import log_sampling_defaults, read_sampling_defaults
from pdkv.models.pooling_config import read_pooling
from pdkv.router.admission.api_keys import KeyRing, read_keys
from pdkv.router.engines.backend import Backend
from pdkv.router.engines.engine_client import EngineClient, make_context
from pdkv.router.engines.event_publisher import EventPublisher
from pdkv.router.engines.fleet import FALLBACK, ORDERS
from pdkv.router.engines.foreign_kinds import is_foreign, lacking, read_backend_key, read_source
from pdkv.router.fronts.hall import Hall
from pdkv.router.garbage import ShortCollections
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.membership import MAX_PROPOSALS
from pdkv.router.generations.operations import Operations
from pdkv.router.http.app import create_app, served_model
from pdkv.router.http.pages.admin import LauncherPages
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.certificates import Tls
from pdkv.router.http.server.connections import Connections, connection_limit
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.protocol import LimitedProtocol
from pdkv.router.http.server.tls import TlsGate
from pdkv.router.http.server.turnstile import Turnstile
from pdkv.router.metrics.loop_watchdog import LoopWatchdog
from pdkv.router.metrics.recorder import begin_recording
from pdkv.router.metrics.tracing import Tracer
from pdkv.router.others import taking_others
from pdkv.router.spec import RouterSpec
from pdkv.text import load_tokenizer
from pdkv.wire.cluster_key import ClusterKey

if TYPE_CHECKING:
    from pdkv.router.engines.foreign import Terms

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long a computing thread keeps the interpreter when the event loop wants it (Python's default: 5 ms). The loop
asks for it again after each system call, so next to one busy thread it would do 200 system calls a second.
"""

_WAITING_S = 10.0
"""Seconds between log lines of a router that is not ready yet, naming the engines it waits for."""

FALLBACK_FIRST_TOKEN_S = 30.0
"""Seconds for a first token of another deployment: then the request comes back."""

SHUTDOWN_S = 1
"""How long connections may take to end after a stop, once nothing is left to answer or the time for it is over; then
they are cut. The launcher kills a router 2 s after that."""


class Serving(Protocol):
    """What a process serves."""

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `stop`."""

    def stop(self) -> None:
        """End that. Idempotent."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: they end the process with the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `stop`."""
        await self.serve(sockets=[listener])

    def stop(self) -> None:
        """End that. Idempotent."""
        self.should_exit = True


def run_router(
    spec: RouterSpec,
    *,
    listen_fd: int,
    lifeline_fd: int | None = None,
    admin_socket: Path | None = None,
    marks_file: Path | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM, or until the lifeline's writer is gone; must be called in the main thread.

    After SIGTERM no new requests are taken, and running ones may continue for `spec.drain_s`; a second SIGTERM ends
    them at once. Operators are served on `admin_socket`; their settings are kept in `marks_file` (`Operations`).
    Engines at tcp:// endpoints must have the key of `spec.cluster_key_file`, if it is given.

    `listen_fd` is a bound, listening socket: clients connect there, or fronts, if there are any (docs/fronts.md).
    `on_ready` is called once: when every engine has been ready, or without `spec.await_all` when a prompt can be run
    and decoded. Requests before that are answered with 503 if they lack an engine.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: an unknown policy, a broken model directory, or engines that cannot work together.
    """
    config = spec.config
    new_dispatcher = functools.partial(
        Dispatcher,
        policy=spec.policy,
        orders=spec.orders or ORDERS,
        recovery=config.recovery,
        health=config.health,
        reuse=config.reuse,
        explain_share=config.observability.explain_share,
        fallback_wait_s=spec.fallback_wait_s,
    )
    dispatcher = new_dispatcher(await_all=spec.await_all and bool(spec.engines), identity=spec.identity)
    for pool in spec.pools:
        dispatcher.pools.add(pool.name, pool.served_model_names, new_dispatcher(await_all=False))
    dispatcher.pools.split(spec.split)
    for each in dispatcher.pools:
        each.fleet.awaits_others = spec.takes_others
    context = make_context()

    cluster_key = ClusterKey.read(spec.cluster_key_file) if spec.cluster_key_file is not None else None

    served = model_of(spec)
    terms = functools.cache(functools.partial(_foreign_terms, spec, served, context))

    def make_client(name: str, endpoint: str) -> Backend:
        if is_foreign(endpoint):
            from pdkv.router.engines.foreign import ForeignEngine  # with httpx, which is an extra

            return ForeignEngine(name, endpoint, terms() if name != FALLBACK else _fallback_terms(spec, terms()))
        key = cluster_key if endpoint.startswith("tcp://") else None
        return EngineClient(name, endpoint, router_id=spec.router_id, context=context, key=key)

    if (events := config.observability.publish_kv_events) is not None:
        events_key = config.observability.publish_kv_events_key_file
        key = ClusterKey.read(events_key) if events_key is not None else None
        dispatcher.listener.publisher = EventPublisher(events, key)
    for engine in spec.engines:
        backend = make_client(engine.name, engine.endpoint)
        dispatcher.add_backend(backend, engine.role, engine.refusal, endpoint=engine.endpoint, source=engine.source)
    if (there := spec.fallback) is not None:
        dispatcher.add_backend(make_client(there.name, there.endpoint), there.role, endpoint=there.endpoint)
        dispatcher.fallback.defaults = served.sampling_defaults
    log_sampling_defaults(spec.model.model, served.sampling_defaults)
    limits = config.http
    num_engines = len(spec.engines) + MAX_PROPOSALS * spec.takes_others
    max_connections = connection_limit(limits.max_connections, raise_open_files_limit(), num_engines)
    key_file = config.access.api_key_file
    names = [name for model in (served, *served.others) for name in model.names]
    keys = KeyRing(key_file, models=names) if read_keys(key_file) else None
    tls = Tls(config.tls) if config.tls.ssl_certfile is not None else None
    operations = Operations(dispatcher, make_client, marks_file)
    seen = config.observability
    tracer = Tracer(seen.otlp_endpoint) if seen.otlp_endpoint is not None and not spec.num_fronts else None
    watchdog = LoopWatchdog(seen.loop_watchdog_ms / 1e3) if seen.loop_watchdog_ms else None
    recorder = begin_recording(seen, spec.served_model_names[0], is_restart=not spec.await_all)
    app = create_app(
        dispatcher,
        served,
        config=config,
        keys=keys,
        operations=operations,
        tracer=tracer,
        watchdog=watchdog,
        recorder=recorder,
    )
    room = Connections(max_connections)
    serving: Serving
    if not spec.num_fronts:
        serving = HttpServer(server_config(app, limits, app.state.bodies, room, tls))
    else:
        state = app.state
        serving = Hall(
            dispatcher, state.admission, state.metrics, state.drain, keys, app, limits.max_answer_memory, recorder,
            seen.otlp_endpoint is not None,
        )  # fmt: skip
    launchers = LauncherPages(dispatcher, operations, app.state.caches, app.state.scaler).app(app.state.figures)
    admin = _serving(launchers, admin_socket) if admin_socket is not None else contextlib.nullcontext()
    others: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if spec.takes_others:
        assert cluster_key is not None, "without the key, any process could join"
        others = taking_others(spec, dispatcher, operations, cluster_key, context)
    reloads = [source.reload for source in (keys, tls) if source is not None]
    stopping = Stopping(serving, dispatcher.close, app.state.drain, room, spec.drain_s)
    running = _running(dispatcher, admin, others, stopping, on_ready, watchdog)
    try:
        run_until_stopped(
            serving, socket.socket(fileno=listen_fd), running, stopping, lifeline_fd, reloads,
            lambda: (dispatcher.pools.num_running, sum(each.counters.started for each in dispatcher.pools)),
        )  # fmt: skip
    finally:
        for instrument in (watchdog, tracer, recorder):
            if instrument is not None:
                instrument.close()
        context.term()
    return 0


def server_config(
    app: ASGIApp,
    limits: HttpLimits,
    bodies: ByteBudget,
    room: Connections,
    tls: Tls | None = None,
    *,
    lifespan: Literal["auto", "off"] = "auto",
) -> uvicorn.Config:
    """The configuration of uvicorn with pdkv's limits and TLS; `bodies` is the application's budget, `room` admits
    connections.
    """
    plain = functools.partial(LimitedProtocol, limits=limits, room=room, bodies=bodies, turnstile=Turnstile())

    def gate(*args: Any, **kwargs: Any) -> asyncio.Protocol:
        assert tls is not None
        return TlsGate(plain(*args, **kwargs), tls, room, limits.header_timeout_s)

    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], plain if tls is None else gate),
        ws="none",
        lifespan=lifespan,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # a client may send any X-Forwarded-For
        timeout_keep_alive=cast(int, limits.idle_timeout_s),  # seconds for loop.call_later: fractions are fine
        timeout_graceful_shutdown=SHUTDOWN_S,
        backlog=LISTEN_BACKLOG,  # uvicorn listens anew
    )


@contextlib.asynccontextmanager
async def _serving(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """Serve the operators' application on a unix socket, which may exist if a predecessor was killed."""
    server = HttpServer(
        uvicorn.Config(
            app, uds=str(path), ws="none", lifespan="off", access_log=False, log_config=None, log_level="warning",
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )  # fmt: skip
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await task


class Stopping:
    """Ends the router: at once, or when all requests are answered and the answers sent."""

    def __init__(
        self, serving: Serving, cut: Callable[[], None], drain: Drain, room: Connections, drain_s: float
    ) -> None:
        """`cut` ends all requests in progress; idempotent."""
        self._serving = serving
        self._cut = cut
        self._drain = drain
        self._room = room
        self._drain_s = drain_s
        self._task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """Handle SIGTERM: the first one lets requests end, the second one does not."""
        if self._task is not None or not self._drain_s:
            self.now()
        else:
            self._drain.begin()
            self._task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        deadline = MONOTONIC.now() + self._drain_s
        num_requests = self._drain.num_requests
        if num_requests:
            logger.info("stopping: %d requests still run, at most %g s", num_requests, self._drain_s)
        if not await self._drain.wait_idle(self._drain_s):
            logger.warning(
                "%d requests did not end within %g s and are cut off", self._drain.num_requests, self._drain_s
            )
        elif num_unsent := await self._room.send_rest(max(deadline - MONOTONIC.now(), 0.0)):
            logger.warning(
                "%d clients did not read their answers within %g s and are cut off", num_unsent, self._drain_s
            )
        self.now()

    def now(self) -> None:
        """Cut off everything that still runs. Idempotent."""
        self._drain.begin()
        self._cut()
        self._serving.stop()


def listen_to_signals(stopping: Stopping, lifeline_fd: int | None, reloads: Sequence[Callable[[], None]]) -> None:
    """Stop for SIGTERM or when the launcher is gone, and reload for SIGHUP, in the running loop."""
    loop = asyncio.get_running_loop()

    def lifeline_readable() -> None:
        assert lifeline_fd is not None
        if not os.read(lifeline_fd, 1):
            loop.remove_reader(lifeline_fd)
            logger.warning("the launcher is gone")
            stopping.now()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; it sends SIGTERM
    loop.add_signal_handler(signal.SIGTERM, stopping.on_signal)
    if reloads:
        loop.add_signal_handler(signal.SIGHUP, lambda: [reload() for reload in reloads])
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, lifeline_readable)


def model_of(spec: RouterSpec) -> ServedModel:
    """The model as requests may use it, with those of pools. Raises ConfigError for a broken model directory."""
    others = [
        dataclasses.replace(_model_of(spec, pool.model, pool.served_model_names), pool=pool.name) for pool in spec.pools
    ]
    return dataclasses.replace(_model_of(spec, spec.model, spec.served_model_names), others=others)


def _model_of(spec: RouterSpec, files: ModelFiles, names: Sequence[str]) -> ServedModel:
    return served_model(
        load_tokenizer(files),
        load_model_config(files.model, ignored_fields=files.ignore_config_fields),
        names,
        api=spec.config.api,
        sampling_defaults=read_sampling_defaults(files.model, files.generation_config),
        logits_processors=spec.logits_processors,
        lacks={"pooling": str(files.model)} if is_paced(files.model) else lacking(spec.engines),
        pooling=read_pooling(files.model, spec.config.api.pooling),
    )


def _foreign_terms(spec: RouterSpec, served: ServedModel, context: "zmq.Context[zmq.Socket[bytes]]") -> "Terms":
    """What this router wants of servers of other engines. Raises ConfigError for a key that cannot be read."""
    from pdkv.router.engines.foreign import Terms

    return Terms(
        tokenizer=served.tokenizer,
        vocab_size=served.vocab_size,
        num_positions=served.max_model_len,
        max_model_len=spec.backend_model_len,
        names=tuple(served.names),
        max_num_seqs=spec.backend_num_seqs,
        key=read_backend_key(spec.backend_key_file) if spec.backend_key_file is not None else "",
        kv_events={name: read_source(text) for name, text in spec.backend_kv_events.items()},
        context=context,
    )


def _fallback_terms(spec: RouterSpec, terms: "Terms") -> "Terms":
    """What it wants of another deployment. Raises ConfigError as `_foreign_terms`."""
    file = spec.fallback_key_file
    key = read_backend_key(file, "fallback") if file is not None else ""
    terms = dataclasses.replace(terms, max_model_len=None, kv_events={}, first_token_s=FALLBACK_FIRST_TOKEN_S)
    return dataclasses.replace(terms, key=key, role=FALLBACK, num_hops=1)


def run_until_stopped(
    serving: Serving,
    listener: socket.socket,
    running: contextlib.AbstractAsyncContextManager[None],
    stopping: Stopping,
    lifeline_fd: int | None,
    reloads: Sequence[Callable[[], None]],
    count: Callable[[], tuple[int, int]],
) -> None:
    """Serve, within `running`, until `stopping` ends it; `count`: of `ShortCollections`."""

    async def serve() -> None:
        garbage = ShortCollections(count)
        garbage.start()
        listen_to_signals(stopping, lifeline_fd, reloads)
        try:
            async with running:
                await serving.serve_on(listener)
        finally:
            garbage.close()

    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # objects that live as long as the process need not be examined again
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


@contextlib.asynccontextmanager
async def _running(
    dispatcher: Dispatcher,
    admin: contextlib.AbstractAsyncContextManager[None],
    others: contextlib.AbstractAsyncContextManager[None],
    stopping: Stopping,
    on_ready: Callable[[], None] | None,
    watchdog: LoopWatchdog | None,
) -> AsyncIterator[None]:
    if watchdog is not None:
        watchdog.start()
    dispatcher.connect()
    announcement = asyncio.create_task(_announce(dispatcher, on_ready))
    announcement.add_done_callback(lambda task: stopping.now() if not task.cancelled() and task.exception() else None)
    try:
        async with admin, others:
            yield
    finally:
        dispatcher.close()
        announcement.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcement


async def _announce(dispatcher: Dispatcher, on_ready: Callable[[], None] | None) -> None:
    ready = asyncio.ensure_future(dispatcher.listener.wait_ready())
    try:
        while not (await asyncio.wait({ready}, timeout=_WAITING_S))[0]:
            late = [f"{e.name} {e.condition}" for e in dispatcher.fleet.own() if e.life != "ready"]
            logger.info("waiting for engines: %s", ", ".join(late))
        ready.result()
    finally:
        ready.cancel()
    if on_ready is not None:
        on_ready()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's if it is installed."""
    if sys.platform != "linux":
        return None
    import uvloop

    return uvloop.new_event_loop
