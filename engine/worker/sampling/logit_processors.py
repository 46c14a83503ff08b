"""Changes to logits before a token is chosen, besides penalties: masks, allowed and forbidden tokens, logit bias.

All work in place on float32 logits (n, vocab), for the rows that need them, at a cost independent of their number, and
without a wait for a device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.grammar.matching.vocabulary import WORD_BITS
from pdkv.kernels import host
from pdkv.kernels.upload import to_tensor


class TokenMasks(NamedTuple):
    """The tokens that may be chosen in m of the rows of logits."""

    rows: NDArray[np.int64]  # (m,) ascending
    bits: torch.Tensor  # (m, ceil(vocab / 32)) int32 on the CPU; bit i % 32 of word i // 32 stands for token i


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Forbid every token whose bit is 0 in the rows that have a mask. Logits are float32."""
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    num_words = -(-logits.shape[1] // WORD_BITS)
    rows, bits = masks
    if bits.shape != (len(rows), num_words) or bits.dtype != torch.int32:
        raise ValueError(
            f"bits must be int32 of shape {(len(rows), num_words)}, got {bits.dtype} of {tuple(bits.shape)}"
        )
    if logits.is_cpu and host.can_draw():
        assert logits.is_contiguous()
        assert bits.is_contiguous()
        pointers = logits.data_ptr(), rows.ctypes.data, bits.data_ptr()
        sizes = len(rows), logits.shape[1], logits.stride(0), torch.get_num_threads()
        host.call_sampler("pdkv_mask", *pointers, *sizes)
        return
    words = to_tensor(bits.numpy(), logits.device)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_forbidden = (words.unsqueeze(-1) >> shifts & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(is_forbidden, -torch.inf)
        return
    index = to_tensor(rows, logits.device)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(is_forbidden, -torch.inf))


def forbid_tokens(logits: torch.Tensor, rows: NDArray[np.int64], token_ids: Sequence[NDArray[np.int64]]) -> None:
    """Set the logits of token_ids[i] to -inf in row rows[i]."""
    logits.view(-1).index_fill_(0, _flat_indices(logits, rows, token_ids), -torch.inf)


def keep_tokens(logits: torch.Tensor, rows: NDArray[np.int64], token_ids: Sequence[NDArray[np.int64]]) -> None:
    """Set the logits of row rows[i] to -inf, except those of token_ids[i]."""
    flat, kept = logits.view(-1), _flat_indices(logits, rows, token_ids)
    values = flat.index_select(0, kept)
    logits.index_fill_(0, to_tensor(rows, logits.device), -torch.inf)
    flat.scatter_(0, kept, values)


class BadWords:
    """The token sequences that one request's output must not contain, laid out so that all rows are compared at
    once.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """No word may be empty."""
        self.last = np.array([word[-1] for word in words], np.int64)  # (words,)
        self.num_before = np.array([len(word) - 1 for word in words], np.int64)  # (words,) tokens before the last
        before = [(i, len(word) - 1 - at, token) for i, word in enumerate(words) for at, token in enumerate(word[:-1])]
        table = np.array(before, np.int64).reshape(-1, 3)
        self.word, self.distance, self.token = table[:, 0], table[:, 1], table[:, 2]  # (all tokens before,)


def forbid_bad_words(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    bad_words: Sequence[BadWords],
    known: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
    num_prompt: NDArray[np.int64],
) -> None:
    """Forbid each word's last token if the output ends with the others. The prompt's tokens do not count.

    Args:
        known: (len(rows), longest) prompt + output of each row, padded with any values.
        num_tokens, num_prompt: (len(rows),) tokens known and tokens of the prompt.
    """
    index = np.arange(len(rows))
    of_word = np.repeat(index, [len(words.last) for words in bad_words])
    of_token = np.repeat(index, [len(words.token) for words in bad_words])
    first_word = np.cumsum([0, *(len(words.last) for words in bad_words[:-1])])
    word = np.concatenate([words.word for words in bad_words]) + first_word[of_token]
    at = num_tokens[of_token] - np.concatenate([words.distance for words in bad_words])
    wrong = known[of_token, np.maximum(at, 0)] != np.concatenate([words.token for words in bad_words])
    matches = np.bincount(word[wrong], minlength=len(of_word)) == 0
    num_before = np.concatenate([words.num_before for words in bad_words])
    matches &= num_before <= (num_tokens - num_prompt)[of_word]
    if matches.any():
        last = np.concatenate([words.last for words in bad_words])[matches]
        flat = rows[of_word[matches]] * logits.shape[1] + last
        logits.view(-1).index_fill_(0, to_tensor(flat, logits.device), -torch.inf)


def add_bias(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    token_ids: Sequence[NDArray[np.int64]],
    biases: Sequence[NDArray[np.float32]],
) -> None:
    """Add biases[i] to the (distinct) tokens token_ids[i] of row rows[i]."""
    values = to_tensor(np.concatenate(biases), logits.device)
    logits.view(-1).index_add_(0, _flat_indices(logits, rows, token_ids), values)


def _flat_indices(
    logits: torch.Tensor, rows: NDArray[np.int64], token_ids: Sequence[NDArray[np.int64]]
) -> torch.Tensor:
    """Indices into logits.view(-1) of token_ids[i] in row rows[i]."""
    lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
    indices = np.repeat(rows, lengths) * logits.shape[1] + np.concatenate(token_ids)
    return to_tensor(indices, logits.device)
