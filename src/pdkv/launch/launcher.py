"""`pd launch`: check everything that can be checked, listen, start the fleet, say when it is ready, end it cleanly."""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import time

from pdkv.config import DEFAULT_MODEL, EngineConfig
from pdkv.connectors.registry import connector_target
from pdkv.errors import ConfigError
from pdkv.host.linux import become_subreaper
from pdkv.host.memory_limits import check_host_memory, format_bytes
from pdkv.launch.config import Deployment
from pdkv.launch.cpus import default_threads, spin_rounds, split_cpu_bind
from pdkv.launch.run_dir import RunDirectory, sweep_leftovers
from pdkv.launch.specs import EngineAddress, EngineSpec, Role, RouterSpec
from pdkv.launch.supervisor import Fleet, Supervisor
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.router.keys import read_key_file
from pdkv.router.policies import find_policy

_BACKLOG = 4096
_DEFAULT_NAME = "pdkv-default"  # of the embedded model in the API
_LAST_CHILDREN_S = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


def launch(deployment: Deployment) -> int:
    """Run a deployment until SIGINT, SIGTERM or SIGHUP; returns the exit code.

    Raises:
        ConfigError: a wrong value, found here or by a child.
        StartupError: a child did not become ready.
    """
    check_deployment(deployment)
    listener = listen(deployment.launch.host, deployment.launch.port)
    for path in sweep_leftovers():
        logger.info("removed %s, which a killed launch left behind", path)
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # until the loop handles them: the directory must go
    lifeline_read, lifeline_write = os.pipe()
    try:
        with listener, RunDirectory() as run_dir:
            try:
                fleet = plan_fleet(deployment, run_dir)
                threads = [spec.config.threads or 1 for spec in fleet.engines for _ in range(spec.config.tp)]
                os.environ.setdefault("GOMP_SPINCOUNT", str(spin_rounds(threads)))  # libgomp knows no other way
                asyncio.run(_serve(deployment, fleet, listener, lifeline_read))
            finally:
                os.close(lifeline_write)  # who is not known to the supervisor goes now
                _reap_rest(_LAST_CHILDREN_S)
    finally:
        os.close(lifeline_read)
    return 0


def check_deployment(deployment: Deployment) -> None:
    """Refuse what can be seen to be wrong without a process. Raises ConfigError."""
    connector_target(deployment.handoff.connector)
    find_policy(deployment.launch.policy)
    check_models(deployment)
    check_pools(deployment)
    if deployment.access.api_key_file is not None:
        read_key_file(deployment.access.api_key_file)


def check_models(deployment: Deployment) -> None:
    """Refuse a model that is not computed, and lengths that give prefill and decode different ones. Raises ConfigError.

    KV is of no use to an engine that rotates queries by other frequencies than its keys were rotated by.
    """
    prefill, decode = deployment.prefill, deployment.decode
    read_sampling_defaults(prefill.model, prefill.generation_config)
    rope = load_model_config(decode.model, decode.max_model_len).rope_scaling
    other = load_model_config(prefill.model, prefill.max_model_len).rope_scaling
    if deployment.launch.prefill and prefill.model == decode.model and rope != other and rope is not None:
        raise ConfigError(
            f"{decode.model}: the RoPE frequencies of this model ({rope.kind} scaling) depend on --max-model-len, and "
            f"prefill engines ({prefill.max_model_len or 'the default'}) would have others than decode engines "
            f"({decode.max_model_len or 'the default'}): give both the same length"
        )


