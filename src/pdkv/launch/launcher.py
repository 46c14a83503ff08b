"""`pd launch`: check everything that can be checked, listen, start the fleet, report when it is ready, end it
cleanly.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from pdkv.base.clock import MONOTONIC
from pdkv.errors import PdkvError
from pdkv.host.linux import become_subreaper
from pdkv.host.sockets import raise_open_files_limit
from pdkv.launch.autoscale import LaunchScaler
from pdkv.launch.check import advise, check_deployment
from pdkv.launch.config import Deployment
from pdkv.launch.control import ControlServer
from pdkv.launch.fleet_control import SPIN_VARIABLE, FleetControl
from pdkv.launch.host_memory import HostMemory
from pdkv.launch.listening import listen_for
from pdkv.launch.plan import plan_fleet
from pdkv.launch.router_admin import RouterAdmin
from pdkv.launch.run_dir import RunDirectory, sweep_leftovers
from pdkv.launch.starter import Children, EngineStarter
from pdkv.launch.supervisor import Fleet, Supervisor

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
        settled = await _join_cluster(deployment, run_dir) if deployment.on_ray else deployment
        fleet = plan_fleet(settled, run_dir)
        with HostMemory(run_dir.path, None if settled.on_ray else settled.tiers.kv_host_memory) as host_memory:
            for spec in fleet.engines:
                host_memory.keep(spec)
            await _serve(settled, fleet, run_dir, host_memory, listener, lifeline_fd)

    with listen_for(deployment.launch) as listener:
        advise(deployment, listener)
        run_supervised(serve)
    return 0


def run_supervised(serve: Callable[[RunDirectory, int], Coroutine[Any, Any, None]]) -> None:
    """Run `serve` with a run directory and the reading end of a lifeline; its processes are gone when this returns.

    All signals that end a launch must be blocked when it begins.
    """
    for path in sweep_leftovers():
        logger.info("removed %s, which a killed launch left behind", path)
    raise_open_files_limit()  # of all processes
    become_subreaper()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # processes beside the terminal's foreground may write to it
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


async def _join_cluster(deployment: Deployment, run_dir: RunDirectory) -> Deployment:
    """The deployment with a cluster key, which the routers and engines of several hosts share. Raises ConfigError."""
    from pdkv.launch.ray_actor import write_key
    from pdkv.launch.ray_cluster import connect

    await connect(deployment.launch.address or "auto")
    key_file = deployment.launch.cluster_key_file or write_key(run_dir, secrets.token_hex(32))
    return dataclasses.replace(deployment, launch=dataclasses.replace(deployment.launch, cluster_key_file=key_file))


def _ray_starter(deployment: Deployment) -> Callable[[Children], EngineStarter] | None:
    if not deployment.on_ray:
        return None
    from pdkv.launch.ray_cluster import RayStarter

    assert deployment.launch.cluster_key_file is not None
    key = deployment.launch.cluster_key_file.read_text()
    return lambda children: RayStarter(children, deployment.tiers, key)


async def _serve(
    deployment: Deployment,
    fleet: Fleet,
    run_dir: RunDirectory,
    host_memory: HostMemory,
    listener: socket.socket,
    lifeline_fd: int,
) -> None:
    """Start the fleet, report that it is ready, and end it when a signal asks for that."""
    on_ready = ReadyLog(len(fleet.engines) + 1 + deployment.launch.router_fronts)
    supervisor = Supervisor(
        fleet,
        listen_fd=listener.fileno(),
        lifeline_fd=lifeline_fd,
        on_ready=on_ready,
        make_starter=_ray_starter(deployment),
    )
    control, scaler = _make_control(deployment, run_dir, supervisor, host_memory)
    signals = StopSignals(supervisor, reloads=deployment.router.reads_files)
    url = _url(listener, "http" if deployment.router.tls.ssl_certfile is None else "https")
    logger.info("starting %s with %s on %s", deployment.shape, deployment.prefill.model, url)
    try:
        if await start_unless_stopped(supervisor, signals):
            signals.drain_s = deployment.launch.drain_s
            run_dir.introduce(url, deployment.shape)
            scaling = scaler.running(lambda: control.is_busy) if scaler is not None else contextlib.nullcontext()
            async with control.serving(run_dir.path), scaling:
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
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if reloads:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, supervisor.reload_files)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    def _on_signal(self) -> None:
        if not self.stopped.is_set():
            logger.info("stopping")
            self.stopped.set()
        elif self.drain_s and not self._supervisor.hurried.is_set():
            logger.warning("asked to stop again: running requests are cut off")
            self._supervisor.hurried.set()
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
) -> tuple[ControlServer, LaunchScaler | None]:
    """The control server, and the autoscaler if there is one; the first engines get their share of the machine in the
    same way as later ones.
    """
    fleet = FleetControl(
        deployment=deployment,
        run_dir=run_dir,
        supervisor=supervisor,
        router=RouterAdmin(run_dir.path),
        host_memory=host_memory,
        chooses_spin=SPIN_VARIABLE not in os.environ and not deployment.on_ray,
    )
    supervisor.on_moved = fleet.moved
    fleet.choose_spin(list(supervisor.engines.values()))
    drain_s = deployment.launch.drain_s
    scaler = LaunchScaler(fleet, drain_s) if deployment.router.autoscaling.autoscale else None
    return ControlServer(fleet, drain_s, scaler), scaler


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
