"""A proposer that runs a smaller model of the same vocabulary, with a KV pool of its own (docs/speculation.md).

It draws from its own distribution with the target's random numbers. Of a prompt to be handed off it computes KV in the
steps that compute the prompt, and copies it into layers of the target's blocks, which go wherever these go. Where none
arrives, it computes prompts itself, some tokens beside each step, and guesses nothing until it has caught up.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdkv.base.options import Positive, Size, option
from pdkv.config import EngineConfig
from pdkv.engine.plan import NewRequest, SampledTokens, ScheduledRequest, StepPlan
from pdkv.engine.proposers.base import Asked, Guesses, IntArray, Place, Proposer, ProposerOptions
from pdkv.engine.worker.batch import PersistentBatch, StepInputs
from pdkv.engine.worker.dtype import resolve_dtype
from pdkv.engine.worker.kv_cache import allocate_pool, make_layout, num_blocks_that_fit
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.threads import StepThreads
from pdkv.errors import ConfigError
from pdkv.models.config import ModelConfig, load_model_config
from pdkv.models.identity import model_identity
from pdkv.models.loader import load_decoder
from pdkv.text import Tokenizer
from pdkv.wire.kv import KVLayout
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_MARK_BYTES = 8
_BLOCKS_AT_ONCE = 64

_PLAIN: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, "logits_processors": {}, "bad_words_token_ids": ()}
_PLAIN |= {"pooling": None, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class DraftModelOptions(ProposerOptions):
    """Keys of the method "draft_model"."""

    model: Path = option(
        help="directory of the smaller model, whose vocabulary is that of the served one", metavar="DIR"
    )
    draft_kv_cache_memory: Size = option(256 << 20, "size of its KV pool on each rank")
    draft_max_num_batched_tokens: Positive = option(
        256, "the most tokens of prompts that it computes beside one step of the served model"
    )


class _Drafted:
    """A request that the drafter knows."""

    def __init__(self, request: NewRequest) -> None:
        self.request = request
        self.num_computed = 0  # tokens whose KV the drafter has, guesses included
        self.blocks: list[int] = []
        self.has_looked = False  # for KV that lies beside the target's
        self.num_told = 0  # of its blocks, that the runner knows
        self.token_ids: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # during one call


_Share = tuple[int, _Drafted, int]
"""A request's place among those asked for, and how many of its tokens are known after a step."""


