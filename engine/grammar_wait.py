"""Requests that wait for their grammar, outside the scheduler's queues, and requests that wait for a late mask."""

from typing import NamedTuple

import msgspec

from pdkv.engine.plan import StepPlan
from pdkv.engine.request import Request
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.grammar.matching.host import GrammarHost
from pdkv.grammar.matching.state import Known
from pdkv.wire.types import RequestKey


class Answered(NamedTuple):
    """A request that no longer waits."""

    request: Request
    error: PdkvError | None  # None: its grammar is ready


class GrammarWait:
    """The grammars of an engine's requests. Single-threaded.

    Args:
        store: None: this engine cannot enforce grammars. The caller owns it.
    """

    def __init__(self, store: GrammarHost | None) -> None:
        self._store = store
        self._tickets: dict[RequestKey, tuple[Request, Known]] = {}
        self._waiting: dict[RequestKey, Known] = {}  # requests whose grammar is not ready yet
        self._late: dict[RequestKey, Request] = {}  # the other requests, those that a step has left out
        self._resumed: list[RequestKey] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    @property
    def has_answers(self) -> bool:
        """Whether `take_answers` or `resume` has something."""
        if self._store is None or not self._tickets:
            return False
        done = any(ticket.done for ticket in self._waiting.values())
        return done or self._store.has_failed or any(map(self._store.is_in, self._late))

    def add(self, request: Request) -> bool:
        """Request a new request's grammar. Returns whether it may be scheduled now; else it waits.

        Raises:
            PdkvError: its grammar cannot be prepared, and why.
        """
        grammar = request.submit.params.grammar
        if grammar is None:
            return True
        if self._store is None:
            raise InvalidRequest("this engine cannot enforce structured_outputs", param="structured_outputs")
        ticket = self._store.ask(grammar, request.submit.tenant)
        if ticket.error is not None:
            self._store.leave(ticket)
            raise ticket.error.anew()
        request.grammar = ticket.number
        self._tickets[request.key] = request, ticket
        if not ticket.done:
            self._waiting[request.key] = ticket
        return ticket.done

    def take_answers(self) -> list[Answered]:
        """Requests whose wait is over, in order of arrival, and those that failed, which the caller must remove."""
        if self._store is None or not self._tickets:
            return []
        answers = []
        for key in [key for key, ticket in self._waiting.items() if ticket.done]:
            request, ticket = self._tickets[key]
            error = ticket.error
            if error is None:
                del self._waiting[key]
            answers.append(Answered(request, error and error.anew()))
        failed = self._store.take_failed()
        return answers + [
            Answered(self._tickets[key][0], error) for key, error in failed.items() if key in self._tickets
        ]

    def left_out(self, request: Request) -> None:
        """Note that a step had no mask for the request, which continues when the mask is ready."""
        request.leave_out()
        self._late[request.key] = request

    def resume(self) -> bool:
        """Let requests whose masks are ready continue. Returns whether there is one."""
        if self._store is None:
            return False
        found = [key for key in self._late if self._store.is_in(key)]
        for key in found:
            request = self._late.pop(key)
            if request.awaits_mask:  # else it was preempted in the meantime
                request.awaits_mask = False
                self._resumed.append(key)
        return bool(found)

    def remove(self, request: Request) -> bool:
        """Forget a request that ends. Returns whether it was still waiting for its grammar, unknown to the
        scheduler.
        """
        self._late.pop(request.key, None)
        waited = self._waiting.pop(request.key, None) is not None
        if request.key in self._tickets and self._store is not None:
            self._store.leave(self._tickets.pop(request.key)[1])
        return waited

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with the requests that may draw again."""
        if not self._resumed:
            return plan
        resumed, self._resumed = self._resumed, []
        return msgspec.structs.replace(plan, resumed=resumed)

    def close(self) -> None:
        """Release everything. Idempotent."""
        for request, _ in list(self._tickets.values()):
            self.remove(request)
