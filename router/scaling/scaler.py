"""The autoscaler of a router: shows it what the router knows, changes roles, and tells the launcher the rest."""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.config import AutoscaleConfig
from pdkv.errors import InvalidRequest
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.operations import Operations
from pdkv.router.scaling.autoscaler import Autoscaler, Decision, Objectives, Observation, Seen, Told

logger = logging.getLogger(__name__)

MAX_DECISIONS = 64
"""Decisions that are remembered."""

KV_SHARE = 0.9
"""The part of a pool that requests may fill."""


class Orders(msgspec.Struct, frozen=True):
    """What the launcher should do now."""

    start: Mapping[str, int] = {}  # by role
    stop: Sequence[str] = ()  # to be drained, then ended
    keep: Sequence[str] = ()  # not to be ended after all
    pause_s: float = 1.0  # until the next decision


class Scaler:
    """Reviews the fleet once for each call of `review`. Lives in the dispatcher's event loop."""

    def __init__(
        self,
        config: AutoscaleConfig,
        dispatcher: Dispatcher,
        admission: Admission,
        operations: Operations,
        *,
        clock: Callable[[], float] = MONOTONIC.now,
    ) -> None:
        """`clock`: the dispatcher's."""
        is_aggregated = all(engine.role == "any" for engine in dispatcher.fleet.own())
        bounds = {"any" if is_aggregated else role: each for role, each in config.bounds.items()}
        self.objectives = Objectives(
            config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3, config.slo_attainment, config.scale_down_after_s
        )
        self._core = Autoscaler(bounds, self.objectives)
        self._dispatcher, self._admission, self._operations = dispatcher, admission, operations
        self._clock = clock
        self._decisions: deque[Mapping[str, Any]] = deque(maxlen=MAX_DECISIONS)
        self.latest: Decision | None = None
        self.counts: Counter[str] = Counter()  # of engines, by what was decided about them

    def review(self, told: Told) -> Orders:
        """Decide, change roles, and return what is left to the launcher."""
        now = self._clock()
        self.latest = decision = self._core.decide(self.observe(told, now), now)
        if decision.changes:
            self._record(decision)
            for name, role in decision.roles.items():
                self._set_role(name, role)
        return Orders(decision.start, decision.stop, decision.keep, max(self._core.next_deadline() - now, 0.0))

    def observe(self, told: Told, now: float) -> Observation:
        """What is known now. What waits in the router counts where it is held up."""
        dispatcher, admission, speeds = self._dispatcher, self._admission, self._dispatcher.fleet.speeds
        engines = dispatcher.fleet.own()
        prefill = [e for e in engines if e.role != "decode"]
        decode = [e for e in engines if e.role != "prefill"]
        at_prefill = not any(e.serves and e.has_room for e in prefill)
        prompts, waiting = dispatcher.counters.prompts, admission.pending_tokens
        requests = sum(e.books.requests for e in decode)
        kv_tokens = sum(e.books.kv_tokens for e in decode) / requests if requests else 0.0
        return Observation(
            [
                Seen(e.name, e.role, e.life == "ready" and not e.suspicion, e.draining, e.books.requests)
                for e in engines
            ],
            told,
            queued=sum(e.tokens_left(now) for e in prefill) + (waiting if at_prefill else 0),
            asked=prompts.total + waiting,
            sizes=(prompts.count, prompts.total, prompts.squares),
            prompt_times=[speeds.work_at(e.name) for e in prefill],
            step_times=[speeds.step_at(e.name) for e in decode],
            requests=requests + (0 if at_prefill else admission.num_waiting),
            most=min((_most(e, kv_tokens) for e in decode if e.life == "ready"), default=math.inf),
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Objectives, figures of the latest decision, and the decisions that changed something, the latest first."""
        latest = self.latest
        return {
            "at": self._clock(),
            "bounds": {role: bounds._asdict() for role, bounds in self._core.bounds.items()},
            "objectives": self.objectives._asdict(),
            "desired": latest.desired if latest is not None else {},
            "figures": latest.figures if latest is not None else {},
            "counts": self.counts,
            "decisions": [*reversed(self._decisions)],
        }

    def _record(self, decision: Decision) -> None:
        self.counts.update(start=sum(decision.start.values()), role=len(decision.roles))
        self.counts.update(stop=len(decision.stop), keep=len(decision.keep))
        shown = {"at": decision.at, "reason": decision.reason, "desired": decision.desired}
        self._decisions.append(shown | decision.figures)
        self._dispatcher.fleet.events.note(decision.at, "operator", text=f"autoscaler: {decision.reason}")
        logger.info("autoscaler: %s %s", decision.reason, msgspec.json.encode(decision.figures).decode())

    def _set_role(self, name: str, role: str) -> None:
        try:
            self._operations.set_role(name, role)
        except InvalidRequest as error:
            logger.warning("autoscaler: %s", error)


def _most(engine: EngineState, kv_tokens: float) -> float:
    """Requests for which the engine has places and KV, if each has so many tokens."""
    assert engine.card is not None
    return min(engine.card.max_num_seqs, KV_SHARE * engine.kv_capacity / kv_tokens if kv_tokens else math.inf)
