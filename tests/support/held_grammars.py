"""Grammars that are ready, and masks that come, when a test says so; all tokens are allowed."""

from collections.abc import Callable, Sequence

import numpy as np

from pdkv.errors import PdkvError
from pdkv.grammar.matching.host import Words
from pdkv.sampling.shape import Grammar
from pdkv.wire.types import RequestKey


class _Ticket:
    def __init__(self, number: int) -> None:
        self.number = number
        self.done = self.is_closed = False
        self.error: PdkvError | None = None


class HeldStore:
    """Stands in for a `GrammarHost`.

    Args:
        is_late: whether a mask that is asked for is not there; it comes with `bring`.
    """

    def __init__(self, num_words: int = 1, is_late: Callable[[], bool] = lambda: False) -> None:
        self.tickets: list[_Ticket] = []
        self.tenants: list[str] = []
        self.failed: dict[RequestKey, PdkvError] = {}
        self.missing: list[RequestKey] = []
        self.answers: dict[RequestKey, list[int]] = {}
        self._drafts: dict[RequestKey, int] = {}
        self._num_words = num_words
        self._is_late = is_late
        self._known: dict[Grammar, PdkvError | None] = {}
        self._held: dict[Grammar, list[_Ticket]] = {}

    @property
    def held(self) -> list[Grammar]:
        """Those that were asked for, and that are not there yet."""
        return list(self._held)

    def settle(self, grammar: Grammar, error: PdkvError | None = None) -> None:
        """The grammar is ready, or refused."""
        self._known[grammar] = error
        for ticket in self._held.pop(grammar, ()):
            ticket.done, ticket.error = True, error

    def bring(self, index: int = 0) -> None:
        """A mask that was late is there now."""
        del self.missing[index]

    # --- what an engine's loop asks for ---------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        return bool(self.failed)

    def ask(self, grammar: Grammar, tenant: str) -> _Ticket:
        ticket = _Ticket(len(self.tickets))
        ticket.done, ticket.error = grammar in self._known, self._known.get(grammar)
        self.tickets.append(ticket)
        self.tenants.append(tenant)
        if not ticket.done:
            self._held.setdefault(grammar, []).append(ticket)
        return ticket

    def leave(self, ticket: _Ticket) -> None:
        assert not ticket.is_closed
        ticket.is_closed = True

    def take_failed(self) -> dict[RequestKey, PdkvError]:
        failed, self.failed = self.failed, {}
        return failed

    def is_in(self, key: RequestKey) -> bool:
        return key not in self.missing

    # --- what a runner asks for -----------------------------------------------------------------------------------

    def open(self, key: RequestKey, number: int, token_ids: Sequence[int], own_stops: Sequence[int]) -> None:
        assert key not in self.answers
        self.answers[key], self._drafts[key] = list(token_ids), 0

    def go_on(self, steps: Sequence[tuple[RequestKey, list[int], list[int]]]) -> None:
        for key, token_ids, drafts in steps:
            assert token_ids
            self.answers[key] += token_ids
            self._drafts[key] = len(drafts)

    def masks(self, keys: Sequence[RequestKey]) -> list[Words | None]:
        for key in keys:
            assert key not in self.missing, "it is held"
            if self._is_late():
                self.missing.append(key)
        full = np.full((1, self._num_words), -1, np.int32)
        return [None if key in self.missing else np.repeat(full, 1 + self._drafts[key], 0) for key in keys]

    def end(self, key: RequestKey) -> None:
        del self.answers[key]
        if key in self.missing:
            self.missing.remove(key)
