"""Records of single generations, for queries: those that run, and the latest that have ended."""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pdkv.base.trace_context import trace_id_of
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.timeline import Leg, Timeline, Transfer

NUM_ENDED = 512
"""Ended generations that are remembered."""

MAX_SHOWN = 64
"""The most generations in one answer: a client may give all of its requests one id."""


MAX_BRIEF = 4
"""Choices, and candidates of each, in a header."""

decisions = logging.getLogger("pdkv.decisions")


def log_decision(generation: Generation) -> None:
    """Write a line about why its engines were chosen."""
    flow = generation.flow
    names = {"request_id": flow.request.label or flow.request_id, "generation_id": flow.request_id}
    decisions.info("%s", msgspec.json.encode(names | describe_decision(generation)).decode())


def describe_decision(generation: Generation) -> dict[str, Any]:
    """Why its engines were chosen, JSON-ready, and after its end what would have been best; empty: not recorded."""
    if generation.choices is None:
        return {}
    told = {"choices": msgspec.to_builtins(generation.choices), "hindsight": generation.hindsight}
    request = generation.flow.request
    split = {"split": request.split._asdict()} if request.split is not None else {}
    return told | ({"pool": request.pool} if request.pool else {}) | split


def encode_brief(generations: Iterable[Generation]) -> bytes:
    """Why the engines of the first of these were chosen so far, as JSON for a header: the candidates that came next are
    left out beyond MAX_BRIEF.
    """
    choices = next((generation.choices or [] for generation in generations), [])
    told = []
    for choice in choices[:MAX_BRIEF]:
        first = sorted(choice.candidates, key=lambda c: (c.engine != choice.chosen, c.load - c.match))
        told.append(msgspec.structs.replace(choice, candidates=first[:MAX_BRIEF]))
    return msgspec.json.encode(told)


class GenerationRecords:
    """The generations of one router by the client's id, the router's, or the trace's. Nothing of a prompt is kept."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, str, str, dict[str, Any], Timeline]] = deque(maxlen=NUM_ENDED)

    def ended(self, generation: Generation) -> None:
        """Keep the record of an ended generation, without its tokens."""
        flow = generation.flow
        names = flow.request.label, flow.request_id, trace_id_of(flow.request.traceparent)
        self._ended.append((*names, _state(generation), generation.timeline))

    def find(self, name: str, running: Iterable[Generation], now: float) -> list[dict[str, Any]]:
        """Matching generations, JSON-ready, running ones first, then the latest; at most MAX_SHOWN. `now`: the
        dispatcher's clock.
        """
        if not name:  # empty labels and traces match nothing
            return []
        found = []
        for generation in running:
            flow = generation.flow
            if name in (flow.request.label, flow.request_id, trace_id_of(flow.request.traceparent)):
                found.append(_state(generation) | _times(generation.timeline, now))
        for *names, state, timeline in reversed(self._ended):
            if name in names:
                found.append(state | _times(timeline, now))
        return found[:MAX_SHOWN]

    def latest(self) -> Iterator[tuple[dict[str, Any], Timeline]]:
        """What is kept of the generations that ended, the latest first."""
        return ((state, timeline) for *_, state, timeline in reversed(self._ended))


def _state(generation: Generation) -> dict[str, Any]:
    """The state of its flow (docs/request-states.md) in words and numbers."""
    flow = generation.flow
    request, failure = flow.request, flow.failure
    return {
        "request_id": request.label or flow.request_id,
        "generation_id": flow.request_id,
        "transfer_id": flow.transfer_id,
        "trace_id": trace_id_of(request.traceparent),
        "choice": request.choice,
        "attempt": flow.attempt,
        "state": "running" if not flow.ended else "finished" if failure is None else "failed",
        "prefill": {"engine": flow.route.prefill, "state": flow.prefill},
        "decode": {"engine": flow.route.decode, "state": flow.decode},
        "order": "aggregated" if flow.route.aggregated else flow.route.order,
        "finish_reason": flow.finish_reason,
        "error": {"code": failure.code, "message": str(failure)} if failure is not None else None,
        "prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.params.max_tokens,
        "output_tokens": len(flow.output_token_ids),
        "sources": msgspec.structs.asdict(generation.sources),
        "timeout_s": request.timeout_s,  # null: none
        "stall_timeout_s": request.stall_timeout_s,
        "stays": generation.stays,
        "pool": request.pool,
        **({"decision": describe_decision(generation)} if generation.choices is not None else {}),
    }


def _times(timeline: Timeline, now: float) -> dict[str, Any]:
    """Seconds since it began, for every event."""
    began = timeline.began

    def since(time: float | None) -> float | None:
        return None if time is None else round(time - began, 6)

    def told(item: Leg | Transfer) -> dict[str, Any]:
        fields = dataclasses.asdict(item)
        times = {f"{name}_s": since(fields.pop(name)) for name in ("began", "ended") if name in fields}
        return fields | times

    return {
        "age_s": since(now),
        "first_token_s": since(timeline.first_token),
        "ended_s": since(timeline.ended),
        "legs": [told(item) for item in timeline.legs],
        "transfers": [told(item) | {"bytes": item.num_bytes} for item in timeline.transfers],
    }