def check_pools(deployment: Deployment) -> None:
    """Refuse KV pools that do not fit into this host's memory together: each alone might. Raises ConfigError."""
    engines = [(deployment.prefill, deployment.launch.prefill), (deployment.decode, deployment.launch.decode)]
    pools = [(config.host_kv_bytes, count) for config, count in engines if count and config.in_host_memory]
    sizes = " and ".join(f"{count} KV pool{'s' * (count > 1)} of {format_bytes(size)}" for size, count in pools)
    check_host_memory(sum(size * count for size, count in pools), f"{sizes} (--kv-cache-memory)")


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
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:  # socket.gaierror is one
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def plan_fleet(deployment: Deployment, run_dir: RunDirectory) -> Fleet:
    """Name every process and give it its share of the machine. Raises ConfigError for a wrong --cpu-bind."""
    launch = deployment.launch
    engines: list[EngineSpec] = []
    if launch.prefill:
        engines += _plan_engines(deployment, deployment.prefill, run_dir, "prefill", "prefill", launch.prefill)
        engines += _plan_engines(deployment, deployment.decode, run_dir, "decode", "decode", launch.decode)
    else:
        engines += _plan_engines(deployment, deployment.decode, run_dir, "any", "engine", launch.decode)
    model = deployment.prefill.model
    router = RouterSpec(
        router_id="router",
        engines=[
            EngineAddress(spec.name, spec.role, spec.endpoint, run_dir.path / f"{spec.name}.refused")
            for spec in engines
        ],
        model=model,
        served_model_name=launch.served_model_name
        or (_DEFAULT_NAME if model == DEFAULT_MODEL else model.resolve().name),
        policy=launch.policy,
        generation_config=deployment.prefill.generation_config,
        run_dir=run_dir.path,
        orders=launch.orders,
        log_level=launch.log_level,
        limits=deployment.http,
        api=deployment.api,
        admission=deployment.admission,
        access=deployment.access,
        health=deployment.health,
    )
    return Fleet(
        engines=engines,
        router=router,
        connector_target=connector_target(deployment.handoff.connector),
        start_timeout_s=launch.start_timeout_s,
        use_fork_server=launch.start_method == "fork",
    )


def _plan_engines(
    deployment: Deployment, config: EngineConfig, run_dir: RunDirectory, role: Role, prefix: str, count: int
) -> list[EngineSpec]:
    launch = deployment.launch
    specs = []
    for index, cpus in enumerate(split_cpu_bind(config.cpu_bind, count)):
        own_cpus = max(1, len(cpus) // config.tp) if cpus else None
        threads = config.threads or own_cpus or default_threads(deployment.num_ranks)
        specs.append(
            EngineSpec(
                name=f"{prefix}-{index}",
                role=role,
                epoch="",
                config=dataclasses.replace(config, threads=threads),
                handoff=deployment.handoff,
                endpoint=run_dir.endpoint(f"{prefix}-{index}"),
                num_engines=launch.num_engines,
                run_dir=run_dir.path,
                log_level=launch.log_level,
                cpus=sorted(cpus) if cpus else None,
                kv_shards=deployment.kv_shards,
                store=run_dir.path / f"{prefix}-{index}.ranks" if config.tp > 1 else None,
                start_timeout_s=launch.start_timeout_s,
            )
        )
    return specs


async def _serve(deployment: Deployment, fleet: Fleet, listener: socket.socket, lifeline_fd: int) -> None:
    """Start the fleet, say that it is ready, and end it when a signal asks for that."""
    ready: set[str] = set()

    def on_ready(name: str, seconds: float) -> None:
        if name in ready:
            logger.info("%s is ready again, %.1f s after it ended", name, seconds)
            return
        ready.add(name)
        logger.info("%s is ready (%d of %d, %.1f s)", name, len(ready), len(fleet.engines) + 1, seconds)

    supervisor = Supervisor(fleet, listen_fd=listener.fileno(), lifeline_fd=lifeline_fd, on_ready=on_ready)
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():  # asked twice
            logger.warning("asked to stop again: killing every process")
            supervisor.kill()
        else:
            logger.info("stopping")
        stopped.set()

    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    logger.info("starting %s with %s on %s", deployment.shape, deployment.prefill.model, _url(listener))
    start = asyncio.create_task(supervisor.start())
    stop = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            print(f"ready: {_url(listener)} ({deployment.shape})", flush=True)
            await stop
    finally:
        for task in (start, stop):
            task.cancel()
        await asyncio.gather(start, stop, return_exceptions=True)
        await supervisor.stop()
        if stopped.is_set():
            logger.info("stopped")
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # it is ending already


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reap_rest(timeout_s: float) -> None:
    """Wait until no child is left: an engine whose fork was under way at the stop is known to nobody else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        remaining = deadline - time.monotonic()
        if ended is None and (remaining <= 0 or signal.sigtimedwait({signal.SIGCHLD}, remaining) is None):
            logger.warning("a child process did not end within %g s", timeout_s)
            return
