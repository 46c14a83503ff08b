"""Dispatch: adds and monitors engines, and starts requests on them.

`listener.py` receives engines' messages, `driver.py` takes requests to their end or elsewhere.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.base.clock import MONOTONIC
from pdkv.base.options import did_you_mean
from pdkv.base.version import VERSION
from pdkv.config import HealthConfig, RecoveryConfig, ReuseConfig
from pdkv.errors import ConfigError, EngineUnavailable, NoEngine
from pdkv.router.engines.address import read_split
from pdkv.router.engines.backend import Backend
from pdkv.router.engines.capacity import Capacity
from pdkv.router.engines.fleet import ORDERS, Counters, Fleet
from pdkv.router.engines.health import TICK_S
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.driver import Driver
from pdkv.router.generations.fallback import ELSEWHERE, Fallback
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.listener import Listener
from pdkv.router.generations.moves import Mover
from pdkv.router.generations.placement import Placement
from pdkv.router.generations.probes import Prober, probe_request
from pdkv.router.generations.recovery import Recovery
from pdkv.router.request import NOWHERE, Delta, GenerateRequest, PoolNews, Route
from pdkv.router.routing.holdings import Holdings
from pdkv.router.routing.policies import DEFAULT_POLICY
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.router.routing.route_chooser import RouteChooser
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.kv import Order
from pdkv.wire.refusal_note import RefusalNote

__all__ = ["Counters", "Delta", "Dispatcher", "GenerateRequest", "Generation"]

logger = logging.getLogger(__name__)

NO_PROBES = HealthConfig(probe_interval_s=0.0)


class Pools:
    """A router's dispatchers by their engines' model: the launch's own, and pools (docs/membership.md)."""

    def __init__(self, own: "Dispatcher") -> None:
        self.others: dict[str, Dispatcher] = {}  # by pool
        self.shares: dict[str, float] = {}  # percent of the requests for the launch's own model, by pool
        self._names: dict[str, Sequence[str]] = {}
        self._own = own

    def add(self, name: str, names: Sequence[str], dispatcher: "Dispatcher") -> None:
        """Add a pool, whose model has these names."""
        self.others[name], self._names[name] = dispatcher, names

    def __iter__(self) -> "Iterator[Dispatcher]":
        yield self._own
        yield from self.others.values()

    def at(self, name: str) -> "Dispatcher":
        """The dispatcher of a pool; of "", the launch's own. Raises ConfigError for an unknown one."""
        if name and name not in self.others:
            known = did_you_mean(name, self.others) or f"; known: {', '.join(self.others) or 'none'} (--pool)"
            raise ConfigError(f"there is no pool {name!r}{known}")
        return self.others.get(name, self._own)

    def holder(self, engine: str) -> "Dispatcher":
        """The dispatcher that has an engine; of an unknown one, the launch's own."""
        return next((each for each in self.others.values() if engine in each.fleet.engines), self._own)

    def split(self, shares: Mapping[str, float]) -> None:
        """Change the percent of some pools. Raises ConfigError; then nothing has changed."""
        wanted = read_split({**self.shares, **shares}, self.others)
        self.shares = {name: percent for name, percent in wanted.items() if percent}

    def news(self) -> PoolNews:
        """What the preparation of a request depends on."""
        down = (name for name, each in self.others.items() if each.is_down())
        return PoolNews(tuple(each.max_model_len for each in self), tuple(self.shares.items()), tuple(down))

    @property
    def num_running(self) -> int:
        """Generations that have begun and are not over, of all."""
        return sum(each.num_running for each in self)

    @property
    def faults(self) -> dict[str, str]:
        """Why pools run no request now."""
        return {name: each.fault for name, each in self.others.items() if each.fault}

    def add_to(self, topology: dict[str, Any]) -> dict[str, Any]:
        """The topology of the launch's own engines with those of pools."""
        if not self.others:
            return topology
        rows = [engine | {"pool": ""} for engine in topology["engines"]]
        for name, other in self.others.items():
            theirs = other.topology()
            rows += [engine | {"pool": name} for engine in theirs["engines"]]
            topology["pairs"] += theirs["pairs"]
        return topology | {"engines": rows, "pools": [self._describe(name) for name in self.others]}

    def _describe(self, name: str) -> dict[str, Any]:
        other = self.others[name]
        told = {"name": name, "models": list(self._names[name]), "split_percent": self.shares.get(name, 0.0)}
        told["identity"] = other.fleet.identity  # of the model that its engines must have
        return told | {"max_model_len": other.max_model_len, "fault": other.fault, "requests": other.num_running}


