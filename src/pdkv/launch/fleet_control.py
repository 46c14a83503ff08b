"""Changes the engines of a running launch: adds, removes or restarts them. No request is lost."""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from pdkv.base.clock import MONOTONIC
from pdkv.errors import ConfigError, PdkvError
from pdkv.launch.config import Deployment
from pdkv.launch.cpus import spin_rounds
from pdkv.launch.devices import keep_devices
from pdkv.launch.host_memory import HostMemory
from pdkv.launch.plan import Kind, check_memory, place_on_hardware, plan_address, plan_engine
from pdkv.launch.router_admin import Refused, RouterAdmin
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.specs import EngineSpec
from pdkv.launch.supervisor import Supervisor
from pdkv.router.engines.address import EngineAddress

Say = Callable[[str], None]

SPIN_VARIABLE = "GOMP_SPINCOUNT"

_LOOK_AGAIN_S = 1.0
"""Seconds between checks, while waiting for an engine, that it is still the same process."""

_NOBODY = 0
"""A pid that no process has."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetControl:
    """Operations on one launch, one after the other, as `control.py` ensures.

    The router knows the role of each engine; the supervisor knows which engines exist.
    """

    deployment: Deployment
    run_dir: RunDirectory
    supervisor: Supervisor
    router: RouterAdmin
    host_memory: HostMemory
    chooses_spin: bool  # whether the spin time of idle threads was left to the launcher

    async def scale(self, counts: Mapping[Kind, int], drain_s: float, say: Say) -> str:
        """Set the numbers of engines of these roles; returns the result in words.

        Raises:
            ConfigError: that number is not possible, or the remaining engines could not serve; nothing was changed.
            PdkvError: an engine did not start (those started before it stay); or an engine could not be drained (others
                to be removed are already gone).
        """
        self._check_own_engines()
        kinds = self._kinds(counts)
        for kind, count in kinds.items():
            if count < 1:
                raise ConfigError(f"{kind} must be at least 1, got {count}: stop the launch to have none")
        engines = await self.router.engines()
        present = self._by_kind(engines)
        more = {kind: count - len(present[kind]) for kind, count in kinds.items()}
        leaving = {kind: present[kind][number:][::-1] for kind, number in more.items() if number < 0}
        _check_rest(
            [name for names in leaving.values() for name in names],
            engines,
            added={kind for kind, number in more.items() if number > 0},
        )
        specs = self.plan(more)
        for spec in specs:
            await self.add(spec, say)
        for names in leaving.values():
            await _all_of(self._remove(name, drain_s, say) for name in names)
        after = self._by_kind(await self.router.engines())
        nouns = {"prefill": "prefill", "decode": "decode", "engine": "aggregated"}
        shape = ", ".join(f"{len(names)} {nouns[kind]}" for kind, names in after.items() if names)
        unchanged = "" if specs or any(number < 0 for number in more.values()) else ": nothing was to be done"
        return f"there are {shape}{unchanged}"

    async def restart(self, drain_s: float, say: Say) -> str:
        """Restart the engines one after the other, each once it is drained; returns the result in words.

        Raises:
            ConfigError: there is only one engine, so its requests would have nowhere to go, or none of this launch.
            PdkvError: an engine did not restart (it is tried again); later ones were not touched.
        """
        self._check_own_engines()
        names = list(self.supervisor.engines)
        if len(names) == 1 and len(await self.router.engines()) == 1:
            raise ConfigError(f"{names[0]} is the only engine: scale up first, or stop the launch and start another")
        self.choose_spin([self._planned_anew(name) for name in names])
        for name in names:
            await self._restart_one(name, drain_s, say)
        return f"{len(names)} engines were restarted"

    def _check_own_engines(self) -> None:
        """Raise ConfigError if this launch has none."""
        if self.deployment.launch.backend:
            raise ConfigError(
                "this launch has only servers of other engines (--backend): start or stop them where they are"
            )

    async def _restart_one(self, name: str, drain_s: float, say: Say) -> None:
        engines = await self.router.engines()
        in_service = any(e["name"] == name and not e["draining"] for e in engines)
        stand_in = _stand_in_for(name, engines) if in_service else None
        if stand_in is not None:
            say(f"{name} is the only one of its role: {stand_in[0]} stands in for it")
            await self.router.set_role(stand_in[0], "any")
        try:
            await self.drain(name, drain_s, say)
            say(f"{name} is started again")
            await self.supervisor.restart_engine(self._planned_anew(name))
            await self._await_ready(name)
        finally:
            try:
                if in_service:  # otherwise an operator drained it, and may want it to stay drained
                    await self.router.resume(name)
            finally:
                if stand_in is not None:
                    await self._give_back(*stand_in)

    async def _give_back(self, name: str, role: str) -> None:
        """Give the stand-in its own role back, unless the engine that it stands in for did not come back."""
        try:
            await self.router.set_role(name, role)
        except Refused as error:
            logger.warning("%s keeps the role any: %s", name, error)

    async def add(self, spec: EngineSpec, say: Say) -> None:
        """Start a planned engine; returns when the router has it. Raises PdkvError, and nothing of it is left."""
        say(f"{spec.name} is started")
        self.host_memory.keep(spec)
        try:
            address = await self.supervisor.add_engine(spec, plan_address(spec, self.run_dir))
        except PdkvError:
            self._forget(spec.name)
            raise
        try:
            await self.router.add(address)
            await self._await_ready(spec.name)
        except PdkvError:
            await self.end(spec.name)
            raise

    async def moved(self, address: EngineAddress) -> None:
        """Tell the router that an engine was started again at another address; its settings stay. Raises PdkvError."""
        before = next((e for e in await self.router.engines() if e["name"] == address.name), None)
        await self.router.remove(address.name)
        await self.router.add(address)
        if before is not None and before["role"] != address.role:
            await self.router.set_role(address.name, before["role"])
        if before is not None and before["draining"]:
            await self.router.drain(address.name, 0.0)

    async def _remove(self, name: str, drain_s: float, say: Say) -> None:
        await self.drain(name, drain_s, say)
        await self.end(name)
        say(f"{name} has ended")

    async def end(self, name: str) -> None:
        """End an engine such that no router takes its end for a death, not even one that is just starting."""
        self.supervisor.hide_engine(name)
        try:
            await self.router.remove(name)
        finally:
            await self.supervisor.remove_engine(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove everything of an engine that has ended for good."""
        self.run_dir.forget(name)
        self.host_memory.give_back(name)

    async def drain(self, name: str, drain_s: float, say: Say) -> None:
        """Wait until the engine has nothing left to do: requests that it still has after its time are moved."""
        say(f"{name} is drained, within {drain_s:g} s")
        engine = await self.router.drain(name, drain_s, move=True)
        if not engine["drained"]:
            say(f"{name} still has {engine['requests']} requests that could not be moved: they will fail when it ends")

    async def _await_ready(self, name: str) -> None:
        """Wait until the router has the current incarnation; if that dies first, the next one is waited for.

        Raises:
            ConfigError: the router does not have it within --start-timeout-s.
        """
        deadline = MONOTONIC.now() + self.deployment.launch.start_timeout_s
        while True:
            pid = self.supervisor.pid_of(name) or _NOBODY
            engine = await self.router.wait_ready(name, pid, min(max(deadline - MONOTONIC.now(), 0.0), _LOOK_AGAIN_S))
            if engine["state"] == "ready" and engine["pid"] == pid:
                return
            if MONOTONIC.now() >= deadline:
                raise ConfigError(f"the router does not accept {name}: {engine['reason'] or engine['state']}")

    def _by_kind(self, engines: Sequence[Mapping[str, Any]]) -> dict[Kind, list[str]]:
        """The launch's engines by their role in the router, oldest first; role "any" is kind "engine"."""
        roles: dict[str, Any] = {e["name"]: e["role"] for e in engines}
        found: dict[Kind, list[str]] = {"prefill": [], "decode": [], "engine": []}
        for name, spec in self.supervisor.engines.items():
            role = roles.get(name, spec.role)
            found["engine" if role == "any" else role].append(name)
        return found

    def _kinds(self, counts: Mapping[Kind, int]) -> dict[Kind, int]:
        """The kinds of a request; if all engines are aggregated, --decode sets their number, as in `pd launch`."""
        if not self.deployment.launch.aggregated:
            return dict(counts)
        if "prefill" in counts:
            raise ConfigError("prefill: this launch only has aggregated engines; use --decode")
        return {"engine": counts["decode"]} if counts else {}

    def plan(self, more: Mapping[Kind, int]) -> list[EngineSpec]:
        """The engines to add. Raises ConfigError if they do not fit."""
        deployment, numbers = self.deployment, {kind: max(number, 0) for kind, number in more.items()}
        num_prefill = numbers.get("prefill", 0)
        num_decode = sum(numbers.values()) - num_prefill
        promised = self.host_memory.num_promised_bytes
        if not deployment.on_ray:
            pools = [(deployment.prefill, num_prefill), (deployment.decode, num_decode)]
            check_memory(pools, deployment.tiers, num_promised_bytes=promised)
        num_engines = len(self.supervisor.engines) + sum(numbers.values())
        num_ranks = self._num_ranks() + num_prefill * deployment.prefill.tp + num_decode * deployment.decode.tp
        specs: list[EngineSpec] = []
        taken = set(self.supervisor.engines)
        for kind, number in numbers.items():
            for _ in range(number):
                index = next(i for i in range(len(taken) + 1) if f"{kind}-{i}" not in taken)
                taken.add(f"{kind}-{index}")
                specs.append(
                    plan_engine(deployment, self.run_dir, kind, index, num_engines=num_engines, num_ranks=num_ranks)
                )
        if any(spec.config.in_host_memory and spec.config.threads != 1 for spec in specs):
            self.choose_spin([*self.supervisor.engines.values(), *specs])  # others do not spin: the fork server stays
        if deployment.on_ray:
            return specs
        running = self.supervisor.engines.values()
        return place_on_hardware(specs, deployment.tiers, running, num_promised_bytes=promised)

    def choose_spin(self, engines: Sequence[EngineSpec]) -> None:
        """Choose the spin time of engines that start from now on, to suit these."""
        rounds = str(spin_rounds([spec.config.threads or 1 for spec in engines for _ in range(spec.config.tp)]))
        if self.chooses_spin and os.environ.get(SPIN_VARIABLE) != rounds:
            os.environ[SPIN_VARIABLE] = rounds
            self.supervisor.renew_environment()  # libgomp has read the old one there; the next start imports anew

    def _planned_anew(self, name: str) -> EngineSpec:
        """The engine with its share of the machine among the current engines."""
        prefix, _, index = name.rpartition("-")
        kind = next(kind for kind in ("prefill", "decode", "engine") if kind == prefix)
        spec = plan_engine(
            self.deployment, self.run_dir, kind, int(index),
            num_engines=len(self.supervisor.engines), num_ranks=self._num_ranks(),
        )  # fmt: skip
        return keep_devices(spec, self.supervisor.engines[name])

    def _num_ranks(self) -> int:
        return sum(spec.config.tp for spec in self.supervisor.engines.values())


