"""How long a device waits for its host between two decode steps of an engine, by events that the device passes."""

from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.report import Claim
from pdkv import LLM, SamplingParams
from pdkv.engine.executor import InProcessExecutor
from pdkv.engine.pending import PendingStep
from pdkv.engine.plan import StepPlan
from pdkv.kernels.streams import Event, streams_of

BATCHES = (64, 512)

LIMIT = 0.02
"""Of a step."""

_INPUT_LEN, _OUTPUT_LEN = 32, 96

_PERIOD = 8
"""In front of every eighth step the device is kept busy, see `_StepClock`."""

_BUSY_BYTES, _BUSY_TIMES = 256 << 20, 200
"""Read and written so often: some 30 ms on an H100."""


class _Step(NamedTuple):
    """One that was launched."""

    num_decodes: int  # 0: it has prompts
    behind: Event


class _StepClock:
    """Puts itself into an executor, and an event behind each step that it launches.

    In front of every eighth step it gives the device other work, enough for the host to launch that step and the next
    one meanwhile. So that next step waits for nothing of the host: from the event before it to its own is the time
    that the device itself takes.
    """

    def __init__(self, executor: InProcessExecutor) -> None:
        self._executor = executor
        self._launch = executor.launch
        self._streams = streams_of(executor.device)
        num_bytes = 1 << 10 if self._streams.is_host else _BUSY_BYTES
        self._busy = torch.zeros(num_bytes, dtype=torch.uint8, device=executor.device)
        self._steps: list[_Step] = []

    def __enter__(self) -> "_StepClock":
        self._executor.launch = self.launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.launch = self._launch  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> PendingStep:
        """In the executor's place."""
        if len(self._steps) % _PERIOD == 0:
            for _ in range(_BUSY_TIMES):
                self._busy.bitwise_not_()
        step = self._launch(plan)
        event = self._streams.make_event(timed=True)
        event.record()
        is_decode = plan.num_tokens == len(plan.scheduled)
        self._steps.append(_Step(plan.num_tokens if is_decode else 0, event))
        return step

    def milliseconds(self, batch: int) -> tuple[list[float], list[float]]:
        """From the end of one decode step of `batch` requests to the end of the next: those of an engine as it is, and
        those for which nothing waited. All must have ended.
        """
        as_it_is, alone = list[float](), list[float]()
        for number, (before, step) in enumerate(pairwise(self._steps), 1):
            if before.num_decodes == step.num_decodes == batch:
                took = before.behind.elapsed_ms(step.behind)
                behind_busy = number % _PERIOD
                if behind_busy == 1:
                    alone.append(took)
                elif behind_busy > 2:  # the host is still ahead in the second one
                    as_it_is.append(took)
        return as_it_is, alone


def claim(llm: LLM, batch: int, model: str) -> Claim:
    """The share of a step in which the device waits, where `batch` requests decode; `llm` has room for them."""
    executor: Any = llm._engine.core.executor
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_LEN, ignore_eos=True)
    prompts = [[(11 * i + 5 * j) % 4000 + 2 for j in range(_INPUT_LEN)] for i in range(batch)]
    with _StepClock(executor) as clock:
        llm.generate(prompts, params, progress=False)
    as_it_is, alone = clock.milliseconds(batch)
    step_ms, alone_ms = median(as_it_is), median(alone)
    figures = {"step ms": step_ms, "of the device's own ms": alone_ms, "steps": len(as_it_is)}
    name = f"{model}, {batch} decode: host gap / step"
    return Claim(name, max(0.0, 1 - alone_ms / step_ms), LIMIT, "lower", figures)
