"""Batched sampling with vLLM's semantics. A draw is a pure function of token ids, parameters and logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.plan import NewRequest, StepFailure
from pdkv.engine.worker.readback import Read, read_here
from pdkv.engine.worker.sampling.checks import check_for_vocab
from pdkv.engine.worker.sampling.custom import CustomProcessors
from pdkv.engine.worker.sampling.draw import DrawParams, argmax, draw
from pdkv.engine.worker.sampling.logit_processors import (
    BadWords,
    TokenMasks,
    add_bias,
    apply_masks,
    forbid_bad_words,
    forbid_tokens,
    keep_tokens,
)
from pdkv.engine.worker.sampling.logprobs import QueuedLogprobs, queue_logprobs, token_logprobs
from pdkv.engine.worker.sampling.penalties import PENALTIES, TokenCounts
from pdkv.kernels import host
from pdkv.kernels.upload import to_tensor
from pdkv.sampling.logits_processors import NO_PROCESSORS, ProcessorSet
from pdkv.wire.messages import TokenLogprob

_SEED_MASK = (1 << 64) - 1
_ROW = np.dtype(
    [
        ("random", np.bool_),  # not greedy
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("choice", np.uint64),
        ("num_prompt", np.int64),
        ("min_tokens", np.int64),
        ("biased", np.bool_),
        ("restricted", np.bool_),
        ("has_bad_words", np.bool_),
        ("custom", np.bool_),
        ("plain", np.bool_),  # logits stay as they are, and no logprobs are requested
        ("penalized", np.bool_),
        ("looks_back", np.bool_),  # looks at the tokens before the one to draw, on the host
        *((name, np.float64) for name in PENALTIES),
        ("wants_logprobs", np.bool_),
        ("num_logprobs", np.int64),
    ]
)


class SamplingState:
    """The sampling parameters of the running batch, in per-slot arrays."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        processors: ProcessorSet = NO_PROCESSORS,
        read: Read = read_here,
    ) -> None:
        """`read`: reads from the logits' device, if the host needs something before the step ends."""
        self.read = read
        self.failures: Mapping[int, StepFailure] = {}
        """Failures of the last `choose`, by row: the parameters or a logits processor failed, so no token is chosen."""
        self._custom = CustomProcessors(processors, read)
        self._vocab_size = vocab_size
        host.can_draw()  # now: a step must not need a file, which an engine without descriptors cannot open
        self._eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        self._table: NDArray[Any] = np.zeros(max_num_seqs, _ROW)
        self._stop_ids: dict[int, NDArray[np.int64]] = {}  # by slot, if min_tokens needs it
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}  # by slot: token ids, biases
        self._allowed: dict[int, NDArray[np.int64]] = {}  # by slot: token ids
        self._bad_words: dict[int, BadWords] = {}  # by slot
        self._processed = torch.empty(0, vocab_size)  # kept: pages of new memory cost more than what is written there
        self.counts = TokenCounts(max_num_seqs, vocab_size)  # of requests with penalties

    def add(self, slot: int, request: NewRequest) -> None:
        """Store a request's parameters in `slot`, replacing earlier ones. If they cannot be served, no token is ever
        chosen: see `failures`.
        """
        self.remove(slot)
        try:
            self._take(self._table[slot], slot, request)
        except Exception as error:  # its own: the step has others
            self.remove(slot)
            self._custom.refuse(slot, error)
            self._table[slot]["custom"] = self._table[slot]["looks_back"] = True

    def _take(self, row: Any, slot: int, request: NewRequest) -> None:
        params = request.params
        check_for_vocab(params, self._vocab_size)
        row["random"] = not params.greedy
        for name in ("temperature", "top_p", "min_p", "min_tokens", *PENALTIES):
            row[name] = getattr(params, name)
        row["top_k"] = max(params.top_k, 0)
        row["seed"] = (params.seed or 0) & _SEED_MASK
        row["choice"] = request.choice
        row["num_prompt"] = len(request.prompt_token_ids)
        row["biased"] = bool(params.logit_bias)
        row["restricted"] = params.allowed_token_ids is not None
        row["has_bad_words"] = bool(params.bad_words_token_ids)
        row["custom"] = bool(params.logits_processors) and self._custom.add(slot, request)
        row["penalized"] = params.needs_penalties
        row["looks_back"] = row["has_bad_words"] | row["custom"]
        row["wants_logprobs"] = params.logprobs is not None
        changes = "biased", "restricted", "has_bad_words", "custom", "penalized", "min_tokens", "wants_logprobs"
        row["plain"] = not any(row[name] for name in changes)
        row["num_logprobs"] = params.logprobs or 0
        if params.min_tokens > 0:
            self._stop_ids[slot] = np.unique(np.array([*self._eos_token_ids, *params.stop_token_ids], np.int64))
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias.items(), strict=True)
            self._bias[slot] = (np.array(ids, np.int64), np.array(biases, np.float32))
        if params.allowed_token_ids is not None:
            self._allowed[slot] = np.array(params.allowed_token_ids, np.int64)
        if params.bad_words_token_ids:
            self._bad_words[slot] = BadWords(params.bad_words_token_ids)

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        self._table[slot] = np.zeros((), _ROW)
        self._stop_ids.pop(slot, None)
        self._bias.pop(slot, None)
        self._allowed.pop(slot, None)
        self._bad_words.pop(slot, None)
        self._custom.remove(slot)
        self.counts.forget(slot)

    def choose(
        self,
        logits: torch.Tensor,
        slots: NDArray[np.integer[Any]],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.integer[Any]],
        masks: TokenMasks | None = None,
    ) -> NDArray[np.int64]:
        """Choose one token per row, (n,); -1 if the row's parameters leave none. Arguments and state are not changed.

        The choice depends on the arguments alone, and not on any order of summation: ranks with the same logits choose
        the same tokens. A request may have several rows, each with its own number of tokens known.

        Args:
            logits: (n, vocab), any float dtype.
            slots: (n,) the slot of each row.
            token_ids: (max_num_seqs, max_model_len) prompt + output of each slot.
            num_tokens: (n,) tokens known of each row's request; the token drawn has this index.
            masks: for the rows in which not all tokens may be chosen.
        """
        tokens: NDArray[np.int64] = self.draw(logits, slots, token_ids, num_tokens, masks).cpu().numpy()
        if self.failures:
            tokens[list(self.failures)] = -1
        return tokens

    def draw(
        self,
        logits: torch.Tensor,
        slots: NDArray[np.integer[Any]],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.integer[Any]],
        masks: TokenMasks | None = None,
    ) -> torch.Tensor:
        """`choose` without its copy to the host: on the logits' device, without waiting for it unless a row
        `looks_back`.

        The token is arbitrary in rows of `failures`.
        """
        if logits.shape != (len(slots), self._vocab_size):
            raise ValueError(f"logits must be {(len(slots), self._vocab_size)}, got {tuple(logits.shape)}")
        rows = self._table[slots]
        self.failures = {}
        processed = self._process(logits, rows, slots, token_ids, num_tokens, masks)
        tokens = _choose(processed, rows, num_tokens - rows["num_prompt"])
        return tokens if processed is logits else tokens.masked_fill(_has_no_choice(logits, processed, tokens), -1)

    def looks_back(self, slots: NDArray[np.integer[Any]]) -> bool:
        """Whether a draw in one of those slots needs the tokens before it on the host."""
        return bool(self._table["looks_back"][slots].any())

    def is_plain(self, slot: int) -> bool:
        """Whether a draw in that slot changes no logits and reports none."""
        return bool(self._table["plain"][slot])

    def logprobs(
        self, logits: torch.Tensor, slots: NDArray[np.integer[Any]], tokens: NDArray[np.int64]
    ) -> dict[int, TokenLogprob]:
        """Logprobs by row, for requests that ask for them. Arguments as in `choose`, which returned `tokens`."""
        rows = self._table[slots]
        asking = np.flatnonzero(rows["wants_logprobs"] & (tokens >= 0))
        if not asking.size:
            return {}
        logprobs = token_logprobs(_select(logits, asking), tokens[asking], rows["num_logprobs"][asking], read=self.read)
        return dict(zip(asking.tolist(), logprobs, strict=True))

    def queue_logprobs(
        self, logits: torch.Tensor, slots: NDArray[np.integer[Any]], tokens: torch.Tensor
    ) -> QueuedLogprobs | None:
        """`logprobs` for the result of `draw`, without waiting for the device; None: no request asks for them."""
        rows = self._table[slots]
        asking = np.flatnonzero(rows["wants_logprobs"])
        if not asking.size:
            return None
        own = tokens if asking.size == len(slots) else tokens.index_select(0, to_tensor(asking, tokens.device))
        return queue_logprobs(_select(logits, asking), own, asking, rows["num_logprobs"][asking])

    def prompt_logprobs(
        self, logits: torch.Tensor, target_token_ids: NDArray[np.integer[Any]], num_top: int
    ) -> list[TokenLogprob]:
        """Logprobs of prompt tokens: row i of logits (m, vocab) predicts target_token_ids[i]."""
        targets = target_token_ids.astype(np.int64)
        return token_logprobs(logits, targets, np.full(len(targets), num_top, np.int64), self.read)

    def _process(
        self,
        logits: torch.Tensor,
        rows: NDArray[Any],
        slots: NDArray[np.integer[Any]],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.integer[Any]],
        masks: TokenMasks | None,
    ) -> torch.Tensor:
        """The logits themselves where nothing changes them, else a float32 copy that went through the processors, which
        the next step overwrites.
        """
        early = np.flatnonzero(num_tokens - rows["num_prompt"] < rows["min_tokens"])
        names = "biased", "penalized", "restricted", "has_bad_words", "custom"
        biased, penalized, restricted, with_bad_words, custom = (np.flatnonzero(rows[name]) for name in names)
        changed = early, biased, penalized, restricted, with_bad_words, custom
        if masks is None and not any(some.size for some in changed):
            return logits
        if len(self._processed) < len(logits):
            self._processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        logits = self._processed[: len(logits)].copy_(logits)
        if masks is not None:
            apply_masks(logits, masks)
        if restricted.size:
            keep_tokens(logits, restricted, [self._allowed[slot] for slot in slots[restricted].tolist()])
        if with_bad_words.size:
            lengths = num_tokens[with_bad_words].astype(np.int64)
            known = token_ids[slots[with_bad_words], : lengths.max()]
            words = [self._bad_words[slot] for slot in slots[with_bad_words].tolist()]
            forbid_bad_words(logits, with_bad_words, words, known, lengths, rows["num_prompt"][with_bad_words])
        if early.size:
            forbid_tokens(logits, early, [self._stop_ids[slot] for slot in slots[early].tolist()])
        if biased.size:
            ids, biases = zip(*(self._bias[slot] for slot in slots[biased].tolist()), strict=True)
            add_bias(logits, biased, ids, biases)
        if custom.size:
            num_prompt = rows["num_prompt"][custom]
            self.failures = self._custom.apply(logits, custom, slots[custom], token_ids, num_prompt, num_tokens[custom])
        if penalized.size:
            lengths = num_tokens[penalized].astype(np.int64)
            self.counts.penalize(logits, penalized, slots[penalized], token_ids, lengths, rows[penalized])
        return logits


