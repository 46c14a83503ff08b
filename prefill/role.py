"""The prefill role: hands KV off, keeps it under lease, and makes prefills wait before leases fill the pool."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from pdkv.connectors.base import FinishDecision, TransferKey, TransferOutcome
from pdkv.engine.hooks import PrefillHooks, SendToRouter
from pdkv.engine.outside.external import ExternalKV
from pdkv.engine.request import Request
from pdkv.errors import KVNotFound, TransferTimeout
from pdkv.prefill.leases import Lease, LeaseTable
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import HandedOff, KVReady, KVTicket, Release, RouterToEngine

logger = logging.getLogger(__name__)

MAX_EARLY_FAILURES = 1024
"""Failed pushes of unfinished prompts to remember."""


class PrefillRole(PrefillHooks):
    """Hand-offs and leases of one engine.

    Args:
        engine, epoch: this engine's name and incarnation, as the hand-off names them.
        max_leased_blocks: beyond this many, new prefills wait for releases.
        num_promised_blocks: blocks of running requests that will become leases.
    """

    def __init__(
        self,
        *,
        engine: str,
        epoch: str,
        leases: LeaseTable,
        external: ExternalKV,
        send: SendToRouter,
        max_leased_blocks: int,
        lease_timeout_s: float,
        num_promised_blocks: Callable[[], int],
    ) -> None:
        self.leases = leases
        self.num_expired = 0
        self._failed_early: OrderedDict[TransferKey, TransferOutcome] = OrderedDict()
        self._engine = engine
        self._epoch = epoch
        self._external = external
        self._send = send
        self._max_leased_blocks = max_leased_blocks
        self._lease_timeout_s = lease_timeout_s
        self._num_promised_blocks = num_promised_blocks

    def may_start(self, request: Request, num_blocks: int) -> bool:
        """Whether the pool may take another prompt that will be handed off. The limit does not apply if a receiver is
        already waiting.
        """
        if request.kv != "handoff" or request.ticket is not None or request.num_named:
            return True
        return self._num_taken() == 0 or self.may_lend(num_blocks)

    def may_lend(self, num_blocks: int) -> bool:
        """Whether the limit has room for a loan. If not, the borrower computes the KV itself."""
        return self._num_taken() + num_blocks <= self._max_leased_blocks

    def _num_taken(self) -> int:
        """Blocks that are leased, or will be."""
        return self.leases.num_blocks + self._num_promised_blocks()

    def computed(self, request: Request) -> None:
        """Say where further whole blocks of the prompt are, if the connector lets them be read before its end."""
        start, num_tokens = request.num_named, self._external.num_in_blocks(request.num_confirmed)
        if num_tokens > start and (payload := self._external.name_confirmed(request, start, num_tokens)):
            request.num_named = num_tokens
            self._send(request.router_id, self._handoff(request, num_tokens, payload, more=True, start=start))

    def handed_off(self, request: Request, decision: FinishDecision, now: float) -> None:
        """Lease the blocks and send the hand-off. A loan is leased no longer than its Submit says."""
        submit = request.submit
        leased = request.block_tables if decision.hold_blocks else []
        expires_at = now + self._lease_timeout_s
        expires_at = min(expires_at, request.deadline) if request.transfer_key.lent else expires_at
        self.leases.grant(request, leased, expires_at, until_release=decision.until_release)
        handoff = self._handoff(request, request.num_confirmed, decision.payload or b"")
        message = HandedOff(submit.request_id, submit.attempt, request.sources(), handoff, *request.times(now))
        self._send(request.router_id, message)
        failed = self._failed_early.pop(request.transfer_key, None)
        if failed is not None:
            self.sending_ended(request.transfer_key, False, failed)

    def _handoff(
        self, request: Request, num_tokens: int, payload: bytes, *, more: bool = False, start: int = 0
    ) -> KVHandoff:
        transfer, lent = request.submit.transfer_id, request.transfer_key.lent
        return KVHandoff(*request.key, transfer, self._engine, self._epoch, num_tokens, payload, lent, more, start)

    def sending_ended(self, key: TransferKey, ok: bool, outcome: TransferOutcome) -> None:
        """Note that a transfer to a reader ended, delivered or not: tell the reader, and end the lease."""
        lease = self.leases.get(key)
        if lease is None:
            if not ok:
                self._remember_failure(key, outcome)
            return
        if not ok:
            name = lease.request.name
            logger.warning("KV of request %s (transfer %s) was not delivered: %s", name, key.transfer_id, outcome.code)
        self._answer(lease, ok, outcome.code)
        # A store has its own copy, whose tail goes with the Release; what was pushed may be wanted once more.
        if not lease.until_release and (lease.block_ids or not ok):
            self.leases.end(key)
            if not ok:
                self._external.aborted(key)

    def handle(self, router_id: str, message: RouterToEngine) -> bool:
        """Handle a Release, or a ticket that arrives after the prefill has ended."""
        match message:
            case Release(transfer_id=transfer_id, attempt=attempt, lent=lent):
                return self._release(router_id, TransferKey(transfer_id, attempt, lent))
            case KVTicket():
                return self._late_ticket(router_id, message)
        return False

    def holds(self, key: TransferKey) -> bool:
        """Whether there is a lease."""
        return self.leases.get(key) is not None

    def router_left(self, router_id: str) -> None:
        """End the leases of that router's requests."""
        for key in self.leases.of_router(router_id):
            self.leases.end(key)
            self._external.aborted(key, cancel_sending=True)

    def expire(self, now: float) -> None:
        """End leases past their deadline, which no reader has used."""
        for key in self.leases.expired(now):
            lease = self.leases.end(key)
            assert lease is not None, key
            self.num_expired += 1
            self._external.aborted(key, cancel_sending=True)
            if lease.request.ticket is not None and not lease.is_answered:  # or its reader waits for its own deadline
                self._answer(lease, False, TransferTimeout.code)
            text = "the lease of request %s (transfer %s) expired: its KV was never fetched"
            level = logging.INFO if key.lent else logging.WARNING
            logger.log(level, text, lease.request.name, key.transfer_id)

    def next_deadline(self) -> float | None:
        """The earliest lease deadline."""
        return self.leases.next_deadline()

    def _answer(self, lease: Lease, ok: bool, code: str) -> None:
        """Tell the reader of the last ticket how its sending ended."""
        submit = lease.request.submit
        message = KVReady(submit.request_id, submit.attempt, ok, code, lease.request.ticket_number)
        self._send(lease.request.router_id, message)
        lease.is_answered = True

    def _remember_failure(self, key: TransferKey, outcome: TransferOutcome) -> None:
        """A push failed while its prompt was still being computed: the hand-off will say so."""
        self._failed_early[key] = outcome
        if len(self._failed_early) > MAX_EARLY_FAILURES:
            self._failed_early.popitem(last=False)

    def _release(self, router_id: str, key: TransferKey) -> bool:
        """End a lease for the router that it was granted to. One that is already over is not an error."""
        lease = self.leases.get(key)
        if lease is not None and lease.request.router_id != router_id:
            return False
        if self.leases.end(key) is not None:
            self._external.aborted(key, cancel_sending=True)
        return True

    def _late_ticket(self, router_id: str, ticket: KVTicket) -> bool:
        """Send leased KV (again) to who gave the ticket. One who comes too late must not wait for its deadline."""
        lease = self.leases.of_request(ticket.request_id, ticket.attempt)
        if lease is None:
            lost = KVReady(ticket.request_id, ticket.attempt, ok=False, code=KVNotFound.code, ticket=ticket.number)
            self._send(router_id, lost)
            return False
        if lease.request.router_id != router_id:
            return False
        lease.request.ticket, lease.request.ticket_number = ticket.ticket, ticket.number
        lease.is_answered = False
        self._external.report_leased(lease.request, lease.block_tables)
        return True
