"""Several rows per request and step: guesses at the tokens to come are computed together with the last known one.

A proposer guesses; the next step computes the guesses as if they were right, and draws after each row what it would
have drawn there anyway, since draws depend only on seed and position. The drawn tokens are output as long as the
guesses before them were right, so a proposer changes the number of steps that an output takes, but none of its tokens.
"""

import logging
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pdkv.base.clock import Clock
from pdkv.base.log_limit import LogLimit
from pdkv.engine.plan import NO_DRAFTS, DraftResult, NewRequest
from pdkv.engine.proposers.base import Asked, Guesses, Proposer
from pdkv.engine.worker.batch import IntArray, PersistentBatch, StepInputs

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Compared(NamedTuple):
    """Fields of `DraftResult` for each of m requests, (m,)."""

    num_verified: IntArray
    num_right: IntArray
    is_wrong: npt.NDArray[np.bool_]

    def results(self, num_guesses: IntArray) -> list[DraftResult]:
        """One for each request, with the number of its new guesses."""
        results = [NO_DRAFTS] * len(num_guesses)
        some = np.flatnonzero(self.num_verified | self.num_right | self.is_wrong | num_guesses)
        columns = (column[some].tolist() for column in (*self, num_guesses))
        for i, *row in zip(some.tolist(), *columns, strict=True):
            results[i] = DraftResult(*row)
        return results


class DrawRows(NamedTuple):
    """The rows of a step after which tokens are drawn: 1 + its drafts for each of m sampling requests, n in total."""

    requests: IntArray  # (m,) their numbers in the step
    starts: IntArray  # (m,) first of their rows below
    rows: IntArray  # (n,) of the step's tokens, ascending
    slots: IntArray  # (n,)
    num_tokens: IntArray  # (n,) known to the row, including drafts: the index of the token that is drawn

    @classmethod
    def of(cls, inputs: StepInputs) -> "DrawRows":
        """All rows of a step."""
        requests = inputs.sampling
        last, seq_lens, slots = inputs.cu_seqlens_q[1:] - 1, inputs.seq_lens, inputs.slots
        if len(requests) < len(slots):
            last, seq_lens, slots = last[requests], seq_lens[requests], slots[requests]
        if not inputs.num_drafts.any():
            return cls(requests, np.arange(len(requests)), last, slots, seq_lens)
        counts = inputs.num_drafts[requests] + 1
        stops = np.cumsum(counts)
        behind = np.arange(stops[-1]) - np.repeat(stops, counts) + 1  # -drafts … 0
        rows, known = np.repeat(last, counts) + behind, np.repeat(seq_lens, counts) + behind
        return cls(requests, stops - counts, rows, np.repeat(slots, counts), known)

    def shares(self) -> Iterator[tuple[int, int, int]]:
        """For each request its slot, and the range [start, stop) of its rows."""
        stops = [*self.starts[1:].tolist(), len(self.rows)]
        return zip(self.slots[self.starts].tolist(), self.starts.tolist(), stops, strict=True)

    def count_right(self, tokens: IntArray, batch: PersistentBatch) -> IntArray:
        """The number of drawn tokens (n,) that belong to each request's output, (m,): one more than its right drafts.

        0 if the first row has no choice (-1); a later row without a choice is left to the next step.
        """
        if len(self.rows) == len(self.starts):
            return (tokens >= 0).astype(np.int64)
        is_last = np.zeros(len(tokens), np.bool_)
        is_last[self.starts[1:] - 1] = is_last[-1] = True
        wrong = is_last | (tokens != batch.token_ids[self.slots, self.num_tokens])
        first_wrong = np.minimum.reduceat(np.where(wrong, np.arange(len(tokens)), len(tokens)), self.starts)
        return first_wrong - self.starts + (tokens[first_wrong] >= 0)

    def compare(self, tokens: IntArray, counts: IntArray, batch: PersistentBatch) -> "Compared":
        """How the guesses did, before the batch is given the first counts[i] draws of each request."""
        stops = np.append(self.starts[1:], len(self.rows))
        last = np.maximum(self.starts + counts - 1, self.starts)
        slots = self.slots[last]
        has_guess = (counts > 0) & (counts - 1 < batch.num_drafts[slots])
        is_right = tokens[last] == batch.token_ids[slots, self.num_tokens[last]]
        right = np.maximum(counts - 1, 0) + (has_guess & is_right)
        return Compared(stops - self.starts - 1, right, has_guess & ~is_right)

    def kept(self, counts: IntArray) -> npt.NDArray[np.bool_]:
        """(n,) bool: the first counts[i] rows of request i."""
        if len(self.rows) == len(self.starts):
            return counts > 0
        stops = np.append(self.starts[1:], len(self.rows))
        return np.arange(len(self.rows)) < np.repeat(self.starts + counts, stops - self.starts)


