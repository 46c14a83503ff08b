"""A step that the device computes asynchronously: drawn tokens stay on the device, and the host reads them at the
step's end.
"""

import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.base.clock import Clock
from pdkv.engine.plan import DraftResult, NewRequest, SampledTokens, StepFailure, StepOutput
from pdkv.engine.worker.batch import IntArray, PersistentBatch
from pdkv.engine.worker.device_tokens import DeviceTokens
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.pending import DoneStep
from pdkv.engine.worker.readback import Readback, Results
from pdkv.engine.worker.sampling.logprobs import QueuedLogprobs
from pdkv.errors import InvalidRequest
from pdkv.kernels.streams import Streams
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey

_NO_CHOICE = StepFailure(
    InvalidRequest.code,
    "no token can be chosen: the sampling parameters (min_tokens with stop_token_ids, structured_outputs, "
    "allowed_token_ids, bad_words, logit_bias, logits_processors, penalties) forbid every token, or overflow",
)


class Tokens(NamedTuple):
    """The drawn tokens of a step, by request."""

    sampled: dict[RequestKey, SampledTokens]
    stuck: dict[RequestKey, StepFailure]  # those for which no token can be chosen


def tokens_of(
    requests: Sequence[NewRequest],
    drawn: DrawRows,
    tokens: IntArray,
    counts: IntArray,
    logprobs: Mapping[int, TokenLogprob],
    failures: Mapping[int, StepFailure],
    drafts: Sequence[DraftResult] | None = None,
) -> Tokens:
    """The tokens of each of the m requests that drew: those of the first counts[i] of its rows.

    Args:
        requests, counts: (m,).
        tokens: (n,) drawn after each row.
        logprobs, failures: by row; why there is no choice, if known.
        drafts: (m,).
    """
    token_ids, found = tokens.tolist(), Tokens({}, {})
    each = zip(requests, drawn.starts.tolist(), counts.tolist(), drafts or repeat(None), strict=False)
    for request, start, count, result in each:
        own = [logprobs[row] for row in range(start, start + count)] if start in logprobs else None
        found.sampled[request.key] = SampledTokens(token_ids[start : start + count], own, result)
        if not count:
            found.stuck[request.key] = failures.get(start, _NO_CHOICE)
    return found


class Draws(NamedTuple):
    """The draws of a queued step: one row per request."""

    requests: Sequence[NewRequest]
    rows: DrawRows
    logprobs: QueuedLogprobs | None
    results: Results  # the tokens (m,), and those of `logprobs`


class QueuedStep(DoneStep):
    """A launched step; `finish` brings its tokens to the host."""

    def __init__(self, rest: StepOutput, draws: Draws, batch: PersistentBatch) -> None:
        """`rest`: the output except for the draws. `batch`: gets the tokens of the requests that are still in it."""
        super().__init__(rest)
        self._draws = draws
        self._batch = batch
        self._output: StepOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._draws.results.are_there

    def finish(self) -> StepOutput:
        if self._output is None:
            self._output = self._take(*self._draws.results.read())
        return self._output

    def _take(self, tokens: NDArray[np.int64], *logprobs: NDArray[Any]) -> StepOutput:
        requests, rows, queued, _ = self._draws
        is_chosen = tokens >= 0
        self._keep(tokens, is_chosen)
        entries = {} if queued is None else queued.entries(tokens, logprobs)
        drawn = tokens_of(requests, rows, tokens, is_chosen.astype(np.int64), entries, {})
        return msgspec.structs.replace(
            self._rest,
            sampled=drawn.sampled,
            failed={**drawn.stuck, **self._rest.failed},
            digest=zlib.crc32(tokens[is_chosen].data),
        )

    def _keep(self, tokens: NDArray[np.int64], is_chosen: NDArray[np.bool_]) -> None:
        """Write the drawn tokens to the batch; a slot may belong to another request by now, or to the same one
        restarted.
        """
        requests, rows, _, _ = self._draws
        owners = (self._batch.requests[slot] for slot in rows.slots.tolist())
        is_there = np.fromiter(map(_is, owners, requests), np.bool_, len(requests)) & is_chosen
        self._batch.append_tokens(rows.slots[is_there], rows.num_tokens[is_there], tokens[is_there])


def _is(owner: NewRequest | None, request: NewRequest) -> bool:
    return owner is request


class DeviceQueue:
    """State shared by one runner's queued steps."""

    def __init__(
        self, max_num_seqs: int, device: torch.device, streams: Streams, timeout_s: float, clock: Clock
    ) -> None:
        self.tokens = DeviceTokens(max_num_seqs, device)
        self._readback = Readback(streams, timeout_s, clock)

    def read(
        self, requests: Sequence[NewRequest], rows: DrawRows, tokens: torch.Tensor, logprobs: QueuedLogprobs | None
    ) -> Draws:
        """After the step's work: start copying the results that the host needs."""
        results = self._readback.begin([tokens, *(() if logprobs is None else logprobs.tensors)])
        return Draws(requests, rows, logprobs, results)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long the device may take for later work."""
        self._readback.set_timeout(timeout_s)

    def read_now(self, tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
        """In the middle of a step: wait for the work so far. Raises RankTimeout."""
        return self._readback.read(tensors)
