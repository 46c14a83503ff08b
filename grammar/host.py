"""The engine's face of the processes that match grammars: tickets for requests, and masks for their answers.

No thread of the engine calls the library, or waits for it without a bound. `workers.py` runs the processes.
"""

import math
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pdkv.errors import PdkvError, ServerBusy
from pdkv.grammar.host_state import Known, Row, WorkerState
from pdkv.grammar.options import GrammarOptions
from pdkv.grammar.slab import Slab, Words
from pdkv.grammar.spec import Grammar
from pdkv.grammar.worker_messages import Close, Forget, Learn, SlabShape, Start, Step, Steps, Tell
from pdkv.grammar.workers import Workers
from pdkv.wire.messages import RequestKey

PATIENCE_S = 0.1
"""What steps may wait for the masks of one worker; behind that, what its grammars have not brought is left out."""

PATIENCE_PER_S = 0.05
"""What a worker gets back of it with time."""

FREE_S = 0.002
"""What each step may wait in any case."""

_WORD_BITS = 32


class GrammarTicket:
    """One request's use of its grammar, from the question for it until the request ends."""

    def __init__(self, known: Known, closed: Callable[[Known], None]) -> None:
        self._known = known
        self._on_close: Callable[[Known], None] | None = closed

    @property
    def done(self) -> bool:
        """Whether `number` has something to say."""
        return self._known.is_ready

    @property
    def number(self) -> int:
        """By which answers name the grammar; to be asked once `done`. Raises PdkvError: it is refused, and why."""
        if self._known.error is not None:
            raise self._known.error.anew()
        return self._known.number

    def close(self) -> None:
        """The request needs it no more. May be called at any time, and again."""
        if self._on_close is not None:
            self._on_close(self._known)
            self._on_close = None


