"""Log-probabilities of given tokens and of the likeliest ones, from the model's raw logits."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.sampling.draw import largest
from pdkv.wire.messages import TokenLogprob

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # bounds the int64 temporaries; on CPU they stay in the cache


def token_logprobs(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: Sequence[int] | NDArray[np.int64]
) -> list[TokenLogprob]:
    """Natural-log probabilities, by a float32 log-softmax of logits (m, vocab), one entry per row.

    Args:
        token_ids: (m,) the token whose logprob and rank are asked for.
        num_top: (m,) how many of the likeliest tokens to add; among equals the lowest ids come first.
    """
    rows_per_chunk = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 26) // logits.shape[1])
    result: list[TokenLogprob] = []
    for i in range(0, logits.shape[0], rows_per_chunk):
        stop = i + rows_per_chunk
        result += _chunk(logits[i:stop].float(), token_ids[i:stop], np.asarray(num_top[i:stop]))
    return result


def _chunk(logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]) -> list[TokenLogprob]:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, torch.from_numpy(token_ids).to(logits.device).unsqueeze(-1))
    ranks = (logits > own).sum(dim=-1) + 1
    top_ids = _likeliest(logits, min(int(num_top.max(initial=0)), logits.shape[1]))
    top_logprobs = (logits.gather(1, top_ids) - normalizer).tolist()
    entries = zip(
        token_ids.tolist(),
        (own - normalizer).squeeze(-1).tolist(),
        ranks.tolist(),
        num_top.tolist(),
        top_ids.tolist(),
        top_logprobs,
        strict=True,
    )
    return [
        TokenLogprob(token_id, logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for token_id, logprob, rank, k, ids, values in entries
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
