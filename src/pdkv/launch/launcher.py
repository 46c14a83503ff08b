"""`pd launch`: check everything that can be checked, listen, start the fleet, report when it is ready, end it
cleanly.
"""

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from pdkv.base.clock import MONOTONIC
from pdkv.base.secret_options import API_KEY
from pdkv.connectors.registry import check_installed
from pdkv.errors import ConfigError, PdkvError
from pdkv.host.linux import become_subreaper
from pdkv.host.sockets import LISTEN_BACKLOG, raise_open_files_limit
from pdkv.kernels.compiled import isa
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.launch.control import ControlServer
from pdkv.launch.fleet_control import SPIN_VARIABLE, FleetControl
from pdkv.launch.host_memory import HostMemory
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.launch.plan import check_memory, plan_fleet
from pdkv.launch.router_admin import RouterAdmin
from pdkv.launch.run_dir import RunDirectory, sweep_leftovers
from pdkv.launch.supervisor import Fleet, Supervisor
from pdkv.models.config import load_model_config, resolve_max_model_len
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.models.hub import with_local_model
from pdkv.models.shard import Shard
from pdkv.parsers.registry import check_parser_names
from pdkv.router.admission.api_keys import read_keys
from pdkv.router.http.server.certificates import load_context
from pdkv.router.metrics.tracing import check_tracing
from pdkv.router.routing.policies import find_policy
from pdkv.sampling.logits_processors import LOGITS_PROCESSORS
from pdkv.text import load_tokenizer
from pdkv.wire.cluster_key import ClusterKey