class GrammarHost:
    """Owns the processes. Nothing is started before the first `ask`.

    `ask` and what follows it belong to the engine's loop, `open` and what follows it to the thread of the model.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        options: GrammarOptions,
        notify: Callable[[], None],
        *,
        num_requests: int = 256,
        num_drafts: int = 0,
    ) -> None:
        """Args:
        notify: called from another thread whenever tickets became done, answers failed, or masks came that were late.
        num_requests: answers at a time, at most.
        num_drafts: of an answer in a step, at most.
        """
        # A row is another answer's only when its worker has heard that the one before is over.
        shape = SlabShape(4 * num_requests, 1 + num_drafts, -(-vocab_size // _WORD_BITS), options.num_processes)
        stops = tuple(stop_token_ids)
        start = Start(str(model_dir), vocab_size, stops, options.time_s, options.memory_bytes, shape)
        self._options = options
        self._workers = Workers(start, notify)
        self._lock = self._workers.lock
        self._rows: dict[RequestKey, Row] = {}
        self._next_number = 0

    # --- the engine's loop ----------------------------------------------------------------------------------------

    def ask(self, grammar: Grammar, tenant: str) -> GrammarTicket:
        """A ticket for a tenant's grammar, which is done at once where the grammar is known there. Never blocks.

        Raises:
            GrammarGivenUp: it was given up less than a minute ago.
            InvalidRequest: no grammar can be matched here.
            ServerBusy: too many wait, or the engine is about to stop.
        """
        with self._lock:
            self._workers.begin(grammar)
            worker = self._workers.worker_of(tenant)
            known = worker.find(grammar)
            if known is None:
                if worker.waiting_chars + len(grammar.text) > self._options.max_waiting_chars:
                    raise ServerBusy("too many grammars wait to be compiled: try again")
                known = Known(self._next_number, grammar, worker)
                self._next_number += 1
                self._workers.numbers[known.number] = worker.known[grammar] = known
                self._workers.send(worker, Learn(known.number, grammar), is_awaited=True)
            known.num_users += 1
            return GrammarTicket(known, self._leave)

    def _leave(self, known: Known) -> None:
        with self._lock:
            known.num_users -= 1
            for gone in known.worker.retire(known) if not known.num_users else ():
                del self._workers.numbers[gone.number]
                self._workers.send(known.worker, Forget(gone.number))

    def take_failed(self) -> dict[RequestKey, PdkvError]:
        """The answers that cannot go on, since the last call, and why."""
        with self._lock:
            failed, self._workers.failed = self._workers.failed, {}
            return failed

    @property
    def has_failed(self) -> bool:
        """Whether `take_failed` has something."""
        return bool(self._workers.failed)

    def is_in(self, key: RequestKey) -> bool:
        """Whether an answer's masks are there, or will never be."""
        with self._lock:
            row = self._rows.get(key)
            return row is None or row.has_failed or self._is_in(row)

    def close(self) -> None:
        """End thread and processes; tickets that are not done yet get an error. Idempotent."""
        self._workers.close()

    # --- the model's thread ---------------------------------------------------------------------------------------

    def open(self, key: RequestKey, number: int, token_ids: Sequence[int], own_stops: Sequence[int]) -> None:
        """An answer joins the batch, with these tokens so far. `own_stops` may come where the model may end it."""
        with self._lock:
            known = self._workers.numbers[number]
            row = self._rows[key] = Row(key, known, list(token_ids), list(own_stops))
            self._workers.add_row(row)

    def go_on(self, steps: Sequence[tuple[RequestKey, list[int], list[int]]]) -> None:
        """Answers go on by some tokens, and then perhaps some drafts."""
        with self._lock:
            by_worker: dict[int, list[Step]] = {}
            for key, token_ids, drafts in steps:
                row = self._rows[key]
                row.token_ids += token_ids
                row.drafts = drafts
                if not row.has_failed:
                    by_worker.setdefault(row.worker.index, []).append(Step(row.index, token_ids, drafts))
            for index, ordered in by_worker.items():
                self._workers.send(self._workers.all[index], Steps(ordered))

    def end(self, key: RequestKey) -> None:
        """An answer leaves the batch."""
        with self._lock:
            row = self._rows.pop(key)
            self._workers.failed.pop(key, None)
            if row.index >= 0 and row.worker.end_row(row.index):
                self._workers.send(row.worker, Close(row.index), is_awaited=True)
            elif row.index >= 0:
                self._workers.release(row.worker, [row.index])

    def masks(self, keys: Sequence[RequestKey]) -> list[Words | None]:
        """(count, num_words) of each answer: behind its tokens and then behind each draft that its grammar allows.

        None: not there in time. `is_in` says when they are, and `notify` tells of it.
        """
        rows = [self._rows[key] for key in keys]
        slab = self._workers.slab
        if slab is None:  # closed
            return [None] * len(keys)
        if any(not self._is_in(row) for row in rows):
            self._wait(rows, slab)
        found = [None if row.has_failed else slab.copy(row.index, row.number) for row in rows]
        with self._lock:
            for worker in {row.worker for row, words in zip(rows, found, strict=True) if words is None}:
                self._workers.send(worker, Tell(), is_awaited=True)
        return found

    def _is_in(self, row: Row) -> bool:
        slab = self._workers.slab
        return slab is not None and row.index >= 0 and slab.numbers[row.index] == row.number

    def _wait(self, rows: Sequence[Row], slab: Slab) -> None:
        """For masks, as far as their workers' patience goes."""
        poll = select.poll()
        poll.register(self._workers.event_fd, select.POLLIN)
        began = now = time.monotonic()
        deadlines = dict[WorkerState, float]()
        for worker in {row.worker for row in rows}:
            worker.patience_s = min(worker.patience_s + PATIENCE_PER_S * (began - worker.seen_at), PATIENCE_S)
            worker.seen_at = began
            deadlines[worker] = began + FREE_S + worker.patience_s
        slab.expect(True)
        while late := {row.worker for row in rows if not (row.has_failed or self._is_in(row))}:
            left_s = [deadlines[worker] - now for worker in late if deadlines[worker] > now]
            if not left_s:
                break
            if poll.poll(math.ceil(1000 * min(left_s))):
                os.eventfd_read(self._workers.event_fd)
            now = time.monotonic()
            for worker in late:
                worker.patience_s = max(0.0, deadlines[worker] - max(now, began + FREE_S))
        slab.expect(False)
