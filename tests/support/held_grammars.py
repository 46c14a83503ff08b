"""Compiled grammars that are there when a test says so."""

from typing import cast

import torch

from pdkv.errors import PdkvError
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.spec import Grammar
from pdkv.grammar.store import GrammarStore


class Anything:
    """A matcher of a grammar that allows all tokens."""

    is_filled_alone = True

    def __init__(self) -> None:
        self._num_tokens = 0

    def accept(self, token_id: int) -> bool:
        self._num_tokens += 1
        return True

    def rollback(self, count: int) -> None:
        assert count <= self._num_tokens
        self._num_tokens -= count

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = -1


class Sized:
    """A compiled grammar that allows all tokens."""

    def __init__(self, num_bytes: int = 100) -> None:
        self.num_bytes = num_bytes

    def matcher(self, time: MatchTime, grammar: int) -> Anything:
        return Anything()


class _Ticket:
    def __init__(self) -> None:
        self.value: Sized | PdkvError | None = None
        self.is_closed = False

    @property
    def done(self) -> bool:
        return self.value is not None

    def result(self) -> Sized:
        assert self.value is not None
        if isinstance(self.value, PdkvError):
            raise self.value
        return self.value

    def close(self) -> None:
        self.is_closed = True


class HeldStore:
    """Stands in for a `GrammarStore` whose compilations end with `settle`."""

    def __init__(self) -> None:
        self.tickets: list[_Ticket] = []
        self._known: dict[Grammar, Sized | PdkvError] = {}
        self._held: dict[Grammar, list[_Ticket]] = {}

    def ask(self, grammar: Grammar) -> _Ticket:
        ticket = _Ticket()
        ticket.value = self._known.get(grammar)
        self.tickets.append(ticket)
        if ticket.value is None:
            self._held.setdefault(grammar, []).append(ticket)
        return ticket

    @property
    def held(self) -> list[Grammar]:
        """Those that somebody asked for, and that are not there yet."""
        return list(self._held)

    def settle(self, grammar: Grammar, value: Sized | PdkvError) -> None:
        self._known[grammar] = value
        for ticket in self._held.pop(grammar, ()):
            ticket.value = value

    def as_store(self) -> GrammarStore:
        """As an engine takes it."""
        return cast(GrammarStore, self)
