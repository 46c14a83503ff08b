"""The engine's interface to the processes that match grammars: tickets for requests, and masks for their answers.

No thread of the engine calls the library, or waits for it without a limit. `workers.py` runs the processes.
"""

import itertools
import math
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import PdkvError, ServerBusy
from pdkv.grammar.matching.messages import Close, Forget, Learn, SlabShape, Start, Step, Steps, Tell
from pdkv.grammar.matching.slab import Slab
from pdkv.grammar.matching.state import Known, Row, WorkerState
from pdkv.grammar.matching.vocabulary import WORD_BITS
from pdkv.grammar.matching.workers import Workers
from pdkv.sampling.shape import Grammar
from pdkv.wire.types import RequestKey

Words = NDArray[np.int32]

PATIENCE_S = 0.002
"""Seconds that a step may wait for masks: what draws beside them waits with it. Rows without masks are left out."""

_NUMBERS_PER_ANSWER = 1 << 32


class GrammarHost:
    """Owns the processes. Nothing is started before the first `ask`.

    `ask` and what follows it belong to the engine's loop, `open` and what follows it to the thread of the model.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        notify: Callable[[], None],
        *,
        time_s: float = 2.0,
        memory_bytes: int = 512 << 20,
        num_processes: int = 8,
        max_waiting_chars: int = 64 << 20,
        num_requests: int = 256,
        num_drafts: int = 0,
        clock: Clock = MONOTONIC,
    ) -> None:
        """Args:
        notify: called from another thread whenever tickets are done, answers have failed, or late masks have
            arrived.
        time_s: CPU time that a grammar may use beyond what it has earned back.
        memory_bytes: memory limit of a process.
        max_waiting_chars: limit on the text of grammars that wait for one process.
        num_requests: maximum number of answers at a time.
        num_drafts: maximum number of an answer's drafts in a step.
        """
        shape = SlabShape(num_processes, num_requests, 1 + num_drafts, -(-vocab_size // WORD_BITS))
        stops = tuple(stop_token_ids)
        start = Start(str(model_dir), vocab_size, stops, time_s, memory_bytes, shape)
        self._num_words = shape.num_words
        self._max_waiting_chars = max_waiting_chars
        self._workers = Workers(start, notify, clock)
        self._lock = self._workers.lock
        self._rows: dict[RequestKey, Row] = {}
        self._numbers = itertools.count()
        self._firsts = itertools.count(1, _NUMBERS_PER_ANSWER)

    # --- the engine's loop ----------------------------------------------------------------------------------------

    def ask(self, grammar: Grammar, tenant: str) -> Known:
        """A ticket for a tenant's grammar, done at once if the tenant's process knows the grammar. Never blocks.

        Raises:
            GrammarGivenUp: the grammar was given up less than a minute ago.
            InvalidRequest: no grammar can be matched here.
            ServerBusy: too many wait, or the engine is about to stop.
        """
        with self._lock:
            self._workers.begin(grammar)
            worker = self._workers.worker_of(tenant)
            known = worker.find(grammar)
            if known is None:
                if worker.waiting_chars + len(grammar.text) > self._max_waiting_chars:
                    raise ServerBusy("too many grammars wait to be compiled: try again")
                known = Known(next(self._numbers), grammar, worker)
                self._workers.numbers[known.number] = worker.known[grammar] = known
                self._workers.send(worker, Learn(known.number, grammar), is_awaited=True)
            known.num_users += 1
            return known

    def leave(self, known: Known) -> None:
        """Note that a request no longer needs the grammar."""
        with self._lock:
            known.num_users -= 1
            for gone in known.worker.retire(known) if not known.num_users else ():
                self._workers.send(known.worker, Forget(gone.number))
                if gone.done:  # else its worker may be at it
                    del self._workers.numbers[gone.number]

    def take_failed(self) -> dict[RequestKey, PdkvError]:
        """The answers that have failed since the last call, and why."""
        with self._lock:
            failed, self._workers.failed = self._workers.failed, {}
            return failed

    @property
    def has_failed(self) -> bool:
        """Whether `take_failed` has something."""
        return bool(self._workers.failed)

    def is_in(self, key: RequestKey) -> bool:
        """Whether an answer's masks have arrived, or never will."""
        with self._lock:
            row = self._rows.get(key)
            return row is None or row.has_failed or self._is_in(row)

    def close(self) -> None:
        """End thread and processes; tickets that are not done yet get an error. Idempotent."""
        self._workers.close()

    # --- the model's thread ---------------------------------------------------------------------------------------

    def open(self, key: RequestKey, number: int, token_ids: Sequence[int], own_stops: Sequence[int]) -> None:
        """Add an answer to the batch, with these tokens so far. `own_stops` may come where the model may end it."""
        with self._lock:
            known = self._workers.numbers[number]
            row = self._rows[key] = Row(key, known, next(self._firsts), list(token_ids), list(own_stops))
            self._workers.add_row(row)

    def go_on(self, steps: Sequence[tuple[RequestKey, list[int], list[int]]]) -> None:
        """Advance answers by some tokens, optionally followed by drafts."""
        with self._lock:
            by_worker: dict[WorkerState, list[Step]] = {}
            for key, token_ids, drafts in steps:
                row = self._rows[key]
                row.token_ids += token_ids
                row.drafts = drafts
                if not row.has_failed:
                    by_worker.setdefault(row.worker, []).append(Step(row.place, token_ids, drafts))
            for worker, ordered in by_worker.items():
                self._workers.send(worker, Steps(ordered))

    def end(self, key: RequestKey) -> None:
        """Remove an answer from the batch."""
        with self._lock:
            row = self._rows.pop(key)
            self._workers.failed.pop(key, None)
            del row.worker.rows[row.place]
            row.worker.free.append(row.place)
            self._workers.send(row.worker, Close(row.place))

    def masks(self, keys: Sequence[RequestKey]) -> list[Words | None]:
        """Masks (count, num_words) of each answer: after its tokens, and then after each draft that its grammar allows.

        None: not ready in time. `is_in` says when they are, and `notify` announces it.
        """
        rows, slab = [self._rows[key] for key in keys], self._workers.slab
        if slab is None:  # closed
            return [None] * len(keys)
        if not all(map(self._is_in, rows)):
            self._wait(rows, slab)
        found = [None if row.has_failed else slab.copy(row.place, row.number) for row in rows]
        with self._lock:
            for worker in {row.worker for row, words in zip(rows, found, strict=True) if words is None}:
                self._workers.send(worker, Tell(), is_awaited=True)
        shape = -1, self._num_words
        return [None if words is None else np.frombuffer(words, np.int32).reshape(shape) for words in found]

    def _is_in(self, row: Row) -> bool:
        slab = self._workers.slab
        return slab is not None and bool(slab.numbers[row.place] == row.number)

    def _wait(self, rows: Sequence[Row], slab: Slab) -> None:
        """Wait for masks until PATIENCE_S have passed."""
        event_fd = self._workers.event_fd
        poll = select.poll()
        poll.register(event_fd, select.POLLIN)
        deadline = MONOTONIC.now() + PATIENCE_S
        slab.expect(True)
        while (left_s := deadline - MONOTONIC.now()) > 0.0 and not all(r.has_failed or self._is_in(r) for r in rows):
            if poll.poll(math.ceil(1000 * left_s)):
                os.eventfd_read(event_fd)
        slab.expect(False)
