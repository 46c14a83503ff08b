"""The decode role: admission of remote KV, tickets, and what happens when a load fails."""

import logging
from typing import Literal

from pdkv.connectors.base import TransferOutcome
from pdkv.engine.hooks import DecodeHooks, LoadCounts, SendToRouter
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.outside.external import ExternalKV
from pdkv.engine.request import Request
from pdkv.errors import KVNotFound
from pdkv.wire.messages import Allocated, Loaded, Release

logger = logging.getLogger(__name__)

LoadFailurePolicy = Literal["recompute", "fail"]


class DecodeRole(DecodeHooks):
    """Remote loads of one engine.

    Args:
        local_prefill_tokens: a conditional request with fewer tokens missing is prefilled here.
        policy: what to do when a load fails: compute the prompt here, loudly, or fail the request.
        longest_blocks: blocks of the longest request.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        external: ExternalKV,
        send: SendToRouter,
        policy: LoadFailurePolicy,
        local_prefill_tokens: int,
        longest_blocks: int,
    ) -> None:
        self._counts = LoadCounts(0, 0, 0, 0.0)
        self._pool = pool
        self._external = external
        self._send = send
        self._policy = policy
        self._local_prefill_tokens = local_prefill_tokens
        self._longest_blocks = longest_blocks

    def may_load(self, request: Request, num_blocks: int, num_others: int) -> bool:
        """Whether one block per running or loading request stays free, and prefills that have not ended hold at most
        half of the pool. Those of which only parts are there leave room for the longest request: a prefill engine that
        has no room for the rest of one prompt waits until another one's hand-off is read.
        """
        if self._pool.num_available - num_blocks < num_others:
            return False
        if request.kv == "await_peer" and (request.handoff is None or request.awaits_rest):
            reserved = sum(
                len(load.request.held_blocks())
                for load in self._external.loads.values()
                if load.request.kv == "await_peer" and not load.request.output_token_ids
            )
            most = self._pool.num_blocks // 2
            if request.awaits_rest:  # which need not begin before its prompt's end
                most = min(most, self._pool.num_blocks - self._longest_blocks - num_others - 1)
            elif not reserved:
                return True
            return reserved + num_blocks <= most
        return True

    def declines(self, request: Request, num_missing: int) -> bool:
        """Whether a conditional request with `num_missing` tokens missing is prefilled here; tells the peer."""
        submit = request.submit
        if not submit.conditional or request.handoff is not None or num_missing >= self._local_prefill_tokens:
            return False
        self._send(request.router_id, Allocated(submit.request_id, submit.attempt, 0, 0))
        return True

    def load_allocated(self, request: Request, start: int, stop: int, ticket: bytes | None) -> None:
        """Tell the peer which KV is wanted, unless it already knows."""
        submit = request.submit
        if submit.handoff is None or ticket is not None:
            self._send(request.router_id, Allocated(submit.request_id, submit.attempt, start, stop, ticket))

    def load_ended(self, request: Request, ok: bool, outcome: TransferOutcome) -> bool:
        """Count the load, report it to the router, and end the peer's lease. False: the request must fail."""
        submit = request.submit
        counts = self._counts
        if ok or outcome.num_tokens:
            counts = counts._replace(
                bytes_received=counts.bytes_received + outcome.num_bytes,
                transfer_seconds=counts.transfer_seconds + outcome.seconds,
            )
        if not ok and request.kv != "await_peer" and outcome.code == KVNotFound.code:
            counts = counts._replace(num_partial=counts.num_partial + 1)  # a cache may lose what it promised
        elif not ok:
            counts = counts._replace(num_failures=counts.num_failures + 1)
            logger.warning(
                "KV load of request %s (transfer %s) failed: %s, %d tokens were loaded; policy %s",
                request.name, submit.transfer_id, outcome.code, outcome.num_tokens, self._policy,
            )  # fmt: skip
        self._counts = counts
        loaded = Loaded(submit.request_id, submit.attempt, ok, outcome.code, outcome.num_bytes, outcome.seconds)
        if request.kv != "await_peer":
            if request.handoff is not None:  # lent: the router returns it
                self._send(request.router_id, loaded)
            return True  # a cache's miss: what it did not have is computed
        self._send(request.router_id, loaded)
        if ok or self._policy == "recompute":  # else another attempt may read it: the router ends its lease
            lease = submit.attempt if request.handoff is None else request.handoff.attempt
            self._send(request.router_id, Release(submit.transfer_id, lease))
            return True
        return False

    def counts(self) -> LoadCounts:
        """Counts of the loads so far."""
        return self._counts
