"""Grammars that wait to be compiled: in two lanes, the shortest text first, but none is overtaken for ever.

Every grammar begins in the fast lane, where it is given a slice of time. One that takes longer begins again in the slow
one, with all the time that a grammar may take: what is slow to compile, on purpose or not, holds up its like alone.
"""

import heapq
import itertools
import math
from dataclasses import dataclass
from enum import IntEnum

from pdkv.errors import PdkvError, ServerBusy
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.spec import Grammar

MAX_SLOW = 64
"""Grammars in the slow lane's queue."""

_HANDICAP = 1024
"""Characters that each grammar counts as longer than the one that came before it."""


class Lane(IntEnum):
    """Where a grammar is compiled."""

    FAST = 0
    SLOW = 1


@dataclass(eq=False)
class Wanted:
    """A grammar that was asked for, and what became of it."""

    grammar: Grammar
    value: CompiledGrammar | PdkvError | None = None  # None: not known yet
    num_waiting: int = 0  # tickets that are open
    forget_at: float = math.inf  # by the monotonic clock

    @property
    def num_bytes(self) -> int:
        """Memory that it takes once it is known."""
        compiled = self.value.num_bytes if isinstance(self.value, CompiledGrammar) else 0
        return compiled + len(self.grammar.text) + 1024  # of the objects


class WaitingGrammars:
    """The queues. Not thread-safe: the store's lock guards them."""

    def __init__(self, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_waiting, self._max_bytes = max_waiting, max_waiting_bytes
        self._heaps: dict[Lane, list[tuple[int, int, Wanted]]] = {lane: [] for lane in Lane}
        self._order = itertools.count()
        self._num_bytes = 0

    def put(self, wanted: Wanted, lane: Lane) -> None:
        """Raises ServerBusy where too many wait already."""
        size = len(wanted.grammar.text)
        heap = self._heaps[lane]
        most = MAX_SLOW if lane is Lane.SLOW else self._max_waiting
        if len(heap) >= most or self._num_bytes + size > self._max_bytes:
            what = "grammars that are slow to compile" if lane is Lane.SLOW else "grammars"
            raise ServerBusy(f"too many {what} wait to be compiled: try again")
        number = next(self._order)
        heapq.heappush(heap, (size + _HANDICAP * number, number, wanted))
        self._num_bytes += size

    def pop(self, lane: Lane) -> Wanted | None:
        """The next one of a lane, whether or not somebody waits for it still."""
        heap = self._heaps[lane]
        if not heap:
            return None
        wanted = heapq.heappop(heap)[-1]
        self._num_bytes -= len(wanted.grammar.text)
        return wanted
