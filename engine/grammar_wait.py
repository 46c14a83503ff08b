"""Requests that wait for their grammar, in no queue of the scheduler; and which grammars the workers have."""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pdkv.engine.plan import StepPlan
from pdkv.engine.request import Request
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.spec import Grammar
from pdkv.grammar.store import GrammarStore, GrammarTicket
from pdkv.wire.messages import RequestKey

MAX_IDLE_BYTES = 64 << 20
"""Of compiled grammars that workers keep though no request has them now."""

_NO_STORE = "this engine cannot enforce structured_outputs"


class Answered(NamedTuple):
    """A request that waits no longer."""

    request: Request
    error: PdkvError | None  # None: its grammar is there


class GrammarWait:
    """The grammars of an engine's requests: awaited, then told to the workers, with the next plan. Single-threaded.

    Args:
        store: who compiles; None: this engine cannot. Stays the caller's.
    """

    def __init__(self, store: GrammarStore | None, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._store = store
        self._waiting: dict[RequestKey, tuple[Request, GrammarTicket]] = {}
        self._workers = _WorkersGrammars(max_idle_bytes)
        self._has_asked = self._has_announced = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def has_answers(self) -> bool:
        """Whether `take_answers` has something."""
        return bool(self._waiting) and any(ticket.done for _, ticket in self._waiting.values())

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
        ticket = self._store.ask(grammar)
        self._has_asked = True
        if not ticket.done:
            self._waiting[request.key] = request, ticket
            return False
        self._take(request, grammar, ticket)
        return True

    def take_answers(self) -> list[Answered]:
        """Requests whose wait is over, in the order in which they came; those with an error are to be removed."""
        done = [request for request, ticket in self._waiting.values() if ticket.done]
        return [Answered(request, self._answer(request)) for request in done]

    def remove(self, request: Request) -> bool:
        """The request ends. Returns whether it was still waiting, so that nobody else knows it."""
        waited = self._waiting.pop(request.key, None)
        if waited is not None:
            waited[1].close()
        elif request.grammar is not None and request.submit.params.grammar is not None:
            self._workers.give_back(request.submit.params.grammar)
            request.grammar = None
        return waited is not None

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with what its workers have to learn of grammars, and to forget."""
        is_first = self._has_asked and not self._has_announced
        if not (is_first or self._workers.has_news):
            return plan
        self._has_announced = True
        learned, forgotten = self._workers.take_news()
        return msgspec.structs.replace(plan, grammars=learned, ended_grammars=forgotten, expects_grammars=is_first)

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        for _, ticket in self._waiting.values():
            ticket.close()
        self._waiting.clear()

    def _answer(self, request: Request) -> PdkvError | None:
        grammar = request.submit.params.grammar
        assert grammar is not None
        try:
            self._take(request, grammar, self._waiting[request.key][1])
        except PdkvError as error:
            return error
        del self._waiting[request.key]
        return None

    def _take(self, request: Request, grammar: Grammar, ticket: GrammarTicket) -> None:
        try:
            request.grammar = self._workers.take(grammar, ticket.result())
        finally:
            ticket.close()


@dataclasses.dataclass(slots=True)
class _Known:
    """A grammar that the workers have, or will with the next plan."""

    number: int
    compiled: CompiledGrammar
    num_users: int = 0  # live requests


class _WorkersGrammars:
    """What the workers know, by number. Those that no request has are kept, the last ones, within a bound."""

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._known: dict[Grammar, _Known] = {}
        self._idle: OrderedDict[Grammar, _Known] = OrderedDict()  # without users; who has been so the longest first
        self._idle_bytes = 0
        self._learned: dict[int, CompiledGrammar] = {}
        self._forgotten: list[int] = []
        self._next = 0

    @property
    def has_news(self) -> bool:
        """Whether `take_news` has something."""
        return bool(self._learned or self._forgotten)

    def take_news(self) -> tuple[Mapping[int, CompiledGrammar], list[int]]:
        """What the workers have to learn, and what to forget, since the last call."""
        news = self._learned, self._forgotten
        self._learned, self._forgotten = {}, []
        return news

    def take(self, grammar: Grammar, compiled: CompiledGrammar) -> int:
        """A request has the grammar. Returns its number."""
        known = self._known.get(grammar)
        if known is None:
            known = self._known[grammar] = _Known(self._next, compiled)
            self._next += 1
            self._learned[known.number] = compiled
        if self._idle.pop(grammar, None) is not None:
            self._idle_bytes -= known.compiled.num_bytes
        known.num_users += 1
        return known.number

    def give_back(self, grammar: Grammar) -> None:
        """A request that had it has ended."""
        known = self._known[grammar]
        known.num_users -= 1
        if known.num_users:
            return
        self._idle[grammar] = known
        self._idle_bytes += known.compiled.num_bytes
        while self._idle_bytes > self._max_idle_bytes:
            oldest, idle = self._idle.popitem(last=False)
            self._idle_bytes -= idle.compiled.num_bytes
            del self._known[oldest]
            if self._learned.pop(idle.number, None) is None:  # else nobody has heard of it
                self._forgotten.append(idle.number)