class Guesser:
    """Asks a proposer, and survives it: after an error, or from a token out of range on, there are no guesses."""

    def __init__(self, proposer: Proposer, vocab_size: int, clock: Clock) -> None:
        self.proposer = proposer
        self.seconds = 0.0  # that the last call of `guess` took
        self._vocab_size = vocab_size
        self._clock = clock
        self._log_limit = LogLimit()

    def add(self, slot: int, request: NewRequest) -> None:
        """Note a request that joins the batch."""
        self._try(lambda: self.proposer.add(slot, request))

    def remove(self, slot: int, batch: PersistentBatch) -> None:
        """Note that the batch has no request in that slot any more."""
        self._try(lambda: self.proposer.remove(slot, batch.token_ids[slot, : batch.num_tokens[slot]]))

    def follow(self, inputs: StepInputs, batch: PersistentBatch, kv_pool: torch.Tensor) -> None:
        """Show the proposer the KV that a step has computed, before it draws."""
        self._try(lambda: self.proposer.follow(inputs, batch, kv_pool))

    def has_work(self, inputs: StepInputs, batch: PersistentBatch) -> bool:
        """Whether the step's draws are compared with guesses, or are to have some."""
        self.seconds = 0.0
        return bool(inputs.num_guesses.any() or batch.num_drafts[inputs.slots].any())

    def guess(
        self, slots: IntArray, most: IntArray, batch: PersistentBatch, hidden: torch.Tensor, rows: IntArray
    ) -> IntArray:
        """Let the batch have up to most[i] guesses for the request in each slot. Returns how many there are.

        Args:
            rows: those of the step's hidden states that the last tokens were drawn from.
        """
        begin, counts = self._clock.now(), np.zeros(len(slots), np.int64)
        # The plan that asks for them does not know how many of the last ones are right.
        most = np.minimum(most, batch.max_len - batch.num_tokens[slots])
        asked = np.flatnonzero(most > 0)
        if asked.size:
            some = slots[asked]
            known = batch.num_tokens[some]
            shown = hidden[rows[asked].tolist()] if self.proposer.wants_hidden else None
            given = Asked(batch.requests_in(some), some, batch.token_ids, known, most[asked], shown)
            found = self._try(lambda: self._checked(given))
            if found is not None and found.counts.any():
                counts[asked] = batch.propose(some, *found)
        self.seconds = self._clock.now() - begin
        return counts

    def _checked(self, asked: Asked) -> Guesses:
        counts, token_ids = self.proposer.propose(asked)
        if counts.shape == (len(asked.slots),) and not counts.any():
            return Guesses(counts, token_ids)
        if token_ids.shape != (len(asked.slots), token_ids.shape[1]) or counts.shape != (len(asked.slots),):
            raise ValueError(f"guesses for {len(asked.slots)} requests were expected, got {token_ids.shape}")
        width = token_ids.shape[1]
        is_wrong = (token_ids < 0) | (token_ids >= self._vocab_size) | (np.arange(width) >= counts[:, None])
        first_wrong = np.where(is_wrong.any(axis=1), is_wrong.argmax(axis=1), width) if width else counts * 0
        return Guesses(np.minimum(first_wrong, asked.most), token_ids)

    def _try(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception:
            if self._log_limit.passes(self._clock.now()):
                logger.exception("the proposer %s failed: a step has no guesses", type(self.proposer).__name__)
            return None


def digest_of(digest: int, slots: IntArray, counts: IntArray, batch: PersistentBatch) -> int:
    """The digest, continued by the guesses in those slots."""
    if not counts.any():
        return digest
    width = int(counts.max())
    known = batch.num_tokens[slots][:, None] + np.arange(width)
    some = batch.token_ids[slots[:, None], np.minimum(known, batch.token_ids.shape[1] - 1)]
    return zlib.crc32(np.where(np.arange(width) < counts[:, None], some, -1).data, digest)
