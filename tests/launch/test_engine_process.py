"""The engine's loop over a scripted core and socket: what wakes it, what it does with messages, how it ends."""

import contextlib
import math
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.launch import cpus as launch_cpus
from pdkv.launch.engine_process import Notifier, _share_weights, serve
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.specs import EngineSpec
from pdkv.models.shared_weights import shared_in
from pdkv.wire.engine_server import RouterJoined, RouterLeft
from pdkv.wire.messages import Abort
from pdkv.wire.step_watch import StepWatch

ABORT = Abort("r", 0)


class Server:
    """Delivers one script entry per poll; the loop ends behind the last one."""

    def __init__(self, script: list[list[tuple[str, Any]]], notifier: Notifier) -> None:
        self.script = script
        self.notifier = notifier
        self.timeouts: list[float | None] = []
        self.sent: list[tuple[str, list[Any]]] = []
        self.acknowledged = 0

    def poll(self, timeout_s: float | None, extra_fd: int | None = None) -> bool:
        assert extra_fd == self.notifier.fd
        self.timeouts.append(timeout_s)
        return True

    def receive(self) -> list[tuple[str, Any]]:
        received = self.script.pop(0)
        if not self.script:
            self.notifier.stop()
        return received

    def acknowledge(self) -> None:
        self.acknowledged += 1

    def send(self, router_id: str, messages: list[Any]) -> None:
        self.sent.append((router_id, messages))


class Core:
    """Records what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.has_work = False
        self.deadline: float | None = None
        self.outgoing: list[tuple[str, list[Any]]] = []
        self.card: Any = None  # nothing here is hashed ahead
        self.watch = StepWatch()
        self.reports = SimpleNamespace(begin=lambda: False)  # no router asks for one

    def router_joined(self, router_id: str, epoch: str) -> None:
        self.calls.append(("joined", router_id, epoch))

    def router_left(self, router_id: str) -> None:
        self.calls.append(("left", router_id))

    def handle_guarded(self, router_id: str, message: Any, now: float, prepared: Any = None) -> None:
        self.calls.append(("handle", router_id, message))
        self.has_work = True

    def wake(self) -> None:
        self.calls.append("wake")
        self.has_work = True

    def next_deadline(self) -> float | None:
        return self.deadline

    def begin_step(self, now: float) -> None:
        self.calls.append("step")
        self.has_work = False

    def finish_step(self, output: None, now: float) -> None:
        pass

    def take_messages(self, now: float) -> list[tuple[str, list[Any]]]:
        taken, self.outgoing = self.outgoing, []
        return taken


def run(core: Core, script: list[list[tuple[str, Any]]], notifier: Notifier) -> Server:
    server = Server(script, notifier)
    serve(core, server, notifier)  # type: ignore[arg-type]
    return server


@pytest.fixture
def notifier() -> Notifier:
    return Notifier()


def test_messages_and_events_reach_the_core_and_a_step_follows(notifier: Notifier) -> None:
    core = Core()
    core.outgoing = [("a", [ABORT])]
    server = run(core, [[("a", RouterJoined("e1")), ("a", ABORT), ("a", RouterLeft("e1"))]], notifier)
    assert core.calls == [("joined", "a", "e1"), ("handle", "a", ABORT), ("left", "a"), "step"]
    assert server.sent == [("a", [ABORT])]


def test_an_idle_engine_waits_without_a_bound_and_makes_no_step(notifier: Notifier) -> None:
    core = Core()
    server = run(core, [[], []], notifier)
    assert server.timeouts[0] is None
    assert "step" not in core.calls


def test_a_busy_engine_does_not_wait(notifier: Notifier) -> None:
    core = Core()
    core.has_work = True
    server = run(core, [[]], notifier)
    assert server.timeouts == [0.0]
    assert core.calls == ["step"]


def test_a_notification_from_another_thread_brings_a_step(notifier: Notifier) -> None:
    core = Core()
    thread = threading.Thread(target=notifier.notify)
    thread.start()
    thread.join()
    run(core, [[]], notifier)
    assert core.calls == ["wake", "step"]


def test_a_passed_deadline_brings_a_step_and_a_far_one_does_not(notifier: Notifier) -> None:
    core = Core()
    core.deadline = 0.0
    server = run(core, [[]], notifier)
    assert (server.timeouts, core.calls) == ([0.0], ["step"])
    far = Core()
    far.deadline = math.inf
    assert run(far, [[]], Notifier()).timeouts == [math.inf]
    assert far.calls == []


def test_an_exception_of_a_step_ends_the_loop(notifier: Notifier) -> None:
    class Broken(Core):
        def begin_step(self, now: float) -> None:
            raise RuntimeError("the model is broken")

    core = Broken()
    core.has_work = True
    with pytest.raises(RuntimeError, match="the model is broken"):
        run(core, [[]], notifier)


def test_drain_forgets_all_notifications_at_once(notifier: Notifier) -> None:
    assert not notifier.drain()
    notifier.notify()
    notifier.notify()
    assert notifier.drain()
    assert not notifier.drain()
    os.close(notifier.fd)


@pytest.fixture
def stopping(notifier: Notifier) -> Iterator[Notifier]:
    """It stops on SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    notifier.stop_on(signal.SIGUSR1)
    yield notifier
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_wakes_the_loop_before_its_handler_can_run(stopping: Notifier) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)  # as if ZeroMQ's poll kept the interpreter from running it
    signal.raise_signal(signal.SIGUSR1)
    assert stopping.drain()


def test_a_signal_ends_the_loop(stopping: Notifier) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert stopping.stopping


def test_a_full_pipe_is_notified_already(notifier: Notifier) -> None:
    for _ in range(70_000):
        notifier.notify()
    assert notifier.drain()


@pytest.mark.parametrize(
    ("cpu_bind", "cpus", "name"),
    [
        (None, None, "weights"),
        ("0-1", [0, 1], "weights-0"),
        ("auto", [4, 5], "weights-1"),
        ("2-5", [2, 3, 4, 5], "weights-0,1"),
        ("auto", None, "weights"),
    ],
)
def test_weights_are_shared_with_all_launches_but_not_with_other_nodes(
    cpu_bind: str | None, cpus: list[int] | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_cpus, "_NODES", tmp_path)
    for node, text in enumerate(("0-3", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(text)
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch, contextlib.ExitStack() as launches:
        patch.setattr(tempfile, "tempdir", folder)  # its path is short enough for sockets, and no other launch is there
        own, other = (launches.enter_context(RunDirectory()) for _ in range(2))
        config = EngineConfig(device="cpu", cpu_bind=cpu_bind)
        spec = EngineSpec(
            name="a", role="any", epoch="1", config=config, handoff=HandoffConfig(), connector=NO_PLAN, endpoint="",
            num_engines=1, run_dir=own.path, cpus=cpus,
        )  # fmt: skip
        token = shared_in.set(())
        try:
            _share_weights(spec)
            places = shared_in.get()
        finally:
            shared_in.reset(token)
    assert places[0] == own.path / name
    assert sorted(places) == sorted([own.path / name, other.path / name])
