"""Probes: real one-token generations on engines and pairs that have been idle for a while. No clock, no socket."""

from collections.abc import Sequence

from pdkv.errors import EngineDied, IncompatiblePeers, RequestAborted, RequestTimeout
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.health import ProbeResult
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.flow import RequestFlow
from pdkv.router.request import GenerateRequest, Route
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import Order
from pdkv.wire.messages import PROBE_SALT

PROBE_TIMEOUT_S = 5.0
"""Seconds after which an unanswered probe has failed."""

MAX_AT_ONCE = 8
"""Probes that run at the same time."""

_MAX_PAIRS = 4096
"""Pairs that are known by when they were probed last."""

_NUM_TOKENS, _NUM_OUTPUT = 8, 4
"""Tokens of a probe's prompt: less than a hash block, so that no cache or index ever holds it. And of its output: a few
steps show how long decode takes for one.
"""


class Prober:
    """Chooses the next route to probe, and records the result. At most one probe starts per tick."""

    def __init__(self, fleet: Fleet, orders: Sequence[Order], interval_s: float) -> None:
        """`interval_s`: how long an engine may be idle before it is probed; 0: never."""
        self.num_ok = 0
        self.num_failed = 0
        self._fleet = fleet
        self._orders = orders
        self._interval_s = interval_s
        self._since: dict[tuple[str, str], float] = {}  # (engine, epoch) -> when it was first seen
        self._probed: dict[tuple[str, str], float] = {}  # pair -> when it was last probed
        self._under_way: dict[tuple[str, str], float] = {}  # pair -> when its probe began
        self._was_bad_pair = False  # the latest probe tries one: then it is an idle or ejected engine's turn

    def due(self, now: float) -> Route | None:
        """The next route to probe, if any; it counts as running until `ended`."""
        if not self._interval_s or len(self._under_way) >= MAX_AT_ONCE:
            return None
        ready = [e for e in self._fleet.own() if e.life == "ready" and not e.is_silent and not e.draining]
        self._since = {key: self._since.get(key, now) for key in map(_incarnation, ready)}
        probed = {name for pair in self._under_way for name in pair}
        due = sorted((e for e in ready if e.name not in probed and self._is_due(e, now)), key=_probed_at)
        routes = (route for e in due if (route := self._route(e, ready)) is not None)
        bad, idle = self._bad_pair(ready, now), next(routes, None)
        route = (idle or bad) if self._was_bad_pair else (bad or idle)
        if route is not None:
            self._was_bad_pair = route is bad
            self._under_way[route[:2]] = now
            self._probed.pop(route[:2], None)
            self._probed[route[:2]] = now
            if len(self._probed) > _MAX_PAIRS:
                del self._probed[next(iter(self._probed))]
        return route

    def ended(self, flow: RequestFlow, now: float) -> None:
        """Record that the probe is over."""
        route = flow.route
        seconds = round(now - self._under_way.pop(route[:2], now), 3)
        pairs, pair = self._fleet.pairs, (route.prefill, route.decode)
        if pair in set(pairs) and pair not in pairs.avoided(now):  # no load has decided its trial
            pairs.loaded(*pair, flow.failure is None and (flow.load is None or flow.load.ok), now)
        if flow.failure is None:
            self.num_ok += 1
            for name in set(route[:2]):
                if self._fleet.is_ready(name):
                    self._fleet.succeeded(name, now)
                    self._fleet.engines[name].health.last_probe = ProbeResult(now, seconds)
            return
        if isinstance(flow.failure, RequestAborted | EngineDied) or not self._fleet.engines.keys() >= set(route[:2]):
            return  # the router stops, an engine was removed, or one died, which says more
        self.num_failed += 1
        if flow.awaits_kv and not self._fleet.suspects.keys() & set(route[:2]):
            pairs.loaded(*pair, False, now)
            return
        engine = self._fleet.engines.get(route.decode if flow.output_token_ids else route.prefill)
        if engine is None:
            return  # it was removed
        late = isinstance(flow.failure, RequestTimeout)
        if late and engine.books.requests and not engine.health.explains_timeout():
            return  # it has become busy
        if engine.life == "ready":
            fault = f"no answer within {PROBE_TIMEOUT_S:g} s" if late else str(flow.failure)
            engine.health.last_probe = ProbeResult(now, seconds, fault)
            engine.score.eject(now)

    def _is_due(self, engine: EngineState, now: float) -> bool:
        last = engine.health.last_probe
        if engine.score.is_ejected:
            return engine.score.awaits_trial(now)
        if engine.books.requests or (engine.load is not None and engine.load.running + engine.load.waiting):
            return False
        since = max(self._since[_incarnation(engine)], engine.health.last_good, last.at if last is not None else 0.0)
        return now - since >= self._interval_s

    def _bad_pair(self, ready: Sequence[EngineState], now: float) -> Route | None:
        """A pair of engines that are well that is no longer avoided: its next load decides."""
        names, avoided = {e.name for e in ready if e.is_well(now)}, self._fleet.pairs.avoided(now)
        due = (p for p in self._fleet.pairs if names.issuperset(p) and p not in avoided and p not in self._under_way)
        return next((route for pair in due if (route := self._pair(*pair)) is not None), None)

    def _route(self, engine: EngineState, ready: Sequence[EngineState]) -> Route | None:
        """The engine with the partner that was probed with it longest ago; suspects are not partners."""
        if engine.role == "any":
            return Route(engine.name, engine.name)
        partners = [e.name for e in ready if e.role not in (engine.role, "any") and not e.suspicion]
        prefills = engine.role == "prefill"
        pairs = [(engine.name, p) if prefills else (p, engine.name) for p in partners]
        pairs.sort(key=lambda pair: self._probed.get(pair, 0.0))
        return self._pair(*pairs[0]) if pairs else None

    def _pair(self, prefill: str, decode: str) -> Route | None:
        try:
            return Route(prefill, decode, self._fleet.order(prefill, decode, self._orders))
        except IncompatiblePeers:
            return None


def _incarnation(engine: EngineState) -> tuple[str, str]:
    assert engine.card is not None
    return engine.name, engine.card.epoch


def _probed_at(engine: EngineState) -> float:
    return 0.0 if engine.health.last_probe is None else engine.health.last_probe.at


def probe_request(route: Route) -> GenerateRequest:
    """The request of a probe, with tokens from each side."""
    params = SamplingParams(max_tokens=_NUM_OUTPUT, temperature=0.0, seed=0, ignore_eos=True)
    return GenerateRequest(
        prompt_token_ids=list(range(_NUM_TOKENS)),
        params=params,
        cache_salt=PROBE_SALT,
        timeout_s=PROBE_TIMEOUT_S,
        probe=True,
    )