_LAST_CHILDREN_S = 1.0
_ROUTER_ANSWER_S = 4.0
"""Seconds for a draining router to answer; one that is stopped is not waited for."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


def launch(deployment: Deployment) -> int:
    """Run a deployment until SIGINT, SIGTERM or SIGHUP; returns the exit code.

    With API keys or TLS, SIGHUP has the router read keys and certificate again, and ends nothing.

    Raises:
        ConfigError: a wrong value, found here or by a child.
        StartupError: a child did not become ready.
    """
    deployment = check_deployment(deployment)

    async def serve(run_dir: RunDirectory, lifeline_fd: int) -> None:
        fleet = plan_fleet(deployment, run_dir)
        with HostMemory(run_dir.path, deployment.tiers.kv_host_memory) as host_memory:
            for spec in fleet.engines:
                host_memory.keep(spec)
            await _serve(deployment, fleet, run_dir, host_memory, listener, lifeline_fd)

    with listen_for(deployment.launch) as listener:
        advise(deployment, listener)
        run_supervised(serve)
    return 0


def check(deployment: Deployment) -> int:
    """Refuse what `launch` would refuse before it starts a process, and print what it would start; returns the exit
    code.

    Raises:
        ConfigError: a wrong value.
    """
    from pdkv.engine.worker.executor import describe_pool  # with torch, which takes seconds

    deployment = check_deployment(deployment)
    with listen_for(deployment.launch) as listener, RunDirectory() as run_dir:
        advise(deployment, listener)
        fleet = plan_fleet(deployment, run_dir)
    assert fleet.router is not None
    engines = [f"  {e.name}: {e.config.threads} CPU threads, {describe_pool(e.config)}" for e in fleet.engines]
    load_tokenizer(deployment.prefill)
    print(
        f"{deployment.shape}: {fleet.router.served_model_names[0]} from {deployment.prefill.model}", *engines, sep="\n"
    )
    return 0


def advise(deployment: Deployment, listener: socket.socket) -> None:
    """Warn of settings that are allowed but seldom intended."""
    if isa() is None:
        logger.warning("compiled kernels are missing: torch computes instead, which is slower on CPUs (docs/cpu.md)")
    has_keys = deployment.router.access.api_key_file is not None or bool(os.environ.get(API_KEY))
    if listener.family == socket.AF_UNIX or has_keys:
        return
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if not address.is_loopback:
        logger.warning(
            "%s can be reached from other hosts, but --api-key-file is not given: everyone may use it", address
        )


def run_supervised(serve: Callable[[RunDirectory, int], Coroutine[Any, Any, None]]) -> None:
    """Run `serve` with a run directory and the reading end of a lifeline; its processes are gone when this returns.

    All signals that end a launch must be blocked when it begins.
    """
    for path in sweep_leftovers():
        logger.info("removed %s, which a killed launch left behind", path)
    raise_open_files_limit()  # of all processes
    become_subreaper()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, _STOP_SIGNALS
    )  # until the loop handles them: the directory must be removed
    lifeline_read, lifeline_write = os.pipe()
    try:
        with RunDirectory() as run_dir:
            try:
                asyncio.run(serve(run_dir, lifeline_read))
            finally:
                os.close(lifeline_write)  # processes unknown to the supervisor end now
                _reap_rest(_LAST_CHILDREN_S)
    finally:
        os.close(lifeline_read)


def check_deployment(deployment: Deployment) -> Deployment:
    """Refuse errors that can be found without a process. Returns the deployment with local models (`with_local_model`).

    Raises ConfigError.
    """
    plan = plan_with_tiers(deployment.handoff, deployment.tiers, Path("/"), "")
    if deployment.launch.prefill or deployment.launch.decode:  # engines of other hosts have packages of their own
        check_installed(plan)
    find_policy(deployment.launch.policy)
    isa()  # PDKV_ISA may name a level that this host has not
    api = deployment.router.api
    check_parser_names(api.tool_parser, api.reasoning_parser, api.tool_parser_plugin)
    if deployment.router.observability.otlp_endpoint is not None:
        check_tracing()
    check_processors(deployment)
    read_keys(deployment.router.access.api_key_file)
    if deployment.launch.cluster_key_file is not None:
        ClusterKey.read(deployment.launch.cluster_key_file)
    if deployment.router.tls.ssl_certfile is not None:
        load_context(deployment.router.tls)
    prefill, decode = with_local_model(deployment.prefill), with_local_model(deployment.decode)
    deployment = dataclasses.replace(deployment, prefill=prefill, decode=decode)
    check_models(deployment)
    check_memory([(prefill, deployment.launch.prefill), (decode, deployment.launch.decode)], deployment.tiers)
    return deployment


def check_models(deployment: Deployment) -> None:
    """Refuse a model that is not computed, ranks that cannot share its heads, lengths beyond its positions, and lengths
    that give prefill and decode different frequencies. Raises ConfigError.

    KV is useless to an engine that rotates queries by other frequencies than its keys were rotated by.
    """
    prefill, decode = deployment.prefill, deployment.decode
    read_sampling_defaults(prefill.model, prefill.generation_config)
    models = []
    for config in (prefill, decode):
        model = load_model_config(config.model, config.max_model_len, config.ignore_config_fields)
        models.append(model.quantized_at_load(config.quantization, config.model))
        if config is decode or deployment.launch.prefill:
            resolve_max_model_len(model, config.max_model_len)
            Shard(0, config.tp).heads(model.num_kv_heads)
    if deployment.launch.prefill and prefill.quantization != decode.quantization:
        raise ConfigError(
            f"prefill engines have --quantization {prefill.quantization or 'none'} and decode engines "
            f"{decode.quantization or 'none'}: KV of one would be useless to the other; give both the same"
        )
    other, rope = (model.rope_scaling for model in models)
    if deployment.launch.prefill and prefill.model == decode.model and rope != other and rope is not None:
        raise ConfigError(
            f"{decode.model}: the RoPE frequencies of this model ({rope.kind} scaling) depend on --max-model-len, but "
            f"prefill engines ({prefill.max_model_len or 'the default'}) and decode engines "
            f"({decode.max_model_len or 'the default'}) would have different ones: give both the same length"
        )


def check_processors(deployment: Deployment) -> None:
    """Refuse an unknown logits processor, and different ones for prefill and decode. Raises ConfigError.

    Prefill draws a request's first token, decode the others.
    """
    prefill, decode = deployment.prefill.logits_processors, deployment.decode.logits_processors
    for name in {**dict.fromkeys(prefill), **dict.fromkeys(decode)}:
        LOGITS_PROCESSORS.target(name)
    if deployment.launch.prefill and {*prefill} != {*decode}:
        raise ConfigError(
            f"prefill engines would have the logits processors {list(prefill)}, but decode engines {list(decode)}: "
            "both draw tokens of every request, so give both the same (--logits-processors)"
        )


def listen_for(options: LaunchConfig) -> contextlib.AbstractContextManager[socket.socket]:
    """The listening socket of a launch. Raises ConfigError."""
    return listen(options.host, options.port) if options.uds is None else listen_at(options.uds)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, which the router inherits.

    Raises:
        ConfigError: the address is unknown, in use or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:  # socket.gaierror is one
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


@contextlib.contextmanager
def listen_at(path: Path) -> Iterator[socket.socket]:
    """A listening unix socket at `path`, which is removed in the end; one left by a killed launch is replaced.

    Raises:
        ConfigError: the path belongs to something else, or the socket cannot be made.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if path.is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                    other.setblocking(False)
                    if other.connect_ex(str(path)) == errno.ECONNREFUSED:
                        path.unlink()
            listener.bind(str(path))
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:  # "AF_UNIX path too long" has no number
            raise ConfigError(f"cannot listen on {path} (--uds): {error.strerror or error}") from None
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


