"""A process that matches grammars: one order after the other, each within its grammar's limits.

While the library works, a kernel timer runs that ends this process when the grammar's time is used up. A word of the
slab says which grammar it is working on.
"""

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdkv.errors import InvalidRequest
from pdkv.grammar.matching.matcher import Matcher
from pdkv.grammar.matching.messages import (
    Answer,
    Close,
    Forget,
    Frames,
    Learn,
    Learned,
    Open,
    Order,
    Refused,
    Steps,
    Tell,
    Told,
    decode_order,
    frame,
)
from pdkv.grammar.matching.slab import Slab
from pdkv.grammar.matching.vocabulary import Vocabulary, add_bits, bits_of
from pdkv.sampling.shape import Grammar

S_PER_TOKEN = 0.005
"""Seconds that a grammar earns back by an accepted token. Most masks take a tenth of it at most, those of SQL a
third.
"""

_CHUNK_BYTES = 1 << 20


class _Known:
    """A grammar, and its remaining time."""

    def __init__(self, number: int, grammar: Grammar, time_s: float) -> None:
        self.number, self.grammar = number, grammar
        self.left_s = time_s
        self.fresh: Matcher | None = None  # at the beginning of an answer


@dataclass
class _Row:
    """An answer."""

    place: int  # in the slab
    known: _Known
    matcher: Matcher
    own_stops: list[tuple[int, int]]  # bits of a mask
    number: int  # of its masks


class Worker:
    """Serves until the engine closes its end of the socket."""

    def __init__(
        self, sock: socket.socket, index: int, vocabulary: Vocabulary, slab: Slab, *, event_fd: int, time_s: float
    ) -> None:
        """`event_fd`: an eventfd that is signalled when masks that the engine waits for are ready."""
        self._sock = sock
        self._index = index
        self._vocabulary = vocabulary
        self._slab = slab
        self._event_fd = event_fd
        self._time_s = time_s
        self._frames = Frames()
        self._known: dict[int, _Known] = {}
        self._rows: dict[int, _Row] = {}
        self._to_learn: deque[_Known] = deque()

    def run(self) -> None:
        """Run: answers advance before a new grammar is handled."""
        while (orders := self._receive()) is not None:
            for order in orders:
                self._do(order)
            if self._to_learn:
                self._learn(self._to_learn.popleft())

    def _receive(self) -> Sequence[Order] | None:
        """Messages that have come, or come first; None: the engine is gone."""
        try:
            data = self._sock.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT if self._to_learn else 0)
        except BlockingIOError:
            return ()
        except ConnectionResetError:
            return None
        return [decode_order(message) for message in self._frames.add(data)] if data else None

    def _say(self, answer: Answer) -> None:
        self._sock.sendall(frame(answer))

    def _do(self, order: Order) -> None:
        match order:
            case Steps(steps=steps):
                rows = [(row, step) for step in steps if (row := self._rows.get(step.row)) is not None]
                for row, step in sorted(rows, key=lambda pair: -pair[0].known.left_s):  # the quick ones first
                    self._go_on(row, step.token_ids, step.drafts)
            case Open():
                self._open(order)
            case Close(row=row):
                self._rows.pop(row, None)
            case Learn(number=number, grammar=grammar):
                known = self._known[number] = _Known(number, grammar, self._time_s)
                self._to_learn.append(known)
            case Forget(number=number):
                self._known.pop(number, None)
            case Tell():
                self._say(Told())

    def _learn(self, known: _Known) -> None:
        refused = ""
        try:
            if known.number in self._known:  # otherwise it is not wanted any more
                self._fresh(known)
        except InvalidRequest as error:
            refused = str(error)
        self._say(Learned(known.number, refused))

    def _fresh(self, known: _Known) -> Matcher:
        """A new matcher at the beginning of an answer, to be copied. Raises InvalidRequest."""
        if known.fresh is None:
            with self._at(known):
                known.fresh = Matcher(known.grammar, self._vocabulary)
        return known.fresh

    def _open(self, order: Open) -> None:
        known = self._known[order.grammar]
        fresh = self._fresh(known)
        with self._at(known):
            matcher = fresh.copy()
        row = self._rows[order.row] = _Row(order.row, known, matcher, bits_of(order.own_stops), order.first)
        self._go_on(row, order.token_ids, order.drafts)

    def _go_on(self, row: _Row, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Make the masks after these tokens, and then after each draft as far as the grammar allows them."""
        try:
            with self._at(row.known):
                _accept(row, token_ids)
                count = self._fill(row, drafts)
        except InvalidRequest as error:
            del self._rows[row.place]
            self._say(Refused(row.place, str(error)))
            return
        self._slab.publish(row.place, count, row.number)
        if self._slab.waiting[0]:
            os.eventfd_write(self._event_fd, 1)

    def _fill(self, row: _Row, drafts: Sequence[int]) -> int:
        """The number of masks: one, and one for each draft."""
        count = 0
        self._fill_one(row, count)
        for draft in drafts:
            if not row.matcher.accept(draft):
                break
            count += 1
            self._fill_one(row, count)
        if count:
            row.matcher.rollback(count)
        return count + 1

    def _fill_one(self, row: _Row, index: int) -> None:
        words = self._slab.masks(row.place, index, index + 1)
        row.matcher.fill(words)
        if any(words[word] & bit for word, bit in self._vocabulary.stop_bits):
            add_bits(words, row.own_stops)

    @contextlib.contextmanager
    def _at(self, known: _Known) -> Iterator[None]:
        """A context in which the library works on this grammar. Ends this process when it has used up its time."""
        slab, index, began_s = self._slab, self._index, time.process_time()
        slab.working[index] = known.number + 1
        signal.setitimer(signal.ITIMER_PROF, known.left_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            known.left_s = min(known.left_s - (time.process_time() - began_s), self._time_s)
            if known.left_s <= 0.0:  # the timer counts in the kernel's ticks
                signal.raise_signal(signal.SIGPROF)
            slab.working[index] = 0
            slab.calls[index] += 1


def _accept(row: _Row, token_ids: Sequence[int]) -> None:
    """Accept tokens. Raises InvalidRequest if the grammar refuses one."""
    for token_id in token_ids:
        if not row.matcher.accept(token_id):
            raise InvalidRequest(f"the output has the token {token_id} in a place where its grammar does not allow it")
        row.number += 1
        row.known.left_s += S_PER_TOKEN
