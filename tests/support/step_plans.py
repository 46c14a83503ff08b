"""Plans by hand: requests with four blocks each, and what a runner gives that is ahead of its device."""

from collections import deque
from typing import Any

from pdkv import SamplingParams
from pdkv.engine.plan import NewRequest, ScheduledRequest, StepOutput, StepPlan
from pdkv.engine.worker.pending import MAX_PENDING, PendingStep
from pdkv.engine.worker.runner import ModelRunner


def new(name: str, prompt: list[int], first_block: int, **fields: Any) -> NewRequest:
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "logprobs": 3, **fields})
    return NewRequest((name, 0), 0, prompt, [], params, [list(range(first_block, first_block + 4))])


def share(name: str, start: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest((name, 0), start, count, [], samples)


def outputs(runner: ModelRunner, plans: list[StepPlan]) -> list[StepOutput]:
    """Each step is launched before those in front of it are read, as far ahead as may be."""
    found, pending = list[StepOutput](), deque[PendingStep]()
    for plan in plans:
        pending.append(runner.launch(plan))
        if len(pending) > MAX_PENDING:
            found.append(pending.popleft().finish())
    return [*found, *(step.finish() for step in pending)]


def tokens(output: StepOutput, name: str) -> list[int]:
    return output.sampled[name, 0].token_ids