async def _serve(
    deployment: Deployment,
    fleet: Fleet,
    run_dir: RunDirectory,
    host_memory: HostMemory,
    listener: socket.socket,
    lifeline_fd: int,
) -> None:
    """Start the fleet, report that it is ready, and end it when a signal asks for that."""
    on_ready = ReadyLog(len(fleet.engines) + 1)
    supervisor = Supervisor(fleet, listen_fd=listener.fileno(), lifeline_fd=lifeline_fd, on_ready=on_ready)
    control = _make_control(deployment, run_dir, supervisor, host_memory)
    signals = StopSignals(supervisor, reloads=deployment.router.reads_files)
    url = _url(listener, "http" if deployment.router.tls.ssl_certfile is None else "https")
    logger.info("starting %s with %s on %s", deployment.shape, deployment.prefill.model, url)
    try:
        if await start_unless_stopped(supervisor, signals):
            signals.drain_s = deployment.launch.drain_s
            run_dir.introduce(url, deployment.shape)
            async with control.serving(run_dir.path):
                print(f"ready: {url} ({deployment.shape})", flush=True)
                await signals.stopped.wait()
    finally:
        listener.close()  # the router's copy is the last one: with it, nothing listens any more
        await supervisor.stop(signals.drain_s, lambda: _until_stuck(run_dir))
        if signals.stopped.is_set():
            logger.info("stopped")
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # it is ending already


class StopSignals:
    """The first signal asks for a stop, the second one for a quick one, the third one for the end."""

    def __init__(self, supervisor: Supervisor, *, reloads: bool) -> None:
        """The running loop handles the signals from now on. `reloads`: SIGHUP makes the router read its files again
        instead.
        """
        self.stopped = asyncio.Event()
        self.drain_s = 0.0  # until everything is ready, nothing needs to be answered
        self._supervisor = supervisor
        self._hurried = False
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if reloads:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, supervisor.reload_files)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    def _on_signal(self) -> None:
        if not self.stopped.is_set():
            logger.info("stopping")
            self.stopped.set()
        elif self.drain_s and not self._hurried:
            logger.warning("asked to stop again: running requests are cut off")
            self._hurried = True
            self._supervisor.hurry()
        else:
            logger.warning("asked to stop again: killing every process")
            self._supervisor.kill()


async def start_unless_stopped(supervisor: Supervisor, signals: StopSignals) -> bool:
    """Start everything; False: a signal came before all was ready. Raises as `Supervisor.start` does."""
    start = asyncio.create_task(supervisor.start())
    stop = asyncio.create_task(signals.stopped.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
        return start.done()
    finally:
        for task in (start, stop):
            task.cancel()
        await asyncio.gather(start, stop, return_exceptions=True)


class ReadyLog:
    """Logs that a process is ready: first starts with their number, restarts with their duration."""

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first
        self._names: set[str] = set()

    def __call__(self, name: str, seconds: float) -> None:
        """`seconds`: since its start began, or since its predecessor ended."""
        if name in self._names:
            logger.info("%s is ready again, %.1f s after it ended", name, seconds)
            return
        self._names.add(name)
        number = f"{len(self._names)} of {self._num_first}, " if len(self._names) <= self._num_first else ""
        logger.info("%s is ready (%s%.1f s)", name, number, seconds)


async def _until_stuck(run_dir: RunDirectory) -> None:
    """Return if the router cannot be reached any more: it will not drain either."""
    with contextlib.suppress(PdkvError):
        await RouterAdmin(run_dir.path, patience_s=_ROUTER_ANSWER_S).engines()
        await asyncio.Event().wait()


def _make_control(
    deployment: Deployment, run_dir: RunDirectory, supervisor: Supervisor, host_memory: HostMemory
) -> ControlServer:
    """The control server; the first engines get their share of the machine in the same way as later ones."""
    fleet = FleetControl(
        deployment=deployment,
        run_dir=run_dir,
        supervisor=supervisor,
        router=RouterAdmin(run_dir.path),
        host_memory=host_memory,
        chooses_spin=SPIN_VARIABLE not in os.environ,
    )
    fleet.choose_spin(list(supervisor.engines.values()))
    return ControlServer(fleet, deployment.launch.drain_s)


def _url(listener: socket.socket, scheme: str) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _reap_rest(timeout_s: float) -> None:
    """Wait until no child is left: an engine that was being forked at the stop is otherwise unknown."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    deadline = MONOTONIC.now() + timeout_s
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        remaining = deadline - MONOTONIC.now()
        if ended is None and (remaining <= 0 or signal.sigtimedwait({signal.SIGCHLD}, remaining) is None):
            logger.warning("a child process did not end within %g s", timeout_s)
            return
