"""Log-probabilities of given tokens and of the likeliest ones, from the model's raw logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.worker.readback import Read, read_here
from pdkv.engine.worker.sampling.draw import largest
from pdkv.kernels.upload import to_tensor
from pdkv.wire.messages import TokenLogprob

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # limits the int64 temporaries; on CPU they stay in the cache


class LogprobTensors(NamedTuple):
    """The logprobs of m rows of logits, on their device; nothing is on the host yet."""

    own: torch.Tensor  # (m,) float32, of the requested token
    ranks: torch.Tensor  # (m,) int64, 1 for the likeliest
    top_ids: torch.Tensor  # (m, k) int64, the likeliest tokens
    top: torch.Tensor  # (m, k) float32, their logprobs


class QueuedLogprobs(NamedTuple):
    """The queued logprobs of a step's m rows whose requests ask for them."""

    rows: NDArray[np.int64]  # (m,) of the step's draws
    num_top: NDArray[np.int64]  # (m,)
    tensors: LogprobTensors

    def entries(self, tokens: NDArray[np.int64], tensors: Sequence[NDArray[Any]]) -> dict[int, TokenLogprob]:
        """Entries by row, once the host has the drawn tokens (n,), -1 for none, and `tensors`."""
        asked = tokens[self.rows]
        entries = zip(self.rows.tolist(), asked.tolist(), _entries(asked, self.num_top, tensors), strict=True)
        return {row: entry for row, token, entry in entries if token >= 0}


def token_logprobs(
    logits: torch.Tensor,
    token_ids: NDArray[np.int64],
    num_top: Sequence[int] | NDArray[np.int64],
    read: Read = read_here,
) -> list[TokenLogprob]:
    """Natural-log probabilities, by a float32 log-softmax of logits (m, vocab), one entry per row.

    Args:
        token_ids: (m,) the token whose logprob and rank are requested.
        num_top: (m,) how many of the likeliest tokens to add; among equals the lowest ids come first.
        read: reads from the logits' device, and waits for it.
    """
    result: list[TokenLogprob] = []
    for rows in _chunks(logits):
        own, most = token_ids[rows], np.asarray(num_top[rows])
        found = _gather(logits[rows], to_tensor(own, logits.device), int(most.max(initial=0)))
        result += _entries(own, most, read(found))
    return result


def queue_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: NDArray[np.int64], num_top: NDArray[np.int64]
) -> QueuedLogprobs:
    """The logprobs of tokens that are on the device, (m,) int64, and of the likeliest, by logits (m, vocab).

    The host does not wait. A negative token, which means none, gets an arbitrary entry.
    """
    tokens, most = tokens.clamp(min=0), int(num_top.max(initial=0))
    parts = [_gather(logits[part], tokens[part], most) for part in _chunks(logits)]
    tensors = parts[0] if len(parts) == 1 else LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))
    return QueuedLogprobs(rows, num_top, tensors)


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Ranges of rows to process together."""
    count = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 26) // logits.shape[1])
    return [slice(i, i + count) for i in range(0, logits.shape[0], count)]


def _gather(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobTensors:
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(-1))
    ranks = (logits > own).sum(dim=-1) + 1
    top_ids = _likeliest(logits, min(num_top, logits.shape[1]))
    return LogprobTensors((own - normalizer).squeeze(-1), ranks, top_ids, logits.gather(1, top_ids) - normalizer)


def _entries(
    token_ids: NDArray[np.int64], num_top: NDArray[np.int64], found: Sequence[NDArray[Any]]
) -> list[TokenLogprob]:
    """`found`: as in LogprobTensors."""
    columns = token_ids.tolist(), num_top.tolist(), *(column.tolist() for column in found)
    return [
        TokenLogprob(token_id, logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for token_id, k, logprob, rank, ids, values in zip(*columns, strict=True)
    ]


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of each row of (m, vocab) float32, (m, count); among equals the lowest ids first.

    A float32's bits, with the lower ones of a negative number flipped, order as an integer; the id below them
    decides among equals.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: minus zero becomes zero
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (order.long() << 32) | ids
    return vocab_size - 1 - (largest(keys, count) & 0xFFFFFFFF)
