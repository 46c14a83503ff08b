"""Logprobs of prompts that request them, gathered over the chunks of a prefill."""

import numpy as np
import torch

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.attention.backend import pad
from pdkv.engine.worker.attention.shapes import round_rows
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.finite_check import FiniteCheck
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.kernels.upload import to_tensor
from pdkv.models.decoder import Decoder
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey

_LOGITS_ROWS = 256
"""The most prompt positions whose logits exist at a time."""


class PromptLogprobs:
    """Prompt logprobs by batch slot. A request that resumes with output has had its prompt's logprobs before and gets
    none.
    """

    def __init__(self, model: Decoder, sampling: SamplingState, *, collects: bool = True) -> None:
        """`collects` False: this rank only takes part in computing the model's logits, and every entry stays None."""
        self._collects = collects
        self._model = model
        self._sampling = sampling
        self._requests: dict[int, NewRequest] = {}
        self._logprobs: dict[int, list[TokenLogprob | None]] = {}

    def collects_in(self, slots: IntArray) -> bool:
        """Whether a step with those slots has prompts that request logprobs, which must reach the host at once."""
        return bool(self._requests) and any(slot in self._requests for slot in slots.tolist())

    def add(self, slot: int, request: NewRequest) -> None:
        """Note a new request; has no effect if it requests no prompt logprobs."""
        if request.params.prompt_logprobs is not None and not request.output_token_ids:
            self._requests[slot] = request
            self._logprobs[slot] = [None] * len(request.prompt_token_ids)

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        self._requests.pop(slot, None)
        self._logprobs.pop(slot, None)

    def take(self, slots: IntArray) -> dict[RequestKey, list[TokenLogprob | None]]:
        """The logprobs of whole prompts that are done, for the requests in these slots; entry 0 and positions that were
        not computed here (cache hits) are None. They are then forgotten.
        """
        if not self._requests:
            return {}
        wanted = [slot for slot in slots.tolist() if slot in self._requests]
        return {self._requests.pop(slot).key: self._logprobs.pop(slot) for slot in wanted}

    def with_prompt_rows(self, rows: IntArray, inputs: StepInputs) -> IntArray:
        """`rows` (ascending, of the step's tokens) and those that predict a wanted prompt token."""
        if not self._requests:
            return rows
        wanted = [np.arange(first, stop) for _, first, stop, _, _ in self._ranges(inputs)]
        return np.unique(np.concatenate([rows, *wanted]))

    def collect(
        self, hidden: torch.Tensor, rows: IntArray, inputs: StepInputs, check: FiniteCheck | None = None
    ) -> None:
        """Take the logprobs out of hidden states (len(rows), hidden) of the step's tokens `rows`."""
        if not self._requests:
            return
        for i, first, stop, slot, position in self._ranges(inputs):
            request = self._requests[slot]
            for start in range(first, stop, _LOGITS_ROWS):
                piece = np.arange(start, min(start + _LOGITS_ROWS, stop))
                target = position + 1 + start - first  # the token after the piece's first one
                targets = np.array(request.prompt_token_ids[target : target + len(piece)], dtype=np.int64)
                index = to_tensor(pad(np.searchsorted(rows, piece), round_rows(len(piece))), hidden.device)
                logits = self._model.logits(hidden.index_select(0, index))[: len(piece)]
                if check is not None:
                    check.look_at_prompt_logits(logits, i)
                if not self._collects:
                    continue
                logprobs = self._sampling.prompt_logprobs(logits, targets, request.params.prompt_logprobs or 0)
                self._logprobs[slot][target : target + len(piece)] = logprobs

    def _ranges(self, inputs: StepInputs) -> list[tuple[int, int, int, int, int]]:
        """Ranges of scheduled tokens that predict wanted prompt tokens: (request of the step, first row, end row, slot,
        first position).
        """
        ranges = []
        for i, slot in enumerate(inputs.slots.tolist()):
            request = self._requests.get(slot)
            if request is not None:
                first, stop = int(inputs.cu_seqlens_q[i]), int(inputs.cu_seqlens_q[i + 1])
                position = int(inputs.positions[first])
                stop = min(stop, first + len(request.prompt_token_ids) - 1 - position)
                ranges.append((i, first, max(first, stop), slot, position))
        return ranges
