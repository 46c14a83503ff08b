"""One decode step of a runner, taken again and again."""

from collections.abc import Sequence

import torch

from pdkv.engine.plan import NewRequest, ScheduledRequest, StepPlan
from pdkv.engine.worker.graphs import Recorder
from pdkv.engine.worker.kv_cache import allocate_pool, make_layout
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.step_buffers import Padding
from pdkv.models.decoder import Decoder
from pdkv.sampling.params import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class RepeatedStep:
    """A runner whose `sequences` requests of `context` tokens each draw the same token whenever it is called."""

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        sequences: int,
        context: int,
        *,
        decode_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[Padding] = (),
        chunk: int = 0,
        recorder: Recorder | None = None,
        params: SamplingParams = GREEDY,
    ) -> None:
        """Options of the runner; `params` of the requests. `chunk`: tokens of one more are computed in each step."""
        layout = make_layout(model.config, block_size=BLOCK_SIZE, dtype=str(dtype).removeprefix("torch."))
        self.bytes_per_token = layout.block_bytes * layout.num_groups // BLOCK_SIZE
        blocks = -(-context // BLOCK_SIZE)
        pool = allocate_pool(layout, (sequences + 1) * blocks, model.device)
        self._runner = ModelRunner(
            model, pool, layout, max_num_seqs=sequences + 1, max_model_len=context, decode_sizes=decode_sizes,
            prompt_sizes=prompt_sizes,
        )  # fmt: skip
        self._runner.warm_up_decodes(recorder)
        tables = [[list(range(i * blocks, (i + 1) * blocks))] * layout.num_groups for i in range(sequences)]
        prompt, output = [7] * (context - 4), [5, 6]
        new = [NewRequest(("step", i), 0, prompt, output, params, tables[i]) for i in range(sequences)]
        decodes = [ScheduledRequest(request.key, context - 2, 1, [], True) for request in new]
        if chunk:
            last = [list(range(sequences * blocks, (sequences + 1) * blocks))] * layout.num_groups
            new.append(NewRequest(("prompt", 0), 0, [7] * chunk, [], params, last))
            decodes.append(ScheduledRequest(("prompt", 0), 0, chunk, [], True))
        self._runner.execute(StepPlan(0, new, decodes, []))
        self._plan = StepPlan(1, [], decodes, [])

    def __call__(self) -> None:
        self._runner.execute(self._plan)

    def run(self, count: int) -> None:
        """So many steps, each launched before the one in front of it is read, as an engine's loop does on a device."""
        step = self._runner.launch(self._plan)
        for _ in range(count - 1):
            behind = self._runner.launch(self._plan)
            step.finish()
            step = behind
        step.finish()
