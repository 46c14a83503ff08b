"""An engine process: build it, then poll, handle, step, send until told to stop. Also the process of any other rank of
an engine.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
import torch

from pdkv.assemble.engine import RankPlace, build_engine, run_rank
from pdkv.base.clock import MONOTONIC
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import check_installed, probe_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.intake import Intake, prepare
from pdkv.engine.step_loop import StepLoop, make_step_loop
from pdkv.errors import ConfigError, RankError
from pdkv.host.linux import set_process_name
from pdkv.launch.acks import Acknowledger, StartGivenUp
from pdkv.launch.cpus import nodes_of
from pdkv.launch.lifeline import EXIT_LAUNCHER_GONE, sweep_if_orphaned, watch_lifeline
from pdkv.launch.logs import configure_logging
from pdkv.launch.run_dir import run_directories
from pdkv.launch.specs import EngineSpec, decode, take_spec
from pdkv.models.shared_weights import shared_in
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft
from pdkv.wire.messages import RouterToEngine

_LIFELINE_GRACE_S = 2.0
_MAX_PIPE_BYTES = 64 * 1024
_PROBE_S = 2.0  # seconds for a store to be found unreachable at the start

logger = logging.getLogger(__name__)

_NEWS, _STEP_ENDED = b"\0", b"\xff"  # bytes in the pipe other than signal numbers


class Notifier:
    """A pipe in the engine's poll set; it wakes the loop from any thread or signal handler."""

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = threading.Event()

    def notify(self) -> None:
        """Wake the loop: there is news. Thread-safe."""
        self._write(_NEWS)

    def step_ended(self) -> None:
        """Wake the loop, which checks for the ends of steps in each of its turns. Thread-safe."""
        self._write(_STEP_ENDED)

    def _write(self, byte: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop will wake in any case
            os.write(self.write_fd, byte)

    def drain(self) -> bool:
        """Consume the notifications so far; returns whether there was news besides the end of a step."""
        try:
            return bool(os.read(self.fd, _MAX_PIPE_BYTES).strip(_STEP_ENDED))
        except BlockingIOError:
            return False

    def stop_on(self, number: signal.Signals) -> None:
        """End the loop on a signal. Call it in the main thread.

        Python runs handlers only between bytecodes: a signal that arrives while ZeroMQ enters its poll would have to
        wait for it. So the signal itself writes into the pipe.
        """
        signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)
        signal.signal(number, lambda *_: self.stop())

    def stop(self) -> None:
        """End the loop after the current step. Thread-safe."""
        self._stopping.set()
        self.notify()

    @property
    def stopping(self) -> bool:
        """Whether the loop must end."""
        return self._stopping.is_set()


class StartPhases:
    """The seconds that each part of a start has taken, as the log shows them."""

    def __init__(self, began: float) -> None:
        self._began = self._at = began
        self._parts: list[str] = []

    def end(self, name: str) -> None:
        """Note that this phase has ended now."""
        now = MONOTONIC.now()
        self._parts.append(f"{name} {now - self._at:.1f} s")
        self._at = now

    def __str__(self) -> str:
        return f"{self._at - self._began:.1f} s: {', '.join(self._parts)}"