def _choose(logits: torch.Tensor, rows: NDArray[Any], positions: NDArray[np.integer[Any]]) -> torch.Tensor:
    """One token per row, (n,) int64 on the logits' device."""
    random = rows["random"]
    if not random.any():
        return argmax(logits)
    drawing = np.flatnonzero(random)
    columns = (rows[name][drawing] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice"))
    params = DrawParams._make((*columns, positions[drawing].astype(np.uint64)))
    chosen = draw(_select(logits, drawing), params)
    if drawing.size == len(rows):
        return chosen
    greedy = np.flatnonzero(~random)
    chosen = torch.cat([argmax(_select(logits, greedy)), chosen])
    order = np.argsort(np.concatenate([greedy, drawing]))
    return chosen.index_select(0, to_tensor(order, chosen.device))


def _has_no_choice(logits: torch.Tensor, processed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(n,) bool: the processors forbid all tokens or overflow, so the chosen logit is not finite although it was
    before.
    """
    chosen = tokens.unsqueeze(-1)
    is_lost = ~processed.gather(1, chosen).isfinite() & logits.gather(1, chosen).isfinite()
    return is_lost.squeeze(-1)


def _select(logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """The given rows of (n, vocab); not copied if that is all of them."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, to_tensor(rows, logits.device))
