"""Requests that wait for their grammar, in no queue of the scheduler; and those that wait for a mask that was late."""

from typing import NamedTuple, Protocol

import msgspec

from pdkv.engine.plan import StepPlan
from pdkv.engine.request import Request
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.grammar.spec import Grammar
from pdkv.wire.messages import RequestKey

_NO_STORE = "this engine cannot enforce structured_outputs"


class Ticket(Protocol):
    """See `GrammarTicket`."""

    @property
    def done(self) -> bool: ...

    @property
    def number(self) -> int: ...

    def close(self) -> None: ...


class GrammarStore(Protocol):
    """Who gets grammars ready, and knows which answers are late or fail; see `GrammarHost`."""

    @property
    def has_failed(self) -> bool: ...

    def ask(self, grammar: Grammar, tenant: str) -> Ticket: ...

    def take_failed(self) -> dict[RequestKey, PdkvError]: ...

    def is_in(self, key: RequestKey) -> bool: ...


class Answered(NamedTuple):
    """A request that waits no longer."""

    request: Request
    error: PdkvError | None  # None: its grammar is there


class GrammarWait:
    """The grammars of an engine's requests. Single-threaded.

    Args:
        store: None: this engine can enforce none. Stays the caller's.
    """

    def __init__(self, store: GrammarStore | None) -> None:
        self._store = store
        self._waiting: dict[RequestKey, tuple[Request, Ticket]] = {}
        self._live: dict[RequestKey, tuple[Request, Ticket]] = {}  # whose grammar is there
        self._late: dict[RequestKey, Request] = {}  # of those, the ones that a step has left out
        self._resumed: list[RequestKey] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    @property
    def has_answers(self) -> bool:
        """Whether `take_answers` has something, or `resume`."""
        if self._store is None or not (self._waiting or self._live):
            return False
        done = any(ticket.done for _, ticket in self._waiting.values())
        return done or self._store.has_failed or any(map(self._store.is_in, self._late))

    def add(self, request: Request) -> bool:
        """Ask for a new request's grammar. Returns whether it may be scheduled now; else it waits.

        Raises:
            PdkvError: its grammar cannot be had, and why.
        """
        grammar = request.submit.params.grammar
        if grammar is None:
            return True
        if self._store is None:
            raise InvalidRequest(_NO_STORE, param="structured_outputs")
        ticket = self._store.ask(grammar, request.submit.tenant)
        if not ticket.done:
            self._waiting[request.key] = request, ticket
            return False
        self._take(request, ticket)
        return True

    def take_answers(self) -> list[Answered]:
        """Requests whose wait is over, in the order in which they came; and any that has failed. Those with an error
        are to be removed.
        """
        if self._store is None or not (self._waiting or self._live):
            return []
        done = [request for request, ticket in self._waiting.values() if ticket.done]
        answers = [Answered(request, self._answer(request)) for request in done]
        failed = self._store.take_failed()
        return answers + [Answered(self._live[key][0], error) for key, error in failed.items() if key in self._live]

    def left_out(self, request: Request) -> None:
        """A step had no mask for it: it goes on when that is there."""
        request.leave_out()
        self._late[request.key] = request

    def resume(self) -> bool:
        """Those whose masks are there now go on. Returns whether one does."""
        if self._store is None:
            return False
        found = [key for key in self._late if self._store.is_in(key)]
        for key in found:
            request = self._late.pop(key)
            if request.awaits_mask:  # else it was preempted meanwhile
                request.awaits_mask = False
                self._resumed.append(key)
        return bool(found)

    def remove(self, request: Request) -> bool:
        """The request ends. Returns whether it was still waiting for its grammar, so that the scheduler does not know
        it.
        """
        self._late.pop(request.key, None)
        waited = self._waiting.pop(request.key, None)
        _, ticket = waited or self._live.pop(request.key, (request, None))
        if ticket is not None:
            ticket.close()
        return waited is not None

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with those that are drawn for again."""
        if not self._resumed:
            return plan
        resumed, self._resumed = self._resumed, []
        return msgspec.structs.replace(plan, resumed=resumed)

    def close(self) -> None:
        """Nothing is needed any more. Idempotent."""
        for _, ticket in [*self._waiting.values(), *self._live.values()]:
            ticket.close()
        self._waiting.clear()
        self._live.clear()
        self._late.clear()

    def _answer(self, request: Request) -> PdkvError | None:
        try:
            self._take(request, self._waiting[request.key][1])
        except PdkvError as error:
            return error
        del self._waiting[request.key]
        return None

    def _take(self, request: Request, ticket: Ticket) -> None:
        try:
            request.grammar = ticket.number
        except PdkvError:
            ticket.close()
            raise
        self._live[request.key] = request, ticket
