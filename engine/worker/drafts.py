"""Several rows per request and step: guesses at the tokens to come are computed together with the last known one.

A proposer guesses; the next step computes the guesses as if they were right, and draws after each row what it would
have drawn there anyway, since draws depend only on seed and position. The drawn tokens are output as long as the
guesses before them were right, so a proposer changes the number of steps that an output takes, but none of its tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.batch import IntArray, PersistentBatch, StepInputs


class Proposer(Protocol):
    """Runs after the draw on every rank; all ranks must propose the same tokens.

    A proposer that samples should use the target's random numbers: `draw` in `engine/worker/sampling/draw.py` with the
    same (seed, choice, position). Then its guesses are right nearly as often as possible.
    """

    @property
    def num_tokens(self) -> int:
        """The most tokens that the proposer proposes for a request in one step."""
        ...

    def propose(self, requests: Sequence[NewRequest], token_ids: Sequence[IntArray]) -> Sequence[Sequence[int]]:
        """Tokens of the vocabulary that may follow, for each of the requests that a step drew for.

        Args:
            token_ids: all of each request's prompt and output; not to be changed or kept.
        """
        ...


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

    def kept(self, counts: IntArray) -> npt.NDArray[np.bool_]:
        """(n,) bool: the first counts[i] rows of request i."""
        if len(self.rows) == len(self.starts):
            return counts > 0
        stops = np.append(self.starts[1:], len(self.rows))
        return np.arange(len(self.rows)) < np.repeat(self.starts + counts, stops - self.starts)