class DraftModelProposer(Proposer):
    """Each rank runs the whole drafter, so that ranks need not talk about it."""

    options_type = DraftModelOptions
    is_costly = True
    _first_layer: int | None = None  # of the target's blocks, with this model's KV

    def with_room(self, layout: KVLayout, place: Place) -> KVLayout:
        model, own = self._read_config(place)
        name = f"{model_identity(self.options.model, model)},{own.identity},heads={own.num_kv_heads}"
        count = -(-(own.token_bytes + _MARK_BYTES) * layout.num_layers // layout.token_bytes)
        self._first_layer = layout.num_layers
        drafter = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        sizes = {"num_layers": layout.num_layers + count, "drafter_layers": count}
        return msgspec.structs.replace(layout, drafter=drafter, **sizes)

    def _read_config(self, place: Place) -> tuple[ModelConfig, KVLayout]:
        config, model = place.config, load_model_config(self.options.model, place.max_model_len)
        assert isinstance(config, EngineConfig)
        dtype = resolve_dtype(config, model, place.device)
        return model, make_layout(model, block_size=config.block_size, dtype=dtype, grouped=False)

    @torch.inference_mode()
    def attach(self, place: Place) -> None:
        options, config, device = self.options, place.config, place.device
        model, layout = self._read_config(place)
        _check_vocabulary(place, options.model, model.vocab_size)
        dtype = getattr(torch, layout.dtype)
        decoder = load_decoder(options.model, model, dtype=dtype, device=device, max_model_len=place.max_model_len)
        most = place.max_num_seqs * -(-place.max_model_len // config.block_size)
        size = options.draft_kv_cache_memory
        num_blocks = num_blocks_that_fit(layout, size, most, option="draft_kv_cache_memory")
        pool = allocate_pool(layout, num_blocks, device, reserved=False)
        self._runner = ModelRunner(
            decoder, pool, layout, max_num_seqs=place.max_num_seqs, max_model_len=place.max_model_len
        )
        self._pool, self._told = pool, False
        self._threads = StepThreads(model, layout.dtype, torch.get_num_threads()) if device.type == "cpu" else None
        self._max_num_seqs = place.max_num_seqs
        self._block_size, self._free = config.block_size, list(range(num_blocks - 1, -1, -1))
        self._known: dict[int, _Drafted] = {}  # by slot of the target's batch
        self._ended: list[RequestKey] = []
        self._step_id = 0

    def warm_up(self) -> None:
        most = max(self.options.draft_max_num_batched_tokens, self._max_num_seqs * (self.num_tokens + 1))
        self._runner.warm_up(most)

    def add(self, slot: int, request: NewRequest) -> None:
        self._known[slot] = _Drafted(request)

    def remove(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        drafted = self._known.pop(slot)
        self._free += drafted.blocks
        if drafted.num_told:
            self._ended.append(drafted.request.key)

    def follow(self, inputs: StepInputs, batch: PersistentBatch, kv_pool: torch.Tensor) -> None:
        counts, size = np.diff(inputs.cu_seqlens_q).tolist(), self._block_size
        for slot, stop, count in zip(inputs.slots.tolist(), inputs.seq_lens.tolist(), counts, strict=True):
            drafted, start = self._known[slot], stop - count
            begun = slice(-(-start // size), -(-stop // size))  # blocks that have had no token of the request
            if self._first_layer is not None and begun.start < begun.stop:
                # Their earlier content goes with them into a store, where it would outlive its owner's terms.
                _bytes(kv_pool)[batch.block_tables[0, slot, begun], self._first_layer :] = 0
            gives = drafted.request.hands_off and self.is_shared and self._first_layer is not None
            if drafted.has_looked and not gives:
                continue
            table, token_ids = batch.block_tables[0, slot], batch.token_ids[slot, : batch.num_tokens[slot]]
            if not drafted.has_looked and start:
                self._take(drafted, kv_pool, table, token_ids[:start])
            drafted.has_looked = True
            if gives:
                drafted.token_ids = token_ids
                self._give(drafted, kv_pool, table, start, stop)

    def _take(self, drafted: _Drafted, kv_pool: torch.Tensor, table: IntArray, token_ids: IntArray) -> None:
        """Copy this model's KV of tokens out of the target's blocks, as far as it is there."""
        if self._first_layer is not None and self._has_room(drafted, len(token_ids)):
            self._copy_out(drafted, kv_pool, table, token_ids)
        found, computed = self.drafter_tokens
        self.drafter_tokens = found + drafted.num_computed, computed
        if not (drafted.num_computed or drafted.request.hands_off or self._told):
            self._told = True
            logger.info(
                "the drafter starts cold: it computes %d tokens whose KV came without its own, and later ones like "
                "them (docs/speculation.md; not reported again)", len(token_ids),
            )  # fmt: skip

    def _copy_out(self, drafted: _Drafted, kv_pool: torch.Tensor, table: IntArray, token_ids: IntArray) -> None:
        theirs, ours, size = _bytes(kv_pool)[:, self._first_layer :], _bytes(self._pool), self._block_size
        marks, token_bytes = _marks(token_ids), ours[0].size // size
        for first in range(0, len(drafted.blocks), _BLOCKS_AT_ONCE):
            blocks = np.array(drafted.blocks[first : first + _BLOCKS_AT_ONCE])
            rows = _by_token(theirs[table[first : first + len(blocks)]])
            wanted = marks[first * size : first * size + len(rows)]
            is_there = (rows[: len(wanted), :_MARK_BYTES] == wanted).all(axis=1)
            count = int(np.append(is_there, False).argmin())
            rows[count:] = 0
            ours[blocks] = _by_block(rows[:, _MARK_BYTES : _MARK_BYTES + token_bytes], ours)
            drafted.num_computed += count
            if count < len(rows):
                break

    def _give(self, drafted: _Drafted, kv_pool: torch.Tensor, table: IntArray, start: int, stop: int) -> None:
        """Compute KV of tokens [start, stop) and copy it into the target's blocks before they are published. It would
        be of no use without KV of all earlier tokens.
        """
        if drafted.num_computed != start or not self._has_room(drafted, stop):
            return
        budget = int(self.options.draft_max_num_batched_tokens)
        while drafted.num_computed < stop:
            self._launch([(0, drafted, min(stop, drafted.num_computed + budget))], samples=False).finish()
        theirs, ours, size = _bytes(kv_pool)[:, self._first_layer :], _bytes(self._pool), self._block_size
        entries, first = slice(start // size, -(-stop // size)), start // size * size
        written = slice(start - first, stop - first)
        rows, own = _by_token(theirs[table[entries]]), _by_token(ours[drafted.blocks[entries]])
        rows[written, :_MARK_BYTES] = _marks(drafted.token_ids[:stop])[start:]
        rows[written, _MARK_BYTES : _MARK_BYTES + own.shape[1]] = own[written]
        theirs[table[entries]] = _by_block(rows, theirs)

    def propose(self, asked: Asked) -> Guesses:
        most = min(int(asked.most.max()), self.num_tokens)
        guesses = np.full((len(asked.slots), most), -1, np.int64)
        counts = np.zeros(len(asked.slots), np.int64)
        for step, (shares, sampled) in enumerate(self._draw(asked, most)):
            for place, drafted, _ in shares:
                guesses[place, step] = sampled[drafted.request.key].token_ids[0]
                counts[place] += 1
        return Guesses(counts, guesses)

    def _draw(self, asked: Asked, most: int) -> Sequence[tuple[Sequence[_Share], Mapping[RequestKey, SampledTokens]]]:
        """Each step's requests, and what it drew. A device goes on with a step while the one before is read."""
        active = self._catch_up(asked)
        steps = list[tuple[Sequence[_Share], PendingStep]]()
        try:
            while active and len(steps) < most:
                steps.append((active, self._launch(active, samples=True)))
                for _, earlier in steps[-2:-1]:
                    earlier.finish()
                active = [
                    (place, drafted, known + 1)
                    for place, drafted, known in active
                    if len(steps) < asked.most[place] and self._has_room(drafted, known + 1)
                ]
        finally:  # whatever failed, or no later step could be launched
            drawn = [(shares, step.finish().sampled) for shares, step in steps]
        return drawn

    def _catch_up(self, asked: Asked) -> list[_Share]:
        """Compute what is missing, within the budget. Returns those that can draw: their places, and known tokens."""
        budget = int(self.options.draft_max_num_batched_tokens)
        ready, behind = [], []
        for place, (slot, known) in enumerate(zip(asked.slots.tolist(), asked.num_tokens.tolist(), strict=True)):
            drafted = self._known[slot]
            drafted.token_ids = asked.token_ids[slot, :known]
            self._take_back(drafted)
            missing = known - drafted.num_computed
            if missing <= self.num_tokens + 1 and self._has_room(drafted, known):
                ready.append((place, drafted, known))
            elif (count := min(missing - 1, budget)) and self._has_room(drafted, stop := drafted.num_computed + count):
                budget -= count
                behind.append((place, drafted, stop))
        if behind:
            self._launch(behind, samples=False).finish()
        caught_up = [
            (place, drafted, stop + 1)
            for place, drafted, stop in behind
            if stop + 1 == len(drafted.token_ids) and self._has_room(drafted, stop + 1)
        ]
        return [*ready, *caught_up]

    def _take_back(self, drafted: _Drafted) -> None:
        """Forget KV of guesses that were wrong, and tell the runner what was drawn."""
        if not drafted.num_told:
            return
        own = self._runner.rewrite(drafted.request.key, drafted.token_ids)
        count = min(drafted.num_computed, len(own) - 1)
        differs = np.flatnonzero(own[:count] != drafted.token_ids[:count])
        drafted.num_computed = int(differs[0]) if differs.size else count

    def _has_room(self, drafted: _Drafted, num_tokens: int) -> bool:
        """Take blocks for so many tokens. False: there are too few."""
        missing = -(-num_tokens // self._block_size) - len(drafted.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            drafted.blocks.append(self._free.pop())
        return True

    def _launch(self, shares: Sequence[_Share], *, samples: bool) -> PendingStep:
        """Compute each request's tokens up to `stop`; at most one launched before may be unfinished."""
        new, scheduled = [], []
        for _, drafted, stop in shares:
            fresh = [drafted.blocks[drafted.num_told :]]
            if not drafted.num_told:
                new.append(_plain(drafted, fresh))
            told = fresh if drafted.num_told and fresh[0] else []
            start = drafted.num_computed
            scheduled.append(ScheduledRequest(drafted.request.key, start, stop - start, told, samples))
            num_of_prompt = max(min(stop, len(drafted.request.prompt_token_ids)) - start, 0)
            self.drafter_tokens = self.drafter_tokens[0], self.drafter_tokens[1] + num_of_prompt
            drafted.num_told, drafted.num_computed = len(drafted.blocks), stop
        ended, self._ended, self._step_id = self._ended, [], self._step_id + 1
        plan = StepPlan(self._step_id, new, scheduled, ended)
        with self._threads.used_for(plan.num_tokens) if self._threads is not None else nullcontext():
            return self._runner.launch(plan)


def _plain(drafted: _Drafted, blocks: list[list[int]]) -> NewRequest:
    """The request as the drafter has it: drawn with the same random numbers, without what only the target needs."""
    request = drafted.request
    params: Any = msgspec.structs.replace(request.params, **_PLAIN)
    output = drafted.token_ids[len(request.prompt_token_ids) :].tolist()
    return msgspec.structs.replace(request, params=params, block_ids=blocks, output_token_ids=output, grammar=None)


def _bytes(pool: torch.Tensor) -> Bytes:
    """A pool in host memory as bytes, (blocks, layers, sides, heads, block_size, bytes of a row)."""
    pool_bytes: Bytes = pool.view(torch.uint8).numpy()
    return pool_bytes


def _by_token(blocks: Bytes) -> Bytes:
    """All bytes of each token of such blocks, (tokens, bytes): a copy."""
    return np.moveaxis(blocks, 4, 1).reshape(len(blocks) * blocks.shape[4], -1)


def _by_block(tokens: Bytes, pool: Bytes) -> Bytes:
    """The inverse, for blocks of that pool."""
    _, layers, sides, heads, size, row = pool.shape
    return np.moveaxis(tokens.reshape(-1, size, layers, sides, heads, row), 1, 4)


def _marks(token_ids: IntArray) -> Bytes:
    """For each token (n,) bytes that depend on all tokens up to it, (n, _MARK_BYTES). So KV of other tokens is told
    apart, which an earlier request has left in a block.
    """
    powers = np.cumprod(np.full(len(token_ids), 0x9E3779B97F4A7C15, np.uint64))
    sums = np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
    return sums.view(np.uint8).reshape(-1, _MARK_BYTES)


def _check_vocabulary(place: Place, path: Path, vocab_size: int) -> None:
    """Raise ConfigError unless both models have the same tokens."""
    if vocab_size != place.vocab_size:
        raise ConfigError(
            f"speculative_config: {path} has a vocabulary of {vocab_size} tokens, and {place.model} one of "
            f"{place.vocab_size}: a draft model needs the same"
        )
    if Tokenizer.from_dir(path).ids_by_text() != Tokenizer.from_dir(place.model).ids_by_text():
        raise ConfigError(
            f"speculative_config: {path} has other tokens than {place.model}: a draft model needs the same vocabulary"
        )
