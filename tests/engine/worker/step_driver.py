"""Runs prompts through a ModelRunner with hand-made step plans: what a scheduler would do, without one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from pdkv.connectors.base import KVConnectorMetadata, WorkerConnector
from pdkv.engine.plan import NewRequest, ScheduledRequest, StepOutput, StepPlan
from pdkv.engine.worker.kv_cache import allocate_pool, make_layout
from pdkv.engine.worker.runner import ModelRunner
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.sampling.params import SamplingParams
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey

MAX_LEN = 1024


class StepDriver:
    """Greedy requests on a runner of its own; blocks are handed out backwards, so that no table is the identity."""

    def __init__(
        self, model_dir: Path, *, num_blocks: int = 400, block_size: int = 16, max_num_seqs: int = 64,
        worker: WorkerConnector | None = None, linears: Literal["auto", "torch"] = "auto",
        **options: Any,
    ) -> None:  # fmt: skip
        """`options` of the runner."""
        config = load_model_config(model_dir)
        dtype, device = getattr(torch, config.dtype), torch.device("cpu")
        self.model = load_decoder(model_dir, config, dtype=dtype, device=device, max_model_len=MAX_LEN, linears=linears)
        layout = make_layout(config, block_size=block_size, dtype=config.dtype, grouped=False)
        self.pool = allocate_pool(layout, num_blocks, device)
        self.runner = ModelRunner(
            self.model,
            self.pool,
            layout,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            worker=worker,
            **{"check_finite": True} | options,
        )
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.tables: dict[RequestKey, list[int]] = {}
        self.tokens: dict[RequestKey, list[int]] = {}
        self.computed: dict[RequestKey, int] = {}
        self.prompt_logprobs: dict[RequestKey, list[TokenLogprob | None]] = {}
        self.pooled: dict[RequestKey, bytes] = {}
        self._new: list[NewRequest] = []
        self._ended: list[RequestKey] = []
        self._step_id = 0

    def add(self, name: str, prompt: Sequence[int], output: Sequence[int] = (), **params: Any) -> RequestKey:
        """Announce a request with the next step."""
        key = (name, 0)
        self.tokens[key], self.computed[key], self.tables[key] = [*prompt, *output], 0, []
        blocks = self._grow(key, len(self.tokens[key]))
        sampling = SamplingParams(temperature=0.0, max_tokens=None, **params)
        self._new.append(NewRequest(key, 0, list(prompt), list(output), sampling, [blocks]))
        return key

    def end(self, key: RequestKey) -> None:
        """Let a request leave with the next step; its blocks are free for the next one."""
        self._ended.append(key)
        self.free.extend(self.tables.pop(key))
        del self.tokens[key], self.computed[key]

    def step(self, chunks: dict[RequestKey, int], meta: KVConnectorMetadata | None = None) -> StepOutput:
        """Compute that many tokens of each request; what is drawn goes to `tokens`."""
        new_keys = {request.key for request in self._new}
        scheduled = []
        for key, count in chunks.items():
            stop = self.computed[key] + count
            blocks = [] if key in new_keys else self._grow(key, stop)
            scheduled.append(
                ScheduledRequest(
                    key, self.computed[key], count, [blocks] if blocks else [], stop == len(self.tokens[key])
                )
            )
            self.computed[key] = stop
        plan = StepPlan(self._step_id, self._new, scheduled, self._ended, kv_meta=meta, settled=self._step_id - 1)
        self._step_id, self._new, self._ended = self._step_id + 1, [], []
        output = self.runner.execute(plan)
        assert not output.failed, output.failed
        for key, sampled in output.sampled.items():
            self.tokens[key].extend(sampled.token_ids)
        for key, of_prompt in output.of_prompts.items():
            if isinstance(of_prompt, bytes):
                self.pooled[key] = of_prompt
            else:
                self.prompt_logprobs[key] = of_prompt
        return output

    def run(
        self, num_output: dict[RequestKey, int], *, budget: int = 2048, chunk: int = 2048
    ) -> dict[RequestKey, list[int]]:
        """Continuous batching until each request has its output: all that is left, within a budget and a chunk."""
        prompt_lens = {key: len(self.tokens[key]) for key in num_output}
        while True:
            chunks, left = {}, budget
            for key, wanted in num_output.items():
                missing = len(self.tokens[key]) - self.computed[key]
                if len(self.tokens[key]) < prompt_lens[key] + wanted and left:
                    chunks[key] = min(missing, chunk, left)
                    left -= chunks[key]
            if not chunks:
                return {key: self.tokens[key][prompt_lens[key] :] for key in num_output}
            self.step(chunks)

    def _grow(self, key: RequestKey, num_tokens: int) -> list[int]:
        table = self.tables[key]
        blocks = [self.free.pop() for _ in range(-(-num_tokens // self.block_size) - len(table))]
        table.extend(blocks)
        return blocks