async def _all_of(removals: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait until the last one has ended; then raise the error of the first one that failed, if any."""
    results = await asyncio.gather(*removals, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures[1:]:
        logger.error("%s", failure)
    if failures:
        raise failures[0]


def _check_rest(leaving: Collection[str], engines: Sequence[Mapping[str, Any]], added: Collection[Kind]) -> None:
    """Refuse in advance what the router would refuse after some engines have been removed: no engine left for a role.

    Raises:
        ConfigError: of those that serve now, none would be left that can do the work of one of them.
    """
    serving = [e for e in engines if e["serves"]] if leaving else []
    left = {e["role"] for e in serving if e["name"] not in leaving} | {"any" if k == "engine" else k for k in added}
    for role in ("prefill", "decode"):
        if not left & {role, "any"} and any(e["role"] in (role, "any") for e in serving):
            names = ", ".join(leaving)
            raise ConfigError(f"without {names} there would be no engine that can {role} now: wait until one is ready")


def _stand_in_for(name: str, engines: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The engine that must do what no other one can meanwhile, and its own role; None: none is needed."""
    own = next(e["role"] for e in engines if e["name"] == name)
    others = [e for e in engines if e["name"] != name and e["serves"]]
    roles, needed = {e["role"] for e in others}, ("prefill", "decode") if own == "any" else (own,)
    if not others or all(roles & {role, "any"} for role in needed):
        return None
    idlest = min(others, key=lambda e: e["waiting"] + e["running"])
    return idlest["name"], idlest["role"]
