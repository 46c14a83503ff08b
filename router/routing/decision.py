"""Why a request went where it went: what the policy was shown and what it chose. `replay` chooses again from that.

It is made only where it is asked for (docs/policies.md). The log of decisions, the header of an admin's answer and
`GET /admin/requests/ID` are views of it.
"""

import random
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pdkv.router.engines.candidate import EngineView
from pdkv.router.routing.policies import Snapshot, cheapest_within, find_policy

Reason = Literal["policy", "objective", "sibling", "default", "sooner"]
"""Why an engine was chosen: by the policy; as the cheapest that meets an objective; because it ran the prompt for an
earlier choice; by the default policy, since the other one failed; as the sooner of two ways.
"""


class Candidate(msgspec.Struct, frozen=True):
    """An engine that could be chosen. Seconds are None where nothing was measured."""

    engine: str
    load: int
    pace: float
    num_tokens: int  # prompt tokens that it would have to compute; of decode: that would be handed over
    match: int  # what the policy was told of these
    queued_s: float | None = None  # of what waits there
    transfer_s: float | None = None
    predicted_s: float | None = None  # to the first token; of decode: for each further one


class Choice(msgspec.Struct, frozen=True):
    """One choice of an engine. Side "both": whether one engine does all of it, or two in turn."""

    side: Literal["prefill", "decode", "both"]
    policy: str
    chosen: str
    reason: Reason
    prompt_tokens: int
    candidates: Sequence[Candidate]
    turn: int = 0
    seed: int = 0
    near: str = ""
    slo_s: float = 0.0


def replay(choice: Choice) -> str:
    """The engine that is chosen from a record alone.

    Raises:
        ConfigError: its policy is unknown here.
    """
    if choice.side == "both":
        return min(choice.candidates, key=lambda c: (c.predicted_s or 0.0, c is choice.candidates[0])).engine
    if choice.near and any(c.engine == choice.near for c in choice.candidates):
        return choice.near
    snapshot = Snapshot(
        tuple(EngineView(c.engine, c.load, c.pace) for c in choice.candidates),
        choice.turn,
        random.Random(choice.seed),
        lambda: {c.engine: c.match for c in choice.candidates},
        "prefill" if choice.side == "prefill" else "decode",
        choice.prompt_tokens,
        lambda: {c.engine: c.predicted_s for c in choice.candidates if c.predicted_s is not None},
    )
    if choice.slo_s and (cheapest := cheapest_within(snapshot, choice.slo_s)) is not None:
        return cheapest.name
    return find_policy(choice.policy)(snapshot).name


def hindsight(choices: Sequence[Choice], engine: str, computed: int, lacking: dict[str, int]) -> dict[str, Any] | None:
    """What the best of the candidates for a prompt would have been, JSON-ready; None: none was recorded.

    Args:
        engine: the one that ran it; it computed so many tokens.
        lacking: tokens that each other candidate would have computed, by what its cache had in the end.
    """
    shown = [c for choice in choices if choice.side == "prefill" for c in choice.candidates]
    if not shown:
        return None
    tokens = {c.engine: lacking.get(c.engine, c.num_tokens) for c in shown} | {engine: computed}
    best = min(tokens, key=lambda name: (tokens[name], name != engine))
    return {"engine": best, "computed_tokens": tokens[best], "regret_tokens": computed - tokens[best]}
