"""The launcher of a simulation with an autoscaler: starts and ends simulated engines as the router orders."""

from collections.abc import Callable
from typing import Any

from pdkv.base.clock import Clock
from pdkv.config import AutoscaleConfig
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.operations import Operations
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Scaler
from pdkv.simulate.engine import SimulatedEngine

DRAIN_S, MOVE_S = 30.0, 5.0
"""Seconds that requests of a leaving engine may continue there, and until they have moved after that."""


class ScaledLaunch:
    """Engines that come, change and go; `engine_seconds` counts each from its start to its end.

    Args:
        engines: those that there are, by name.
        make: makes an engine of a name and a role.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        start_s: float,
        dispatcher: Dispatcher,
        admission: Admission,
        clock: Clock,
        engines: dict[str, SimulatedEngine],
        make: Callable[[str, str], SimulatedEngine],
    ) -> None:
        def connect(name: str, role: str) -> SimulatedEngine:
            engines[name] = make(name, role)
            return engines[name]

        self._operations = operations = Operations(dispatcher, connect)
        self.scaler = Scaler(config, dispatcher, admission, operations, clock=clock.now)
        self._clock, self._start_s, self._engines = clock, start_s, engines
        self._starting: dict[str, tuple[str, float]] = {}  # role, and when it will be there
        self._leaving: dict[str, float] = {}  # since when
        self._num_started, self._most = 0, len(engines)
        self._at = clock.now()
        self.engine_seconds = 0.0

    def describe(self) -> dict[str, Any]:
        """Figures of the run, JSON-ready."""
        return {"engine_seconds": self.engine_seconds, "most_engines": self._most} | self.scaler.describe()

    async def run(self) -> None:
        """Carry out orders until this is cancelled."""
        while True:
            self._count()
            told = Told(
                {name: role for name, (role, _) in self._starting.items()}, list(self._leaving),
                num_started=self._num_started, start_s=self._start_s if self._num_started else 0.0,
            )  # fmt: skip
            orders = self.scaler.review(told)
            for role, count in orders.start.items():
                for _ in range(count):
                    self._begin(role)
            for name in orders.keep:
                del self._leaving[name]
                self._operations.resume(name)
            for name in orders.stop:
                self._leaving[name] = self._clock.now()
                self._operations.drain(name)
            await self._clock.pause(orders.pause_s)
            self._settle(self._clock.now())

    def _count(self) -> None:
        now, num = self._clock.now(), len(self._engines) + len(self._starting)
        self.engine_seconds += num * (now - self._at)
        self._at, self._most = now, max(self._most, num)

    def _begin(self, role: str) -> None:
        kind, taken = "engine" if role == "any" else role, self._engines.keys() | self._starting.keys()
        name = next(name for i in range(len(taken) + 1) if (name := f"{kind}-{i}") not in taken)
        self._starting[name] = role, self._clock.now() + self._start_s

    def _settle(self, now: float) -> None:
        """Take in the engines that have started, and end those that have nothing left."""
        for name, (role, at) in list(self._starting.items()):
            if at <= now:
                del self._starting[name]
                self._num_started += 1
                self._operations.add(name, role, role)
        for name, since in list(self._leaving.items()):
            late_s = now - since - DRAIN_S
            if self._operations.describe(name)["drained"] or late_s >= MOVE_S:
                del self._leaving[name]
                self._operations.remove(name, force=True)
                self._engines.pop(name).die()
            elif late_s >= 0:
                self._operations.move_away(name)
