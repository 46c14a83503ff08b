"""The persistent batch: the workers' copy of every known request, in arrays whose rows are reused slots."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.wire.types import RequestKey

IntArray = npt.NDArray[np.integer]


class StepInputs(NamedTuple):
    """One step as a flattened sequence: n tokens of r requests, in the plan's order."""

    slots: IntArray  # (r,) each request's row in the batch
    cu_seqlens_q: IntArray  # (r + 1,) request i has the tokens [cu[i], cu[i + 1])
    seq_lens: IntArray  # (r,) tokens in the cache after the step
    token_ids: IntArray  # (n,)
    positions: IntArray  # (n,)
    block_ids: IntArray  # (groups, n) the block and the offset within it of each token's KV
    offsets: IntArray  # (n,)
    num_prompt: IntArray  # (r,) tokens of each request's prompt
    sampling: IntArray  # (m,) the requests that draw
    num_drafts: IntArray  # (r,) number of guesses at the end of each request's tokens
    num_guesses: IntArray = np.zeros(0, np.int64)  # (r,) the most tokens to guess after the draw
    new_entries: IntArray = np.zeros(0, np.int64)  # (k,) of block tables: slot * width + column

    @classmethod
    def of_nobody(cls, num_groups: int) -> "StepInputs":
        """A step without requests."""
        none = np.zeros(0, np.int64)
        blocks = np.zeros((num_groups, 0), np.int64)
        return cls(none, np.zeros(1, np.int64), none, none, none, blocks, none, none, none, none)

    def slot_mapping(self, block_size: int) -> IntArray:
        """(groups, n) index of each token's KV as block * block_size + offset. No entry is padding."""
        return self.block_ids * block_size + self.offsets


class PersistentBatch:
    """Token ids and block tables of up to `max_num_seqs` requests. A slot is reused when its request has ended."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1, *, has_drafts: bool = False
    ) -> None:
        """`num_groups`: KV groups, each with a block table per request. `has_drafts`: plans may include drafts."""
        self.block_size = block_size
        self.max_len = max_model_len
        # One column more than the longest request: a token is drawn after the last computed one and never used.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        # A block that no token of the request sees any more stays in the table, or is 0: it is not read.
        self.block_tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens of prompt + output
        self.num_drafts = np.zeros(max_num_seqs, dtype=np.int64)  # guesses after them in `token_ids`
        self._has_drafts = has_drafts
        self._new_entries: list[IntArray] = []  # of the block tables
        self.requests: list[NewRequest | None] = [None] * max_num_seqs
        self._slots: dict[RequestKey, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._slots

    def slot(self, key: RequestKey) -> int:
        """The slot of a known request."""
        return self._slots[key]

    def requests_in(self, slots: IntArray) -> list[NewRequest]:
        """The requests in the occupied slots."""
        return [request for slot in slots.tolist() if (request := self.requests[slot]) is not None]

    def add(self, request: NewRequest) -> int:
        """Give a new request a slot and copy its whole state there."""
        assert request.key not in self._slots, request.key
        slot = self._free.pop()
        self._slots[request.key] = slot
        self.requests[slot] = request
        num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
        self.token_ids[slot, :num_prompt] = request.prompt_token_ids
        self.token_ids[slot, num_prompt : num_prompt + num_output] = request.output_token_ids
        self.num_blocks[slot] = 0
        self.num_prompt[slot] = num_prompt
        self.num_tokens[slot] = num_prompt + num_output
        self.num_drafts[slot] = 0
        self.append_blocks(slot, request.block_ids)
        return slot

    def remove(self, key: RequestKey) -> int | None:
        """Forget a request; returns its former slot, or None if it never got here (it ended while it waited)."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self.requests[slot] = None
            self._free.append(slot)
        return slot

    def append_blocks(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Extend a request's block tables, one per group, by the same number of entries."""
        start = int(self.num_blocks[slot])
        stop = self.num_blocks[slot] = start + len(block_ids[0])
        np.maximum(np.asarray(block_ids, dtype=np.int64), 0, out=self.block_tables[:, slot, start:stop])
        self._new_entries.append(slot * self.block_tables.shape[2] + np.arange(start, stop))

    def rewrite(self, key: RequestKey, token_ids: IntArray) -> IntArray:
        """Give a request these tokens as all that are known. Returns those that it had in their places."""
        slot = self._slots[key]
        row = self.token_ids[slot, : len(token_ids)]
        had = row.copy()
        row[:], self.num_tokens[slot] = token_ids, len(token_ids)
        return had

    def append_tokens(self, slots: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Write the tokens drawn for `slots` at `positions`, which ascend for each slot. Proposed tokens are
        dropped.
        """
        self.token_ids[slots, positions] = token_ids
        self.num_tokens[slots] = positions + 1
        self.num_drafts[slots] = 0

    def propose(self, slots: IntArray, counts: IntArray, token_ids: IntArray) -> IntArray:
        """Record guesses at the tokens after the known ones: the first counts[i] of row i of `token_ids` (m, width).

        Returns:
            The number recorded of each, (m,): those for which there is no room are left out.
        """
        starts = self.num_tokens[slots]
        counts = np.clip(counts, 0, np.minimum(self.token_ids.shape[1] - starts, token_ids.shape[1]))
        self.num_drafts[slots] = counts
        if len(counts) and (total := int(counts.sum())):
            within = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
            self.token_ids[slots.repeat(counts), starts.repeat(counts) + within] = token_ids[
                np.arange(len(counts)).repeat(counts), within
            ]
        return counts

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> StepInputs:
        """Flatten a step; takes in new blocks. The cost in Python is a few lookups per request, the rest is numpy."""
        count = len(scheduled)
        rows = [
            (self._slots[s.key], s.num_computed, s.num_scheduled, s.samples, s.num_drafts, s.num_guesses)
            for s in scheduled
        ]
        slots, num_computed, num_scheduled, samples, most, guesses = np.array(rows, np.int64).reshape(count, 6).T.copy()
        for s in scheduled:
            if s.new_block_ids:
                self.append_blocks(self._slots[s.key], s.new_block_ids)
        num_drafts = np.zeros(count, np.int64)
        if (
            self._has_drafts
        ):  # there may be fewer than planned, and the plan may not know the progress of other requests
            num_drafts = np.minimum(most, self.num_drafts[slots])
            num_computed = np.where(samples, self.num_tokens[slots] + most - num_scheduled, num_computed)
            num_scheduled = num_scheduled - most + num_drafts
        cu_seqlens_q = np.zeros(count + 1, dtype=np.int64)
        num_scheduled.cumsum(out=cu_seqlens_q[1:])
        positions, of = num_computed, slots
        if (num_tokens := int(cu_seqlens_q[-1])) != count:  # else each has one token, as nearly always
            # Token j of request i sits at num_computed[i] + j - cu_seqlens_q[i].
            positions = np.arange(num_tokens) + (num_computed - cu_seqlens_q[:-1]).repeat(num_scheduled)
            of = slots.repeat(num_scheduled)
        blocks, offsets = np.divmod(positions, self.block_size)
        new_entries = np.concatenate([np.zeros(0, np.int64), *self._new_entries])
        self._new_entries.clear()
        return StepInputs(
            slots=slots,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=num_computed + num_scheduled,
            token_ids=self.token_ids[of, positions].astype(np.int64),
            positions=positions,
            block_ids=self.block_tables[:, of, blocks],
            offsets=offsets,
            num_prompt=self.num_prompt[slots],
            sampling=samples.nonzero()[0],
            num_drafts=num_drafts,
            num_guesses=guesses,
            new_entries=new_entries,
        )
