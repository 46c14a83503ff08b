"""Loans of KV out of another engine's cache for a prompt. The lender is asked before the prompt's engine is, which
reads the KV; the loan ends when that engine has the KV or continues without it (docs/kv-hierarchy.md).
"""

from typing import Literal

from pdkv.router.request import GenerateRequest, Offer, Route
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import HandedOff, KVTicket, Release, RouterToEngine, Submit

LoanState = Literal["wanted", "asked", "granted", "over"]

LOAN_TIMEOUT_S = 1.0
"""Seconds after which a lender that has not answered is given up. It answers between two of its steps."""


LEASE_S = 10.0
"""Seconds for which lent KV is leased: a lender needs its blocks for its own requests. A borrower that comes later
reads what is still there if it pulls, and otherwise computes.
"""


class Loan:
    """The loan of one attempt: wanted → asked → granted → over, or over from any state."""

    __slots__ = ("attempt", "compute_s", "handoff", "lender", "load_timeout_s", "request_id", "state", "transfer_id")

    def __init__(self, route: Route, request_id: str, transfer_id: str, attempt: int) -> None:
        """`request_id`: its own, since lender and decode engine are often the same."""
        offer = Offer("", 0) if route.offer is None else route.offer
        self.lender = offer.lender
        self.compute_s = offer.compute_s
        self.load_timeout_s = min(offer.load_timeout_s or LEASE_S, LEASE_S)  # nothing is sent once its lease has ended
        self.request_id, self.transfer_id, self.attempt = request_id, transfer_id, attempt
        self.state: LoanState = "over" if route.offer is None else "wanted"
        self.handoff: KVHandoff | None = None  # told to the borrower while granted

    def ask(self, request: GenerateRequest, num_tokens: int, timeout_s: float) -> Submit:
        """The request to the lender, which has this many of the prompt's first tokens as far as is known."""
        self.state = "asked"
        return Submit(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            prompt_token_ids=request.prompt_token_ids[
                : num_tokens + 1
            ],  # a hit leaves at least one token to be computed
            params=SamplingParams(temperature=0.0),
            cache_salt=request.cache_salt,
            timeout_s=min(max(timeout_s, 0.001), LEASE_S),
            until="cached",
            kv="handoff",
            label=request.label,
            traceparent=request.traceparent,
            kv_terms=request.kv_terms,
        )

    def grant(self, message: HandedOff) -> bool:
        """Accept the lender's hand-off; False: it comes too late, or is not what was asked for."""
        handoff = message.handoff
        named = (handoff.engine, handoff.transfer_id, handoff.attempt, handoff.lent)
        if self.state != "asked" or named != (self.lender, self.transfer_id, self.attempt, True):
            return False
        self.state, self.handoff = "granted", handoff
        return True

    def forward(self, ticket: bytes) -> list[tuple[str, RouterToEngine]]:
        """The ticket of the borrower, for a lender that pushes."""
        if self.state != "granted":
            return []
        return [(self.lender, KVTicket(self.request_id, self.attempt, ticket))]

    def end(self) -> list[tuple[str, RouterToEngine]]:
        """End the loan, and with it the lender's lease, even one not yet granted. Idempotent."""
        held, self.state, self.handoff = self.state in ("asked", "granted"), "over", None
        return [(self.lender, Release(self.transfer_id, self.attempt, lent=True))] if held else []
