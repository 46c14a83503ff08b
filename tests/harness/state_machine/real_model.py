"""Worlds on a real model: paged attention over float32 KV, and tokens that transformers says."""

import random
from functools import cached_property
from pathlib import Path

from held_grammars import HeldStore
from oracle import oracle

from pdkv.config import EngineConfig
from pdkv.connectors.base import WorkerConnector
from pdkv.engine.proposers.base import Proposer
from pdkv.engine.proposers.registry import make_proposer
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.kv_cache import make_layout
from pdkv.engine.worker.masks import GrammarMasks
from pdkv.models.config import load_model_config
from pdkv.wire.kv import KVLayout
from state_machine.forward import MAX_OUTPUT, NUM_FAMILIES, NUM_LENGTHS, Forward

PROMPT_LENGTHS = (1, 3, 15, 16, 17, 24, 31, 32, 33, 40, 48, 49, 62)
assert len(PROMPT_LENGTHS) == NUM_LENGTHS

METHODS = ("", "ngram", "suffix", "draft_model", "prediction")
"""Of proposers; "" is the one that knows the output, and is often wrong."""


class RealModel(Forward):
    """A model directory. Its prompts are such that no near tie decides a token."""

    block_sizes = (16, 16, 32)
    max_model_len = 80
    scale = 5

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._config = load_model_config(model_dir)
        self.vocab_size = self._config.vocab_size
        self.eos = frozenset(range(0, self.vocab_size, 23))

    def layout(self, block_size: int) -> KVLayout:
        return make_layout(self._config, block_size=block_size, dtype="float32")

    def make_executor(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        worker: WorkerConnector,
        proposer: Proposer | None = None,
        grammars: HeldStore | None = None,
    ) -> InProcessExecutor:
        config = EngineConfig(
            model=self._model_dir,
            dtype="float32",
            device="cpu",
            block_size=layout.block_size,
            kv_cache_memory=num_blocks * layout.block_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            threads=1,
            check_finite=True,
        )
        executor = InProcessExecutor(
            self._config,
            config,
            max_num_batched_tokens=64 * self.scale,
            proposer=proposer,
            masks=GrammarMasks(grammars, sorted(self.eos)),
        )
        assert executor.num_blocks == num_blocks
        executor.attach(None, worker)
        return executor

    def proposer(self, num_tokens: int, seed: int) -> Proposer | None:
        """One of every kind, by the seed."""
        method = METHODS[seed % len(METHODS)]
        if not (num_tokens and method):
            return super().proposer(num_tokens, seed)
        config = {"method": method, "num_speculative_tokens": str(num_tokens), "adaptive": "false"}
        own = {"ngram": {"prompt_lookup_min": "1"}, "draft_model": {"model": str(self._model_dir)}}
        return make_proposer(config | own.get(method, {}))

    def prompt(self, family: int, length: int, *, changed: bool) -> list[int]:
        return self._prompts[family, length, changed]

    def expected(self, prompt: list[int], num_output: int) -> list[int]:
        return self._outputs[tuple(prompt)][:num_output]

    @cached_property
    def _outputs(self) -> dict[tuple[int, ...], list[int]]:
        """What transformers says behind every prompt that a world may use."""
        outputs = {}
        for prompt in self._prompts.values():
            output = oracle(self._model_dir).generate(prompt, MAX_OUTPUT)
            assert output is not None
            outputs[tuple(prompt)] = output
        return outputs

    @cached_property
    def _prompts(self) -> dict[tuple[int, int, bool], list[int]]:
        """By (family, length number, changed)."""
        rng = random.Random(0)
        prompts = {}
        for family in range(NUM_FAMILIES):
            while (drawn := self._draw_family(rng)) is None:
                pass
            prompts.update({(family, length, changed): prompt for (length, changed), prompt in drawn.items()})
        return prompts

    def _draw_family(self, rng: random.Random) -> dict[tuple[int, bool], list[int]] | None:
        """All prompts of one family; None where a near tie decides one of their tokens."""
        stem = rng.choices(range(self.vocab_size), k=PROMPT_LENGTHS[-1])
        prompts = {}
        for number, length in enumerate(PROMPT_LENGTHS, 1):
            for changed in (False, True):
                last = (stem[length - 1] + 17 * changed) % self.vocab_size
                prompts[number, changed] = [*stem[: length - 1], last]
        if any(oracle(self._model_dir).generate(prompt, MAX_OUTPUT) is None for prompt in prompts.values()):
            return None
        return prompts
