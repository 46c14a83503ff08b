"""What requests want of their prompts' hidden states instead of tokens, gathered over the chunks of a prefill."""

from collections.abc import Iterator

import numpy as np
import torch

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.attention.backend import pad
from pdkv.engine.worker.attention.shapes import round_rows
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.readback import Read
from pdkv.kernels.upload import to_tensor
from pdkv.models.decoder import Decoder
from pdkv.wire.types import RequestKey


class PooledStates:
    """Vectors by batch slot. Every rank has the same hidden states, and so the same vectors."""

    def __init__(self, model: Decoder, read: Read) -> None:
        self._model = model
        self._read = read
        self._requests: dict[int, NewRequest] = {}
        self._vectors: dict[int, torch.Tensor] = {}  # float32: so far a sum, of a mean

    def collects_in(self, slots: IntArray) -> bool:
        """Whether a step with those slots has prompts of which something is wanted."""
        return bool(self._requests) and any(slot in self._requests for slot in slots.tolist())

    def add(self, slot: int, request: NewRequest) -> None:
        """Note a new request; has no effect if it wants tokens."""
        if request.params.pooling is not None:
            self._requests[slot] = request

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        self._requests.pop(slot, None)
        self._vectors.pop(slot, None)

    def with_prompt_rows(self, rows: IntArray, inputs: StepInputs) -> IntArray:
        """`rows` (ascending, of the step's tokens) and those of which hidden states are wanted."""
        wanted = [np.arange(first, stop) for _, first, stop in self._ranges(inputs)]
        return np.unique(np.concatenate([rows, *wanted])) if wanted else rows

    def collect(self, hidden: torch.Tensor, rows: IntArray, inputs: StepInputs) -> None:
        """Take what is wanted of the hidden states (len(rows), hidden) of the step's tokens `rows`."""
        for slot, first, stop in self._ranges(inputs):
            begin = int(np.searchsorted(rows, first))
            params = self._requests[slot].params
            if params.pooling == "logits":
                index = to_tensor(pad(np.array([begin]), round_rows(1)), hidden.device)
                logits = self._model.logits(hidden.index_select(0, index))[0]
                vector = logits[to_tensor(np.array(params.allowed_token_ids, dtype=np.int64), hidden.device)]
            else:
                vector = hidden[begin : begin + stop - first].float().sum(dim=0)
            self._vectors[slot] = vector + self._vectors[slot] if slot in self._vectors else vector

    def take(self, slots: IntArray) -> dict[RequestKey, bytes]:
        """The vectors of prompts that are done, for the requests in these slots, which are then forgotten."""
        wanted = [slot for slot in slots.tolist() if slot in self._vectors]
        if not wanted:
            return {}
        vectors = self._read([self._vectors.pop(slot) for slot in wanted])
        requests = [self._requests.pop(slot) for slot in wanted]
        sizes = [len(r.prompt_token_ids) if r.params.pooling == "mean" else 1 for r in requests]
        return {
            request.key: (vector / np.float32(size)).astype("<f4").tobytes()
            for request, vector, size in zip(requests, vectors, sizes, strict=True)
        }

    def _ranges(self, inputs: StepInputs) -> Iterator[tuple[int, int, int]]:
        """Ranges of the step's rows of which hidden states are wanted: (slot, first row, end row), none of them
        empty.
        """
        if not self._requests:
            return
        for i, slot in enumerate(inputs.slots.tolist()):
            request = self._requests.get(slot)
            if request is None:
                continue
            first, stop = int(inputs.cu_seqlens_q[i]), int(inputs.cu_seqlens_q[i + 1])
            end = first + len(request.prompt_token_ids) - int(inputs.positions[first])  # of the prompt's last token
            if request.params.pooling == "mean" and first < end:
                yield slot, first, min(stop, end)
            elif first < end <= stop:
                yield slot, end - 1, end
