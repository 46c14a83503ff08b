"""A proposer that runs a smaller model of the same vocabulary, with a KV pool of its own (docs/speculation.md).

It draws from its own distribution with the target's random numbers. It finds no KV of others: it computes prompts
itself, some tokens beside each step, and guesses nothing for a request until it has caught up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdkv.base.options import Positive, Size, option
from pdkv.config import EngineConfig
from pdkv.engine.plan import NewRequest, SampledTokens, ScheduledRequest, StepPlan
from pdkv.engine.proposers.base import Asked, Guesses, Place, Proposer, ProposerOptions
from pdkv.engine.worker.dtype import resolve_dtype
from pdkv.engine.worker.kv_cache import allocate_pool, make_layout, num_blocks_that_fit
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.runner import ModelRunner
from pdkv.errors import ConfigError
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.text import Tokenizer
from pdkv.wire.types import RequestKey

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
        self.num_told = 0  # of its blocks, that the runner knows
        self.token_ids: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # during one call


_Share = tuple[int, _Drafted, int]
"""A request's place among those asked for, and how many of its tokens are known after a step."""


class DraftModelProposer(Proposer):
    """Each rank runs the whole drafter, so that ranks need not talk about it."""

    options_type = DraftModelOptions
    is_costly = True

    @torch.inference_mode()
    def attach(self, place: Place) -> None:
        options, config = self.options, place.config
        assert isinstance(config, EngineConfig)
        model = load_model_config(options.model, place.max_model_len)
        _check_vocabulary(place, options.model, model.vocab_size)
        device, dtype = place.device, resolve_dtype(config, model, place.device)
        decoder = load_decoder(
            options.model, model, dtype=getattr(torch, dtype), device=device, max_model_len=place.max_model_len
        )
        layout = make_layout(model, block_size=config.block_size, dtype=dtype, grouped=False)
        most = place.max_num_seqs * -(-place.max_model_len // config.block_size)
        num_blocks = num_blocks_that_fit(layout, options.draft_kv_cache_memory, most)
        pool = allocate_pool(layout, num_blocks, device, reserved=False)
        self._runner = ModelRunner(
            decoder, pool, layout, max_num_seqs=place.max_num_seqs, max_model_len=place.max_model_len
        )
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
            elif budget > 0 and self._has_room(drafted, stop := drafted.num_computed + min(missing - 1, budget)):
                budget -= stop - drafted.num_computed
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
            drafted.num_told, drafted.num_computed = len(drafted.blocks), stop
        ended, self._ended, self._step_id = self._ended, [], self._step_id + 1
        return self._runner.launch(StepPlan(self._step_id, new, scheduled, ended))


def _plain(drafted: _Drafted, blocks: list[list[int]]) -> NewRequest:
    """The request as the drafter has it: drawn with the same random numbers, without what only the target needs."""
    request = drafted.request
    params: Any = msgspec.structs.replace(request.params, **_PLAIN)
    output = drafted.token_ids[len(request.prompt_token_ids) :].tolist()
    return msgspec.structs.replace(request, params=params, block_ids=blocks, output_token_ids=output, grammar=None)


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