class Dispatcher:
    """A router's engines and the requests that run on them. Lives in one event loop."""

    def __init__(
        self,
        *,
        policy: str = DEFAULT_POLICY,
        orders: Sequence[Order] = ORDERS,
        recovery: RecoveryConfig | None = None,
        await_all: bool = True,
        identity: str = "",
        fallback_wait_s: float = 0.0,
        health: HealthConfig = NO_PROBES,
        reuse: ReuseConfig | None = None,
        explain_share: float = 0.0,
        clock: Callable[[], float] = MONOTONIC.now,
        rng: random.Random | None = None,
    ) -> None:
        """`orders` are the hand-off orders by preference; the first that both engines' connectors allow is used.

        `explain_share`: the share of requests whose choices of engines are recorded and logged.

        `fallback_wait_s`: the predicted wait beyond which requests go to another deployment, if one is added.

        `await_all`: the dispatcher is ready only once every engine has been ready; otherwise as soon as a prompt can be
        run and decoded.

        Raises:
            ConfigError: unknown policy.
        """
        limits, reuse = recovery or RecoveryConfig(), reuse or ReuseConfig()
        self.fleet = fleet = Fleet(complete_once=not await_all, identity=identity)
        self.counters = Counters()
        self.index, self.tiers = PrefixIndex(on_work=self._work_on_index_soon), TierIndex()
        self.holdings = Holdings(fleet, self.index, self.tiers, reuse.kv_reuse)
        self.routes = RouteChooser(
            fleet, self.holdings,
            policy=policy, orders=orders, rng=rng or random.Random(), take_over=limits.take_over,
            local_turns=reuse.local_turns,
        )  # fmt: skip
        self.room = Capacity(fleet, take_over=limits.take_over, clock=clock)
        self.recovery = losses = Recovery(limits, fleet, self.counters)
        self.fallback = Fallback(fleet, self.is_down, fallback_wait_s)
        self.prober = Prober(fleet, orders, health.probe_interval_s)
        self.driver = driver = Driver(
            fleet=fleet,
            counters=self.counters,
            room=self.room,
            recovery=losses,
            placing=Placement(self.routes, self.holdings, losses, self.fallback, clock),
            prober=self.prober,
            clock=clock,
        )
        self.listener = Listener(driver, self.index, self.tiers)
        self.mover = Mover(driver, take_over=limits.take_over)
        self.changes, self.delays, self._clock = driver.changes, driver.delays, clock
        self.pools = Pools(self)
        self._described = {"version": VERSION, "policy": policy, "orders": list(orders)}
        self.proposed: Callable[[], list[dict[str, str]]] = list  # addresses of engines that are not admitted
        self._explain_share, self._explain_rng = explain_share, random.Random()
        self._suspects: dict[str, bool] = {}  # engine -> whether it is silent, and therefore no candidate
        self._ticker: asyncio.TimerHandle | None = None
        self._connected = False

    # --- engines --------------------------------------------------------------------------------------------------

    def add_backend(
        self,
        backend: Backend,
        role: str,
        refusal: Path | None = None,
        *,
        endpoint: str = "",
        source: str = "launch",
        is_connected: bool = False,
    ) -> None:
        """Add an engine, at any time. `refusal`: where a launcher writes why it keeps the engine out."""
        self.driver.backends[backend.name] = backend
        note = RefusalNote(refusal) if refusal is not None else None
        self.fleet.add(backend.name, role, note, endpoint=endpoint, source=source)
        if self._connected and not is_connected:
            backend.connect(self.listener)

    def remove_backend(self, name: str) -> None:
        """Disconnect from an engine for good: its work ends or continues elsewhere, as if it had died."""
        self.listener.engine_removed(name)
        self.driver.backends.pop(name).close()
        self.fleet.remove(name)
        self.driver.changed(engines=True)  # nothing waits for its return

    def connect(self) -> None:
        """Connect to all engines, in the running event loop."""
        for pool in self.pools.others.values():
            pool.connect()
        self._connected = True
        self.listener.connected()
        for backend in self.driver.backends.values():
            backend.connect(self.listener)
        self._tick()

    def close(self) -> None:
        """End all generations and disconnect. Idempotent."""
        for pool in self.pools.others.values():
            pool.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self.driver.close()
        self.listener.close()
        self.driver.changed()  # `start` tells the waiters

    @property
    def fault(self) -> str:
        """Why no request can be answered now, in words; empty if one can be."""
        if self.driver.closed:
            return "the router is shutting down"
        if not self.fleet.complete_once:
            missing = [e.name for e in self.fleet.own() if e.life != "ready"]
            return f"still waiting for engines to become ready: {', '.join(missing)}"
        return "" if self.fallback.is_open(self._clock()) else self.fleet.fault

    def is_down(self) -> bool:
        """Whether no engine of this deployment can serve."""
        sides = self.fleet.sides.values()
        serve = [any(engine.serves for engine in members.engines.values()) for members in sides]
        return self.fleet.complete_once and not (any if self.recovery.config.take_over else all)(serve)

    def _tick(self) -> None:
        """Called once per TICK_S of this loop: while the loop is blocked, no engine's silence grows."""
        try:
            self.look_after_engines()
        except Exception:
            if self.driver.log_limit.passes():
                logger.exception("an error while looking after the engines; trying again in %g s", TICK_S)
        finally:
            if not self.driver.closed:
                self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def look_after_engines(self) -> None:
        """One tick of TICK_S: count silence, move requests off suspects, probe idle engines."""
        now = self._clock()
        self.fleet.tick()
        self.fleet.review(now)
        suspects = self.fleet.suspects
        self.mover.tick(suspects, self.driver.generations.values())
        silent = {name: self.fleet.engines[name].is_silent for name in suspects}
        if silent != self._suspects:
            for name in self._suspects.keys() ^ suspects.keys():
                if name in suspects:
                    logger.warning("%s is a suspect: it %s", name, suspects[name])
                    self.fleet.events.note(now, "suspect", name, suspects[name])
                    continue
                logger.info("%s is no longer a suspect", name)
                if self.fleet.is_ready(name):
                    self.fleet.events.note(now, "well", name)
            self._suspects = silent
            self.driver.changed(engines=True)
        self.fallback.look(now)
        if self.fallback.takes_over(now):
            self.driver.changed(engines=True)  # what waits may leave
        if self.listener.ready and (route := self.prober.due(now)) is not None:
            self.driver.begin(self.holdings.of(probe_request(route), now), route, now)

    def _work_on_index_soon(self) -> None:
        """Work on the index in a separate turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._work_on_index)

    def _work_on_index(self) -> None:
        """Do a slice of the index's deferred work; other callbacks have their turn before the next."""
        if not self.driver.closed and self.index.work():
            self._work_on_index_soon()

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt + output in tokens that every decoding engine accepts; None before any was ready. The
        limit of a dead engine still counts, since it may be back before a request admitted meanwhile is run. Prefill
        engines may have lower limits: decode engines run longer prompts by themselves.
        """
        cards = (engine.card for engine in self.fleet.own() if engine.role != "prefill" and not engine.refusal)
        return min((card.max_model_len for card in cards if card is not None), default=None)

    def engines(self) -> list[EngineState]:
        """All of them."""
        return list(self.fleet.engines.values())

    def num_malformed(self, name: str) -> int:
        """Frames and messages of that engine that could not be read."""
        return self.driver.backends[name].num_dropped

    @property
    def connector_problems(self) -> dict[str, str]:
        """Engines whose connector cannot be used now, and why: they still serve, but compute what they would have
        loaded.
        """
        engines = self.fleet.engines.values()
        return {e.name: e.connector_problem for e in engines if e.connector_problem is not None}

    def topology(self) -> dict[str, Any]:
        """The fleet, JSON-ready: {"engines": [each], "pairs": [those whose KV loads fail], "proposed": [addresses that
        are not admitted], "router": {…}}.
        """
        num_requests = Counter(name for g in self.driver.generations.values() for name in g.flow.engines)
        router = self._described | {"indexed_keys": self.index.num_keys, "tiers": self.tiers.describe()}
        now = self._clock()
        engines = [e.describe(now, num_requests[e.name]) | self._step_of(e.name) for e in self.fleet.engines.values()]
        pairs = [{"prefill": prefill, "decode": decode} for prefill, decode in self.fleet.pairs]
        shown = {"engines": engines, "pairs": pairs, "proposed": self.proposed(), "router": router}
        return self.pools.add_to(shown | ({"fallback": there} if (there := self.describe_fallback()) else {}))

    def describe_fallback(self) -> dict[str, Any]:
        """Another deployment, JSON-ready: `Fallback.describe`."""
        return self.fallback.describe(self._clock())

    def describe_engine(self, name: str) -> dict[str, Any]:
        """One engine, JSON-ready: `EngineState.describe`."""
        return self.fleet.engines[name].describe(self._clock(), self.driver.num_requests_on(name))

    def _step_of(self, name: str) -> dict[str, Any]:
        """The time between two tokens, as a line over the requests that decode together; measured on recent ones."""
        fixed_s, request_s = self.fleet.speeds.step_line(name)
        return {"decode_step": {"fixed_s": fixed_s, "request_s": request_s}} if fixed_s and request_s else {}

    # --- generations ----------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Generations that have begun and are not over."""
        return len(self.driver.generations)

    def has_room(self) -> bool:
        """Whether a generation should begin now. Also True if none can run at all: `start` then reports that."""
        return self.driver.closed or not self.fleet.complete_once or self.room.free

    def held_back(self) -> Collection[str]:
        """Digests of the tenants whose generations must wait for their earlier ones to end, although there is room."""
        return self.room.held_back()

    def start(self, request: GenerateRequest, leaves: str = "") -> Generation:
        """Send a request to engines even if there is no room: the caller has checked, or has a reason not to. If a
        fleet that was ready has no engine now, the request waits for one until its deadline. `leaves`: why another
        deployment runs it; "": it stays.

        Raises:
            EngineUnavailable: no engine can take it now.
            GrammarGivenUp: an engine recently gave its grammar up.
        """
        if self.driver.closed:
            raise EngineUnavailable("the router is shutting down")
        now = self._clock()
        self.driver.given_up.check(request.params.grammar, now)
        prompt = self.holdings.of(request, now)
        if self._explain_share and self._explain_rng.random() < self._explain_share:
            prompt.choices = []
        self.fallback.began(leaves)
        prompt.stays = leaves
        try:
            route = ELSEWHERE if leaves else self.routes.choose(prompt, now, may_stay=True)
        except NoEngine:
            if not self.fleet.complete_once:
                raise
            route = NOWHERE
        self.delays.balancing.observe(self._clock() - now)
        self.counters.started += 1
        return self.driver.begin(prompt, route, now)

    def start_on(self, name: str, request: GenerateRequest) -> Generation:
        """Send a request to this engine, which must be ready and runs all of the request, whatever its role."""
        self.counters.started += 1
        now = self._clock()
        return self.driver.begin(self.holdings.of(request, now), Route(name, name), now)