def run_engine(spec: EngineSpec, ack_fd: int, lifeline_fd: int, rank_fds: Sequence[int] = ()) -> int:
    """Run one rank of an engine in this process; returns its exit status: 0 after SIGTERM, 1 after an error.

    Args:
        rank_fds: sockets: rank 0 has one to each of the others, another rank one to rank 0; then one to each other
            rank.
    """
    configure_logging(spec.process_name, spec.log_level, spec.log_format)
    set_process_name(f"pd {spec.process_name}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ack = Acknowledger(ack_fd)
    phases = StartPhases(MONOTONIC.now() if spec.asked_at is None else spec.asked_at)
    phases.end("interpreter and imports")
    try:
        ack.wait_known()  # a fork server that died before answering has left a process that would never end otherwise
        _check_connector(spec)
        if spec.cpus is not None:
            os.sched_setaffinity(0, spec.cpus)
        torch.set_num_threads(spec.config.threads or 1)
        _share_weights(spec)
    except StartGivenUp:
        return 1
    except Exception as error:
        ack.failed(error)
        return 1
    sockets = [socket.socket(fileno=fd) for fd in rank_fds]
    for sock in sockets:
        sock.set_inheritable(False)
    try:
        if spec.rank:
            return _run_other_rank(spec, ack, lifeline_fd, sockets)
        return _run_first_rank(spec, ack, lifeline_fd, sockets, phases)
    finally:
        sweep_if_orphaned(lifeline_fd, spec.run_dir)


def _share_weights(spec: EngineSpec) -> None:
    """Let this process share weights with this user's others, or with those that are bound to the same NUMA nodes."""
    if spec.run_dir is None:
        return
    nodes = nodes_of(spec.cpus)
    places = dict.fromkeys([spec.run_dir, *run_directories(of_the_living=True)])
    shared_in.set([place / (f"weights-{nodes}" if nodes else "weights") for place in places])


def _run_first_rank(
    spec: EngineSpec, ack: Acknowledger, lifeline_fd: int, sockets: Sequence[socket.socket], phases: StartPhases
) -> int:
    """Run the engine itself, or the part of it that schedules, samples and talks to routers."""
    notifier = Notifier()
    serving = threading.Event()
    watch_lifeline(
        lifeline_fd,
        lambda: notifier.stop() if serving.is_set() else os._exit(EXIT_LAUNCHER_GONE),
        grace_s=_LIFELINE_GRACE_S,
        run_dir=spec.run_dir,
    )
    names = iter(("configuration", "weights"))

    def on_progress(text: str) -> None:
        phases.end(next(names, text))
        ack.progress(text)

    try:
        key = ClusterKey.read(spec.cluster_key_file) if spec.cluster_key_file is not None else None
        core = build_engine(
            spec.config,
            spec.handoff,
            spec.connector,
            name=spec.name,
            role=spec.role,
            epoch=spec.epoch,
            kv_shards=spec.kv_shards,
            place=_place(spec, sockets, notifier.write_fd),
            notify=notifier.notify,
            on_progress=on_progress,
            on_identity=ack.identified,
        )
        phases.end("KV pool, connector and warm-up")
        if (profiler := core.executor.profiler) is not None:
            profiler.directory, profiler.name = spec.run_dir, spec.name
        card = msgspec.structs.replace(core.card, profiles=profiler is not None and spec.run_dir is not None)
        server = EngineServer(spec.endpoint, card, core.watch, key)
    except StartGivenUp:
        return 1
    except Exception as error:
        ack.failed(error)
        return 1
    _freeze()
    serving.set()
    notifier.stop_on(signal.SIGTERM)
    try:
        phases.end("listening")
        ack.ready()
        logger.info("ready after %s", phases)
        config = spec.config
        serve(core, server, notifier, max_steps_ahead=config.max_steps_ahead, least_s=config.least_step_ahead_s)
    except StartGivenUp:
        return 1
    except RankError as error:
        logger.error("the engine stops: %s", error)
        return 1
    except Exception:
        logger.exception("the engine stops after an error")
        return 1
    finally:
        server.close()
        core.shutdown()
    return 0


def _run_other_rank(spec: EngineSpec, ack: Acknowledger, lifeline_fd: int, sockets: Sequence[socket.socket]) -> int:
    """Run a rank that rank 0 steps. Once ready, it stops when rank 0 says so or is gone, not in the middle of a
    step.
    """
    serving = threading.Event()
    watch_lifeline(
        lifeline_fd,
        lambda: None if serving.is_set() else os._exit(EXIT_LAUNCHER_GONE),  # rank 0 sees it, too, and orders a stop
        grace_s=_LIFELINE_GRACE_S,
        run_dir=spec.run_dir,
    )
    place = _place(spec, sockets)
    assert place is not None, spec

    def on_ready() -> None:
        _freeze()
        serving.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which all ranks get at once
        ack.ready()

    try:
        run_rank(
            spec.config,
            spec.handoff,
            spec.connector,
            name=spec.name,
            epoch=spec.epoch,
            kv_shards=spec.kv_shards,
            place=place,
            on_progress=ack.progress,
            on_identity=ack.identified,
            on_ready=on_ready,
        )
    except StartGivenUp:
        return 1
    except Exception as error:
        if not ack.answered:
            ack.failed(error)
        elif isinstance(error, RankError):
            logger.error("rank %d stops: %s", spec.rank, error)
        else:
            logger.exception("rank %d stops after an error", spec.rank)
        return 1
    return 0


def _place(spec: EngineSpec, sockets: Sequence[socket.socket], wake_fd: int = -1) -> RankPlace | None:
    """How this rank reaches the others; None if it is alone."""
    if spec.store is None:
        return None
    tp = spec.config.tp
    orders = sockets[: 1 - tp]  # the others are for data exchanged between ranks
    return RankPlace(spec.rank, orders, sockets[1 - tp :], spec.store, spec.start_timeout_s, wake_fd)


def _freeze() -> None:
    """Exempt existing objects from later garbage collections."""
    gc.collect()
    gc.freeze()


def _check_connector(spec: EngineSpec) -> None:
    """Refuse a connector that could never join these engines. Raises ConfigError."""
    check_installed(spec.connector)
    if spec.connector.one_process and spec.num_engines > 1:
        raise ConfigError(
            f"connector {spec.connector.name!r} connects only engines in one process, but each of these "
            f"{spec.num_engines} has its own process"
        )
    if spec.rank == 0:
        _probe_connector(spec.connector)


def _probe_connector(connector: ConnectorPlan) -> None:
    """Warn if the connector's medium cannot be reached; the engine starts all the same, since it may come up.

    Raises:
        ConfigError: an error that waiting would not cure.
    """
    failures: list[ConfigError] = []

    def probe() -> None:
        try:
            problem = probe_connector(connector)
        except ConfigError as error:
            failures.append(error)
            return
        if problem:
            logger.warning(
                "connector %s: %s; until it can be reached, prompts are computed instead",
                connector.name, problem,
            )  # fmt: skip

    thread = threading.Thread(target=probe, name="pdkv-probe", daemon=True)  # a server may hang until its deadline
    thread.start()
    thread.join(_PROBE_S)
    if failures:
        raise failures[0]


def serve(
    core: EngineCore, server: EngineServer, notifier: Notifier, *, max_steps_ahead: int = 0, least_s: float = 0.0
) -> None:
    """Run the engine's loop until `notifier.stop()`. Arguments as in `make_step_loop`."""
    intake = Intake(partial(prepare, core.card), notifier.notify)
    steps = make_step_loop(core, max_steps_ahead, notifier.step_ended, least_s)
    try:
        while not notifier.stopping:
            _turn(core, server, notifier, intake, steps)
    finally:
        steps.close()
        intake.close()


def _turn(core: EngineCore, server: EngineServer, notifier: Notifier, intake: Intake, steps: StepLoop) -> None:
    server.poll(steps.wait_s(), notifier.fd)
    if notifier.drain():
        steps.wake()
    now = MONOTONIC.now()
    for router_id, message in server.receive():
        intake.put(router_id, message)
    for router_id, message, prepared in intake.take():
        match message:
            case RouterJoined(epoch=epoch):
                core.router_joined(router_id, epoch)
            case RouterLeft():
                core.router_left(router_id)
            case _:  # invalid messages are counted and dropped there
                core.handle_guarded(router_id, cast(RouterToEngine, message), now, prepared)
    if intake.is_empty:
        server.acknowledge()
    steps.turn()
    for router_id, outgoing in core.take_messages(MONOTONIC.now()):
        server.send(router_id, outgoing)


def main(*fds: str) -> int:
    """The start without a fork server."""
    ack_fd, lifeline_fd, *rank_fds = map(int, fds)
    return run_engine(decode(take_spec(), EngineSpec), ack_fd, lifeline_fd, rank_fds)
