"""The hooks through which the two roles plug into an engine; the engine knows nothing else about them.

Hooks run on the step thread and never block.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pdkv.connectors.base import FinishDecision, TransferKey, TransferOutcome
from pdkv.engine.request import Request
from pdkv.wire.messages import EngineToRouter, RouterToEngine

SendToRouter = Callable[[str, EngineToRouter], None]
"""Sends a message to the router of this id; it leaves after the step."""


class PrefillHooks(Protocol):
    """The prefill role's part in an engine: hand-offs, and leases on their blocks."""

    def may_start(self, request: Request, num_blocks: int) -> bool:
        """Whether a waiting request that needs `num_blocks` blocks may be admitted now."""
        ...

    def may_lend(self, num_blocks: int) -> bool:
        """Whether this many cached blocks may be leased to another engine now."""
        ...

    def computed(self, request: Request) -> None:
        """Note that more of a prompt is confirmed, which will be handed off when the rest is computed."""
        ...

    def handed_off(self, request: Request, decision: FinishDecision, now: float) -> None:
        """Take over a finished request with kv="handoff" and its blocks, which are still held."""
        ...

    def sending_ended(self, key: TransferKey, ok: bool, outcome: TransferOutcome) -> None:
        """Note that a transfer from here has ended."""
        ...

    def handle(self, router_id: str, message: RouterToEngine) -> bool:
        """Handle a message that names no live request. True: the message was for this role."""
        ...

    def holds(self, key: TransferKey) -> bool:
        """Whether the transfer's KV is kept for a reader."""
        ...

    def router_left(self, router_id: str) -> None:
        """End everything of that router."""
        ...

    def expire(self, now: float) -> None:
        """End whatever is past its deadline."""
        ...

    def next_deadline(self) -> float | None:
        """The earliest deadline of this role."""
        ...


class LoadCounts(NamedTuple):
    """Counts of one engine's loads since its start."""

    num_failures: int
    num_partial: int  # a store had less than it said: the part that arrived is used
    bytes_received: int
    transfer_seconds: float


class DecodeHooks(Protocol):
    """The decode role's part in an engine: which requests may load KV from outside, and what happens when a
    load ends.
    """

    def may_load(self, request: Request, num_blocks: int, num_others: int) -> bool:
        """Whether a remote load may take `num_blocks` now, including hits that are not held yet.

        `num_others` requests run or load already.
        """
        ...

    def declines(self, request: Request, num_missing: int) -> bool:
        """Whether a conditional request should be computed here rather than loaded. True: the peer has been told."""
        ...

    def load_allocated(self, request: Request, start: int, stop: int, ticket: bytes | None) -> None:
        """Note that the request's blocks for a remote load of tokens [start, stop) are reserved."""
        ...

    def load_ended(self, request: Request, ok: bool, outcome: TransferOutcome) -> bool:
        """Note that a load ended. False: the request must fail instead of being computed here."""
        ...

    def counts(self) -> LoadCounts:
        """Counts of the loads so far."""
        ...
