"""One engine as the router sees it: card, life, load, health, score."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pdkv.router.engines.books import CONTEXT_WEIGHT, Books
from pdkv.router.engines.candidate import EngineView, Side
from pdkv.router.engines.health import EngineHealth
from pdkv.router.engines.outliers import OutlierScore
from pdkv.wire.kv import EngineCard
from pdkv.wire.refusal_note import RefusalNote
from pdkv.wire.reports import BlockCounts, LoadReport

EngineLife = Literal["starting", "ready", "dead"]

Versions = tuple[tuple[str, int | str], ...]
"""Wire formats of an engine's connectors, by name."""

STEPS_AHEAD = 2
"""Prompt tokens for one prefill engine, in multiples of its largest step: one step runs while the next is at hand."""

UNKNOWN_STEP = 8192
"""Tokens of an engine's largest step if its card does not say."""


@dataclass(slots=True)
class EngineState:
    """One engine. `life` "starting": never seen ready; "dead": was ready, and may come back."""

    name: str
    role: str  # as configured; its card repeats it
    life: EngineLife = "starting"
    card: EngineCard | None = None  # of the latest incarnation
    load: LoadReport | None = None  # the latest report of this incarnation
    answered: int = 0  # the latest AskReport that it has answered
    books: Books = field(default_factory=Books)  # work that this router has given to this incarnation
    num_deaths: int = 0
    health: EngineHealth = field(default_factory=EngineHealth)  # of the latest incarnation
    score: OutlierScore = field(default_factory=OutlierScore)  # of all its incarnations
    refusal: str | None = None  # why the latest incarnation is refused
    refused_card: EngineCard | None = None  # card of that incarnation, while it is connected
    draining: bool = False  # an operator has drained it; outlives its incarnations
    assigned: str | None = None  # the role that an operator gave it; outlives its incarnations
    token_bytes: int = 0  # bytes of a token's KV on all ranks of the latest incarnation
    versions: Versions = ()  # of its connectors' wire formats, and of what must be alike on its platform
    pace: float = 1.0  # of its role's work, relative to its peers'
    token_s: float = 0.0  # seconds of a prompt token while it has others to compute; 0: not known
    context_weight: float = CONTEXT_WEIGHT  # of a token of KV beside a prompt token that is to be computed
    note: RefusalNote | None = None  # where a launcher writes why it keeps the engine out
    endpoint: str = ""
    source: str = "launch"  # who proposed it (docs/membership.md)
    leaving: bool = False  # its source has withdrawn it, and so it is draining

    @property
    def blocks(self) -> BlockCounts:
        """Blocks by class as last reported; before the first report, all blocks are free."""
        if self.load is not None:
            return self.load.blocks
        total = self.card.num_blocks if self.card is not None else 0
        return BlockCounts(total=total, free=total, cached=0, active=0, leased=0, quarantined=0)

    @property
    def serves(self) -> bool:
        """Whether the engine may get new requests: it is ready, not a suspect, and not drained."""
        return self.life == "ready" and not self.suspicion and not self.draining

    def takes(self, num_tokens: int) -> bool:
        """Whether this many tokens of prompt and output fit into its max_model_len, as far as that is known."""
        return self.card is None or num_tokens <= self.card.max_model_len

    @property
    def suspicion(self) -> str:
        """Why a ready engine seems to be stopped or stuck; it may still recover. Empty if it does not."""
        return self.health.suspicion if self.life == "ready" else ""

    @property
    def is_silent(self) -> bool:
        """Whether it is ready but its process seems to be stopped, so that nothing sent there is answered."""
        return self.life == "ready" and self.health.silent

    @property
    def condition(self) -> str:
        """State for messages to people: "is ready", or why it cannot answer now."""
        if self.life == "ready" and self.draining:
            return "is draining"
        return self.suspicion or f"is {self.life if self.reason is None else 'refused'}"

    @property
    def connector_problem(self) -> str | None:
        """Why the engine's connector cannot be used now, as last reported; meanwhile it computes what it would load."""
        return self.load.connector_problem or None if self.load is not None and self.life == "ready" else None

    @property
    def lacks_store(self) -> bool:
        """Whether it hands over through a store that does not answer."""
        return self.card is not None and self.card.kind == "store" and self.connector_problem is not None

    @property
    def pid(self) -> int | None:
        """Process id of the incarnation that is ready."""
        return self.card.pid if self.card is not None and self.life == "ready" else None

    @property
    def kv_capacity(self) -> int:
        """Tokens of KV that its pool holds."""
        assert self.card is not None, f"{self.name} has never been ready"
        blocks = self.blocks
        return max(blocks.total - blocks.quarantined, 0) * self.card.layout.block_size // self.card.layout.num_groups

    @property
    def has_room(self) -> bool:
        """Whether it has fewer prompt tokens to compute than it may be given, and is given more."""
        return not self.draining and self.books.prefill_tokens < STEPS_AHEAD * self.largest_step

    @property
    def largest_step(self) -> int:
        """Tokens of its largest step."""
        return (self.card.max_num_batched_tokens if self.card is not None else 0) or UNKNOWN_STEP

    def tokens_left(self, now: float) -> int:
        """Prompt tokens that it has to compute, less those that it has probably computed of a prompt that is not done:
        at most one step's, so that an engine that does nothing does not seem to be free.
        """
        waiting = self.books.prefill_tokens
        if not (waiting and self.token_s):
            return waiting
        done = min((now - self.books.worked_since) / self.token_s, self.largest_step)
        return max(waiting - max(int(done), 0), 0)

    @property
    def has_slack(self) -> bool:
        """Whether it reports that nothing waits there and half of its pool is unused."""
        load = self.load
        return load is not None and not load.waiting and 2 * (load.blocks.free + load.blocks.cached) > load.blocks.total

    def is_well(self, now: float) -> bool:
        """Whether nothing speaks against giving it a request, but for the engines that it would work with."""
        return not (self.draining or self.suspicion or self.score.held_until(now))  # a silent one is a suspect

    def describe(self, now: float, num_requests: int = 0) -> dict[str, Any]:
        """The engine's description, JSON-ready, with its card; load, steps and blocks as last reported.

        `num_requests` of this router still use it. A draining engine without any is drained.

        State "refused" comes with a reason: the engine cannot work with the others, and gets no requests.
        """
        load, reason = self.load, self.reason
        return {
            **_fields(self, "name", "role", "endpoint", "source", "pid", "serves", "draining", "connector_problem"),
            "ranks": list(self.card.rank_pids) if self.card is not None and self.life == "ready" else [],
            "state": self.life if reason is None else "refused",
            "reason": reason,
            "suspect": bool(self.suspicion),
            "suspicion": self.suspicion or None,
            "drained": self.draining and not num_requests,
            "requests": num_requests,
            "ejected": self.score.is_ejected,
            "last_probe": probe.describe(now) if (probe := self.health.last_probe) is not None else None,
            "silent_for_s": self.health.silent_for_s if self.life == "ready" else 0.0,
            "busy_s": round(self.health.busy_s, 3) if self.life == "ready" else 0.0,
            "predicted_s": round(self.health.predicted_s, 6) if self.life == "ready" else 0.0,
            "waiting": load.waiting if load is not None else 0,
            "running": load.running if load is not None else 0,
            "blocks": msgspec.to_builtins(self.blocks),
            **_describe_card(self.card, load),
        }

    @property
    def reason(self) -> str | None:
        """Why the engine is refused, and so will not come back by itself; None: it is not."""
        if self.life == "ready":
            return None
        return self.refusal or (self.note.read() if self.note is not None else None)

    def view(self, side: Side, now: float = 0.0) -> EngineView:
        """The engine as a candidate for one side; an aggregated engine's load is the same for both."""
        books, prompts = self.books, self.tokens_left(now)
        if self.role == "any":
            weight = self.context_weight if side == "prefill" else 1.0
            return EngineView(self.name, prompts + int(weight * books.kv_tokens), self.pace)
        load = prompts if side == "prefill" else books.kv_tokens
        return EngineView(self.name, load, self.pace if side == self.role else 1.0)


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _describe_card(card: EngineCard | None, load: LoadReport | None) -> dict[str, Any]:
    """The card of the latest incarnation, JSON-ready, without what only its peers can use; empty before the first.

    `connector_parts` are the children, transports and tiers that the engine counts separately. If a part has several
    ways to read a peer's KV, `kv_paths` says which one is used, by part and peer.
    """
    if card is None:
        return {}
    if card.backend:  # nothing is known of its KV
        return _fields(card, "epoch", "backend", "lacks", "max_model_len", "max_num_seqs")
    layout = card.layout
    parts = {} if load is None else load.connectors
    return {
        **_fields(card, "version", "platform", "epoch", "model", "max_model_len", "max_num_seqs", "tp", "connector"),
        "connector_parts": sorted(parts),
        "kv_paths": {part: stats.paths for part, stats in sorted(parts.items()) if stats.paths},
        **_fields(card, "kind", "content_addressed"),
        "orders": list(card.orders),
        "kv_layout": {
            "layers": layout.model_layers,
            "kv_heads": layout.kv_heads_of_all_ranks,
            "head_size": layout.head_size,
            "dtype": layout.dtype,
            "block_size": layout.block_size,
            "block_bytes": layout.block_bytes,
            "windows": list(layout.windows),
            "hash_block_size": card.hash_block_size,
        },
    }
