"""The data of the dashboard: one JSON text, made at most once a second however many pages are open.

Counters are totals since the start: a page computes rates from two of these texts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pdkv.base.clock import MONOTONIC, unix_time
from pdkv.base.limits import clip
from pdkv.base.version import VERSION
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.timeline import Timeline
from pdkv.router.metrics.requests import Metrics

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

PERIOD_S = 1.0
"""Seconds for which one text is given out."""

MAX_ENGINES, MAX_FLOWS, MAX_EVENTS, MAX_REQUESTS, MAX_NAMES = 1024, 128, 64, 8, 64
"""The most of each in one text; of more engines, those in trouble come first."""

FLOW_S = 30.0
"""Seconds since the end of requests that make flows."""

_FIELDS = ("request_id", "generation_id", "error", "finish_reason", "prompt_tokens", "output_tokens", "attempt")

Ended = Sequence[tuple[dict[str, Any], Timeline]]


class Overview:
    """What the router knows of its engines and requests, in small."""

    def __init__(
        self, dispatcher: "Dispatcher", metrics: Metrics, model: str, *, shows_requests: bool,
        clock: Callable[[], float] = MONOTONIC.now,
    ) -> None:  # fmt: skip
        """`shows_requests`: whether it names single requests. `clock`: the dispatcher's."""
        self._dispatcher, self._metrics, self._clock = dispatcher, metrics, clock
        self._fixed = {"model": model, "version": VERSION, "since": unix_time(), "shows_requests": shows_requests}
        self._text, self._made_at = b"", 0.0

    def json(self) -> bytes:
        """The text, at most PERIOD_S old."""
        now = self._clock()
        if not self._text or now - self._made_at >= PERIOD_S:
            self._text, self._made_at = msgspec.json.encode(self._fixed | self._engines() | self._requests(now)), now
        return self._text

    def _engines(self) -> dict[str, Any]:
        dispatcher, engines = self._dispatcher, self._dispatcher.engines()
        shown = sorted(engines, key=lambda engine: engine.serves and not engine.score.is_ejected)[:MAX_ENGINES]
        return {
            "fault": dispatcher.fault,
            "fallback": dispatcher.fallback.describe(self._clock()),
            "problems": dict([*dispatcher.connector_problems.items()][:MAX_NAMES]),
            "connector": next((f"{e.card.connector} ({e.card.kind})" for e in engines if e.card is not None), ""),
            "num_engines": len(engines),
            "engines": [_row(engine) for engine in shown],
            "tiers": _tiers(engines),
            "events": dispatcher.fleet.events.latest(MAX_EVENTS),
        }

    def _requests(self, now: float) -> dict[str, Any]:
        dispatcher, metrics = self._dispatcher, self._metrics
        counters, ended = dispatcher.counters, list(dispatcher.driver.records.latest())
        latency = {
            "ttft": metrics.first_token, "tpot": metrics.token_time, "itl": metrics.inter_token,
            "e2e": metrics.duration, "queue": metrics.queue_wait, "transfer": dispatcher.delays.transfer,
        }  # fmt: skip
        totals = {
            "requests": metrics.duration.count, "output_tokens": metrics.inter_token.count + metrics.first_token.count,
            "retries": counters.retried, "migrations": counters.migrated, "moves": dispatcher.mover.num_moved,
            "load_failures": counters.load_failures, **_guesses(dispatcher.engines()),
        }  # fmt: skip
        return {
            "at": now,
            "totals": totals,
            "now": metrics.now()
            | {"parked": len(dispatcher.recovery.parked), "bad_pairs": len(dispatcher.fleet.pairs)},
            "outcomes": [[*key, number] for key, number in metrics.requests.items()],
            "faults": counters.faults,
            "latency": {name: {"bounds": each.bounds, "counts": each.counts} for name, each in latency.items()},
            "flows": _flows(ended, now),
            "requests": _notable(ended) if self._fixed["shows_requests"] else {},
        }


def _row(engine: EngineState) -> dict[str, Any]:
    load, blocks = engine.load, engine.blocks
    row = {
        "name": engine.name, "role": engine.role, "life": engine.life, "draining": engine.draining,
        "refused": clip(engine.reason or ""), "suspicion": engine.suspicion, "ejected": engine.score.is_ejected,
        "requests": engine.books.requests, "prefill_tokens": engine.books.prefill_tokens, "deaths": engine.num_deaths,
        "blocks": (blocks.total, blocks.active, blocks.leased, blocks.cached, blocks.quarantined, blocks.free),
    }  # fmt: skip
    if load is not None:
        row |= {"running": load.running, "waiting": load.waiting, "sources": msgspec.structs.astuple(load.sources)}
    return {name: value for name, value in row.items() if value}


def _guesses(engines: Iterable[EngineState]) -> dict[str, int]:
    """Guesses at tokens to come that all engines together verified, and those of them that were right."""
    drafts = [engine.load.drafts for engine in engines if engine.load is not None]
    return {"guesses": sum(each.tokens for each in drafts), "right_guesses": sum(each.accepted for each in drafts)}


def _tiers(engines: Iterable[EngineState]) -> dict[str, Counter[str]]:
    """Tiers below the caches, of all engines together, by name."""
    tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for engine in engines:
        for part, stats in engine.load.connectors.items() if engine.load is not None else ():
            if (held := stats.held) is not None and (part in tiers or len(tiers) < MAX_NAMES):
                tiers[part].update(bytes=held.num_bytes, capacity=held.capacity)
                tiers[part].update(hits=stats.tier_hits, failures=stats.tier_failures)
    return tiers


def _flows(ended: Ended, now: float) -> dict[str, Any]:
    """Choices that ended lately, by the engine of the prompt and the one that decodes, and the KV that they moved."""
    recent = [(state, times) for state, times in ended if now - (times.ended or now) <= FLOW_S]
    pairs = Counter((state["prefill"]["engine"], state["decode"]["engine"]) for state, _ in recent)
    begin = recent[-1][1].ended if recent and len(recent) == len(ended) else None  # a busy log is shorter than FLOW_S
    return {
        "seconds": FLOW_S if begin is None else max(now - begin, PERIOD_S),
        "handed": sum(number for pair, number in pairs.items() if len({*pair} - {""}) == 2),
        "local": sum(number for pair, number in pairs.items() if len({*pair} - {""}) == 1),
        "bytes": sum(transfer.num_bytes for _, times in recent for transfer in times.transfers),
        "pairs": [[*pair, number] for pair, number in pairs.most_common(MAX_FLOWS)],
    }


def _notable(ended: Ended) -> dict[str, list[dict[str, Any]]]:
    """The latest of the requests that ended, the slowest of those that are remembered, and the latest that failed."""
    slowest = sorted(ended, key=lambda item: item[1].began - (item[1].ended or 0.0))
    groups = {"latest": ended, "slowest": slowest, "failed": [item for item in ended if item[0]["error"] is not None]}
    return {name: [_request(*item) for item in items[:MAX_REQUESTS]] for name, items in groups.items()}


def _request(state: dict[str, Any], times: Timeline) -> dict[str, Any]:
    first, ended = (None if at is None else at - times.began for at in (times.first_token, times.ended))
    return {name: state[name] for name in _FIELDS} | {"ttft_s": first, "seconds": ended}
