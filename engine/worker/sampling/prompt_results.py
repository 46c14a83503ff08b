"""What requests want of their prompts, gathered over the chunks of a prefill: logprobs, or pooled hidden states."""

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


class PromptResults:
    """Results by batch slot. A request that resumes with output has had its prompt's before and gets none."""

    def __init__(self, model: Decoder, sampling: SamplingState, *, collects: bool = True) -> None:
        """`collects` False: this rank only takes part in computing the model's logits, and no entry is filled."""
        self._collects = collects
        self._model = model
        self._sampling = sampling
        self._requests: dict[int, NewRequest] = {}
        self._logprobs: dict[int, list[TokenLogprob | None]] = {}
        self._vectors: dict[int, torch.Tensor] = {}  # float32, what is pooled so far; of a mean, a sum

    def collects_in(self, slots: IntArray) -> bool:
        """Whether a step with those slots has prompts with results, which must reach the host at once."""
        return bool(self._requests) and any(slot in self._requests for slot in slots.tolist())

    def add(self, slot: int, request: NewRequest) -> None:
        """Note a new request; has no effect if it wants nothing of its prompt."""
        params = request.params
        if (params.prompt_logprobs is not None or params.pooling is not None) and not request.output_token_ids:
            self._requests[slot] = request
            self._logprobs[slot] = [] if params.pooling is not None else [None] * len(request.prompt_token_ids)

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        for held in (self._requests, self._logprobs, self._vectors):
            held.pop(slot, None)

    def take(self, slots: IntArray) -> dict[RequestKey, list[TokenLogprob | None] | bytes]:
        """The results of whole prompts that are done, for the requests in these slots: float32 if they are pooled; of
        logprobs, entry 0 and positions that were not computed here (cache hits) are None. They are then forgotten.
        """
        if not self._requests:
            return {}
        wanted = [slot for slot in slots.tolist() if slot in self._requests]
        pooled = [slot for slot in wanted if slot in self._vectors]
        vectors = self._sampling.read([self._vectors[slot] for slot in pooled]) if pooled else []
        found: dict[RequestKey, list[TokenLogprob | None] | bytes] = {}
        for slot in wanted:
            found[self._requests[slot].key] = self._logprobs[slot]
        for slot, vector in zip(pooled, vectors, strict=True):
            request = self._requests[slot]
            size = len(request.prompt_token_ids) if request.params.pooling == "mean" else 1
            found[request.key] = (vector / np.float32(size)).astype("<f4").tobytes()
        for slot in wanted:
            self.remove(slot)
        return found

    def with_prompt_rows(self, rows: IntArray, inputs: StepInputs) -> IntArray:
        """`rows` (ascending, of the step's tokens) and those from which results are made."""
        if not self._requests:
            return rows
        wanted = [np.arange(first, stop) for _, first, stop, _, _ in self._ranges(inputs)]
        return np.unique(np.concatenate([rows, *wanted]))

    def collect(
        self, hidden: torch.Tensor, rows: IntArray, inputs: StepInputs, check: FiniteCheck | None = None
    ) -> None:
        """Take the results out of hidden states (len(rows), hidden) of the step's tokens `rows`."""
        if not self._requests:
            return
        for i, first, stop, slot, position in self._ranges(inputs):
            request = self._requests[slot]
            if request.params.pooling is not None:
                if first < stop:
                    self._pool(slot, hidden, int(np.searchsorted(rows, first)), stop - first)
                continue
            for start in range(first, stop, _LOGITS_ROWS):
                piece = np.arange(start, min(start + _LOGITS_ROWS, stop))
                target = position + 1 + start - first  # the token after the piece's first one
                targets = np.array(request.prompt_token_ids[target : target + len(piece)], dtype=np.int64)
                logits = self._logits(hidden, np.searchsorted(rows, piece))
                if check is not None:
                    check.look_at_prompt_logits(logits, i)
                if not self._collects:
                    continue
                logprobs = self._sampling.prompt_logprobs(logits, targets, request.params.prompt_logprobs or 0)
                self._logprobs[slot][target : target + len(piece)] = logprobs

    def _pool(self, slot: int, hidden: torch.Tensor, begin: int, count: int) -> None:
        """Add hidden states [begin, begin + count) to what is pooled."""
        params = self._requests[slot].params
        if params.pooling == "logits":
            chosen = np.array(params.allowed_token_ids, dtype=np.int64)
            vector = self._logits(hidden, np.array([begin]))[0][to_tensor(chosen, hidden.device)]
        else:
            vector = hidden[begin : begin + count].float().sum(dim=0)
        self._vectors[slot] = vector + self._vectors[slot] if slot in self._vectors else vector

    def _logits(self, hidden: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """The logits (len(rows), vocab) of those hidden states."""
        index = to_tensor(pad(rows, round_rows(len(rows))), hidden.device)
        return self._model.logits(hidden.index_select(0, index))[: len(rows)]

    def _ranges(self, inputs: StepInputs) -> list[tuple[int, int, int, int, int]]:
        """Ranges of scheduled tokens from which results are made: (request of the step, first row, end row, slot, first
        position). Logprobs are of the token behind each; what is not a mean is pooled from the prompt's last token.
        """
        ranges = []
        for i, slot in enumerate(inputs.slots.tolist()):
            request = self._requests.get(slot)
            if request is not None:
                first, stop = int(inputs.cu_seqlens_q[i]), int(inputs.cu_seqlens_q[i + 1])
                position, pooling = int(inputs.positions[first]), request.params.pooling
                last = first + len(request.prompt_token_ids) - 1 - position
                stop = min(stop, last if pooling is None else last + 1)
                first = first if pooling in (None, "mean") else max(first, last)
                ranges.append((i, first, max(first, stop), slot, position))
        return ranges
