"""The life of a load, from the reservation of its blocks to its success or failure.

A load begins when its request's blocks are allocated and ends once: it finished, it failed, its deadline passed, or its
request ended. A request whose load brought too little computes the rest here, or fails, as the decode role decides.
"""

import logging
from itertools import islice, takewhile

from pdkv.connectors.base import NO_MATCH, TransferOutcome
from pdkv.engine.hooks import DecodeHooks
from pdkv.engine.kv.kv_cache_manager import KVCacheManager, PrefixHit
from pdkv.engine.outside.external import EndedLoad, ExternalKV, KVLoad
from pdkv.engine.queues import Queues
from pdkv.engine.request import Request
from pdkv.wire.kv import KVHandoff
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

_TIMED_OUT = TransferOutcome("transfer_timeout")
_NOT_FOUND = TransferOutcome("kv_not_found")


class Loads:
    """Starts and ends the loads of one engine. `external` keeps track of them.

    Args:
        timeout_s: the longest time for a load, or for a connector to say whether there is one.
    """

    def __init__(
        self, kv: KVCacheManager, external: ExternalKV, decode: DecodeHooks, queues: Queues, *, timeout_s: float
    ) -> None:
        self.rejected: list[tuple[Request, TransferOutcome]] = []  # failed loads under the policy "fail"
        self._kv = kv
        self._external = external
        self._decode = decode
        self._queues = queues
        self._timeout_s = timeout_s
        self._asking: dict[RequestKey, tuple[Request, float]] = {}  # those that wait for an answer, and until when

    # --- begin ----------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, hit: PrefixHit, stop: int, now: float, *, source_known: bool) -> bool:
        """Take blocks for tokens up to `stop`: the request waits outside the batch until they are filled.

        Args:
            source_known: the load starts now; otherwise when its connector has an answer.

        Returns:
            False: there is no memory for it.
        """
        num_others = len(self._queues.running) + len(self._external.loads)
        if not self._decode.may_load(request, self._kv.num_taken(stop, hit, stop), num_others):
            return False
        if not self._kv.admit(request, hit, stop, stop):
            return False
        request.num_confirmed = hit.num_tokens
        timeout_s = (request.submit.load_timeout_s if request.borrows else 0.0) or self._timeout_s
        deadline = request.deadline if request.awaits_rest else now + timeout_s
        load = KVLoad(request, request.num_confirmed, stop, deadline, is_early=request.awaits_rest)
        self._external.add_load(load)
        ticket = self._external.start(load) if source_known or load.start == load.stop else None
        if request.kv == "await_peer" or ticket is not None:
            self._decode.load_allocated(request, load.start, load.stop, ticket)
        if load.done:
            self._finished(load, TransferOutcome())
        return True

    def handed_off(self, request: Request, handoff: KVHandoff, now: float) -> None:
        """Note where the request's KV is; a load that waits for more of it goes on."""
        if handoff.more and not request.awaits_rest:
            return  # a part of its load has failed, and it begins anew with the last hand-off; or it has had that
        load = self._external.loads.get(request.transfer_key)
        request.handoff = handoff if request.handoff is None else request.handoff.joined(handoff)
        if load is not None and (load.is_early or not load.started):
            load.deadline = request.deadline if handoff.more else now + self._timeout_s
            if load.started:
                self._external.start(load)

    def asks(self, request: Request, now: float) -> None:
        """Note that the connector has yet to answer for a waiting request, which stops asking `timeout_s` after its
        first question.
        """
        self._asking.setdefault(request.key, (request, now + self._timeout_s))

    def answered(self, request: Request) -> None:
        """Note that the connector has answered for the request."""
        self._asking.pop(request.key, None)

    def begin_layerwise(self, request: Request, start: int, stop: int, step_id: int, now: float) -> None:
        """Load tokens [start, stop) layer by layer during this step, which computes the tokens after `stop`."""
        load = KVLoad(request, start, stop, now + self._timeout_s, layerwise_step=step_id)
        self._external.add_load(load)
        self._external.start(load)

    def start_known(self) -> None:
        """Start loads that had their blocks reserved before the source of the KV was known, and now know it."""
        for load in [x for x in self._external.unstarted.values() if not x.done]:
            matched = self._external.match(load.request, load.start)
            if matched.ask_again:
                continue
            load.stop = load.start + matched.num_tokens
            if matched == NO_MATCH or not self._kv.can_resume(load.request, load.stop):
                self._failed(load, _NOT_FOUND, transfer_ended=True)
            else:
                self._external.start(load)

    # --- end ------------------------------------------------------------------------------------------------------

    def settle(self, ended: list[EndedLoad]) -> None:
        """Settle these loads: their transfers have ended."""
        for load, ok, outcome in ended:
            if ok:
                self._finished(load, outcome)
            else:
                self._failed(load, outcome, transfer_ended=True)

    def end_step(self, step_id: int) -> None:
        """Fail a layerwise load that the ended step left open."""
        for load in [x for x in self._external.layerwise.values() if x.layerwise_step == step_id]:
            self._failed(load, _TIMED_OUT, transfer_ended=False)

    def wake(self, request: Request) -> None:
        """Let the request run if its KV has arrived: its first token is known."""
        load = self._external.loads.get(request.transfer_key)
        if load is not None and load.done:
            self._activate(load)

    def fail(self, request: Request, outcome: TransferOutcome) -> None:
        """Fail the load: the peer says that the request's KV will never come."""
        load = self._external.loads.get(request.transfer_key)
        if load is not None and not load.done and load.layerwise_step is None:
            self._failed(load, outcome, transfer_ended=False)

    def fail_waiting(self, request: Request, outcome: TransferOutcome = _NOT_FOUND) -> None:
        """Note that nothing will be loaded for a request in the queue."""
        self.answered(request)
        self._queues.waiting.remove(request)
        self._fall_back(request, outcome)

    def give_up(self, request: Request) -> None:
        """End the load, if any, of a request that ends or loses its blocks."""
        self.answered(request)
        load = self._external.loads.get(request.transfer_key)
        if load is not None and load.request is request:
            self._external.end_load(request.transfer_key, transfer_ended=False)

    def expire(self, now: float) -> None:
        """Let loads past their deadline fall back, and requests that waited too long for the connector's answer."""
        for load in [x for x in self._external.loads.values() if x.deadline <= now and x.layerwise_step is None]:
            self._failed(load, _TIMED_OUT, transfer_ended=False)
        for request, _ in list(takewhile(lambda asking: asking[1] <= now, self._asking.values())):
            if self._external.match(request, self._kv.find_hit(request).num_tokens).ask_again:
                self.fail_waiting(request, _TIMED_OUT)
            else:
                self.answered(request)  # the answer came while steps were full

    def next_deadline(self) -> float | None:
        """The earliest deadline of a load or of a request that waits for a connector's answer."""
        deadlines = [load.deadline for load in self._external.loads.values()]
        deadlines += [deadline for _, deadline in islice(self._asking.values(), 1)]  # the oldest question
        return min(deadlines, default=None)

    def _finished(self, load: KVLoad, outcome: TransferOutcome) -> None:
        request = load.request
        request.num_external = load.stop - load.start
        request.source_is_peer = request.kv == "await_peer"
        load.done = True
        if request.kv == "await_peer" or request.handoff is not None:
            self._decode.load_ended(request, True, outcome)
        if load.layerwise_step is not None:
            self._take_over(load)
            return
        request.num_computed = request.num_confirmed = load.stop
        self._activate(load)

    def _activate(self, load: KVLoad) -> None:
        """Let a finished load's request join the running ones, once its next token is known.

        Only then does its KV enter the cache: by then the peer, which sent the last step's KV before that step ended,
        has found nothing wrong with it.
        """
        request = load.request
        if request.kv == "await_peer" and not request.output_token_ids:
            return  # Continue brings the token
        self._kv.commit(request)
        self._take_over(load)
        self._external.report_confirmed(request)
        self._queues.run(request)
        self._queues.needs_step = True

    def _take_over(self, load: KVLoad) -> None:
        """Treat the request, whose KV has arrived, like any other of this engine from now on."""
        self._external.end_load(load.request.transfer_key, transfer_ended=True)
        load.request.compute_here()

    def _failed(self, load: KVLoad, outcome: TransferOutcome, *, transfer_ended: bool) -> None:
        request = load.request
        if load.is_early and transfer_ended:
            self._begin_anew(load, outcome)
            return
        self._external.end_load(request.transfer_key, transfer_ended=transfer_ended)
        if load.layerwise_step is not None:
            self._external.preempted(request)  # tokens computed after the load are void, too
        if request in self._queues.running:
            self._queues.running.remove(request)
        num_loaded = load.start + outcome.num_tokens if transfer_ended and outcome.num_tokens else 0
        if num_loaded and not self._kv.can_resume(request, min(num_loaded, request.num_wanted)):
            num_loaded = 0  # a window that ends elsewhere was loaded
        self._fall_back(request, outcome, num_loaded)

    def _begin_anew(self, load: KVLoad, outcome: TransferOutcome) -> None:
        """Load all of it once its source has all of it: one that computes may have lost the blocks that it named."""
        logger.info("a part of the KV of request %s was not loaded in advance: %s", load.request.name, outcome.code)
        load.is_early = load.started = False
        self._external.unstarted[load.request.transfer_key] = load
        if load.request.awaits_rest:
            load.request.handoff = None
        self._queues.needs_step = True

    def _fall_back(self, request: Request, outcome: TransferOutcome, num_loaded: int = 0) -> None:
        """Compute here what did not arrive, or fail the request, according to the role's policy.

        Args:
            num_loaded: tokens [0, num_loaded) are in its blocks.
        """
        is_from_peer, is_loan = request.kv == "await_peer", request.borrows
        may_compute = self._decode.load_ended(request, False, outcome)
        request.compute_here()
        if num_loaded and may_compute:
            self._queues.leave_workers(request)
            request.resume(min(num_loaded, request.num_wanted))
            request.source_is_peer = is_from_peer
            self._kv.commit(request)
            self._queues.run(request)
            self._queues.needs_step = True
            return
        request.load_failed = not is_loan  # without the loan, something may be found elsewhere
        self._queues.send_back(request)
        if not may_compute:
            self.rejected.append((request, outcome))
