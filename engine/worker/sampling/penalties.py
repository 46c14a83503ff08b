"""Presence, frequency and repetition penalties, at a cost that does not depend on a text's length.

A table on the logits' device counts the tokens of each slot's request. It is filled from the prompt and the output when
a request draws for the first time; then each token is counted on the device as it is drawn. So no step waits for the
host to know a token.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.kernels import host
from pdkv.kernels.upload import to_tensor

PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"

_CHUNK_ELEMENTS = 1 << 24  # bounds what is made beside the logits on a device


class TokenCounts:
    """Counts per slot and token, int32: twice the token's occurrences in the output, plus 1 if the prompt contains it.

    Allocated with the first request that has penalties, 4 x max_num_seqs x vocab bytes; host memory is used only for
    the slots that such requests have had. Guesses at tokens to come are never counted, so nothing must be undone when
    they are wrong.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._shape = max_num_seqs, vocab_size
        self._table: torch.Tensor | None = None
        self._counted = np.zeros(max_num_seqs, np.int64)  # of each slot's tokens, prompt and output

    def forget(self, slot: int) -> None:
        """Forget the slot: it belongs to another request now."""
        self._counted[slot] = 0

    def add(self, slots: NDArray[np.integer[Any]], num_tokens: NDArray[np.integer[Any]], tokens: torch.Tensor) -> None:
        """Count the tokens drawn after num_tokens[i] tokens of slots[i], (n,) int64 on the device; slots are distinct.
        Without this call the next `penalize` counts them, if the host knows them by then. A negative token counts
        nothing.
        """
        if self._table is None:
            return
        index = to_tensor(slots * self._shape[1], tokens.device) + tokens.clamp(min=0)
        self._table.view(-1).index_add_(0, index, (tokens >= 0).int() * 2)
        self._counted[slots] = num_tokens + 1

    def penalize(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.integer[Any]],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        params: NDArray[Any],
    ) -> None:
        """Apply the repetition penalty to tokens of prompt and output, then presence and frequency penalties to those
        of the output, as vLLM defines them.

        Repetition divides positive logits and multiplies others; frequency is subtracted once per occurrence, presence
        once. Works in place on float32 logits (n, vocab), without a wait for the device.

        Args:
            rows: (m,) rows of the logits. The other arguments belong to these rows, except token_ids: (max_num_seqs,
                length) prompt + output of each slot, without tokens that `add` counted but the host does not know yet.
            slots, num_tokens: (m,); a slot's rows are adjacent, those with guesses after the one without.
            params: (m,) with num_prompt and PENALTIES.
        """
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.int32, device=logits.device)
        own, first, of_row = np.unique(slots, return_index=True, return_inverse=True)
        known = num_tokens[first]
        self._catch_up(self._table, own, known, token_ids, params["num_prompt"][first])
        counts, places, num_guesses = self._table, slots.astype(np.int64), num_tokens - known[of_row]
        if num_guesses.any():
            counts = counts.index_select(0, to_tensor(places, logits.device))
            ats, of = _ranges(known[of_row], num_guesses)
            guesses = of * self._shape[1] + token_ids[slots[of], ats]
            counts.view(-1).index_add_(0, *_twos(guesses, logits.device))
            places = np.arange(len(rows))
        penalties = np.stack([params[name] for name in PENALTIES]).astype(np.float32)
        if logits.is_cpu and host.can_draw():
            pointers = logits.data_ptr(), counts.data_ptr(), *(x.ctypes.data for x in (rows, places, penalties))
            sizes = len(rows), logits.shape[1], logits.stride(0), torch.get_num_threads()
            host.call_sampler("pdkv_penalize", *pointers, *sizes)
            return
        both, table = to_tensor(np.stack([rows, places]), logits.device), to_tensor(penalties, logits.device)
        size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        for i in range(0, len(rows), size):
            at, place = both[:, i : i + size]
            repetition, presence, frequency = table[:, i : i + size].unsqueeze(-1)
            x, seen = logits.index_select(0, at), counts.index_select(0, place)
            x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
            count = seen.bitwise_right_shift_(1)
            logits.index_copy_(0, at, x.sub_(frequency * count).sub_(presence * (count > 0)))

    def _catch_up(
        self,
        table: torch.Tensor,
        slots: NDArray[np.integer[Any]],
        num_tokens: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        num_prompt: NDArray[np.int64],
    ) -> None:
        """Count all of the first num_tokens[i] tokens of slots[i], which are distinct. Where more were counted, as what
        was drawn behind is drawn again, it is begun anew.
        """
        self._counted[slots[self._counted[slots] > num_tokens]] = 0
        start = self._counted[slots]
        if (start == num_tokens).all():
            return
        if (start == 0).any():
            table.index_fill_(0, to_tensor(slots[start == 0].astype(np.int64), table.device), 0)
        at, of = _ranges(start, num_tokens - start)
        index, is_prompt = slots[of] * self._shape[1] + token_ids[slots[of], at], at < num_prompt[of]
        if is_prompt.any():
            table.view(-1).index_fill_(0, to_tensor(index[is_prompt], table.device), 1)
        table.view(-1).index_add_(0, *_twos(index[~is_prompt], table.device))
        self._counted[slots] = num_tokens


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of all [starts[i], starts[i] + lengths[i]), one after the other, and the i of each."""
    of = np.repeat(np.arange(len(starts)), lengths)
    return np.arange(len(of)) + (starts - np.cumsum(lengths) + lengths)[of], of


def _twos(index: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    there = to_tensor(index, device)
    return there, torch.full_like(there, 2, dtype=torch.int32)
