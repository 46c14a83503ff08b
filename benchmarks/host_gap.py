"""How long a device waits for its host between two steps, in turn and with steps planned ahead.

The device is a stand-in that takes 10 ms for a step of any size and no CPU. The rest is the engine's own loop: messages
in, plans, updates, messages out, encoded. Requests have 10 tokens and want 20 to 500 more; who ends is replaced.
"""

import random
import threading
import time
from contextlib import ExitStack
from statistics import fmean, median, quantiles

from benchmarks.report import Claim, Context
from benchmarks.step_thread import engine
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.step_loop import make_step_loop
from pdkv.testing.engine import submit
from pdkv.testing.standin import VOCAB_SIZE
from pdkv.wire.frames import encode_message
from pdkv.wire.messages import Finished

STEP_S = 0.010
LIMIT = 0.02
AHEAD = 2
MAX_OUTPUT = 500


class Device:
    """Waits in place of a forward pass, and notes when each of its steps began and ended."""

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[tuple[float, float]] = []
        self._execute = core.executor.execute
        core.executor.execute = self._run  # type: ignore[method-assign]

    def _run(self, plan: StepPlan) -> StepOutput:
        if not plan.scheduled:
            return self._execute(plan)
        begin = time.perf_counter()
        time.sleep(STEP_S)
        self.steps.append((begin, time.perf_counter()))
        return self._execute(plan)

    def gaps(self) -> list[float]:
        """Between two steps, as a part of the first one."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [(following - end) / (end - begin) for (begin, end), (following, _) in pairs]


def run(context: Context) -> list[Claim]:
    """One claim per number of requests at once."""
    num_steps = 20 if context.quick else 400
    return [_measure(at_once, num_steps) for at_once in ((8,) if context.quick else (64, 256, 512))]


def _measure(at_once: int, num_steps: int) -> Claim:
    gaps = {ahead: _serve(at_once, num_steps, ahead) for ahead in (0, AHEAD)}
    low, middle, high = quantiles(gaps[AHEAD], n=4)
    return Claim(
        f"{at_once} at once: host gap / step of {STEP_S * 1e3:g} ms, {AHEAD} steps ahead",
        round(middle, 4),
        LIMIT,
        "lower",
        {
            "in turn": round(median(gaps[0]), 4),
            "mean ahead": round(fmean(gaps[AHEAD]), 4),
            "mean in turn": round(fmean(gaps[0]), 4),
        },
        (round(low, 4), round(high, 4)),
    )


def _serve(at_once: int, num_steps: int, max_steps_ahead: int) -> list[float]:
    """Keep so many requests at work until the device has run so many steps, behind those of a warm-up."""
    rng = random.Random(at_once)
    wake = threading.Event()
    num_blocks = at_once * (MAX_OUTPUT + 26) // 16
    with ExitStack() as stack:
        core = stack.enter_context(engine(None, num_blocks, max_tokens=8192, batch=at_once))
        device = Device(core)
        steps = make_step_loop(core, max_steps_ahead, wake.set)
        stack.callback(steps.close)
        num_sent = 0
        missing = at_once
        while len(device.steps) < num_steps + num_steps // 4:
            for _ in range(missing):
                length = min(max(int(rng.gauss(260, 120)), 20), MAX_OUTPUT)
                prompt = [rng.randrange(VOCAB_SIZE) for _ in range(10)]
                core.handle("r", submit(prompt, request_id=f"q{num_sent}", max_tokens=length), time.monotonic())
                num_sent += 1
            missing = 0
            steps.turn()
            for _, messages in core.take_messages(time.monotonic()):
                for message in messages:
                    encode_message(message)
                    missing += isinstance(message, Finished)
            wait_s = steps.wait_s()
            wake.wait(None if missing == 0 and wait_s is None else 0.0 if missing else wait_s)
            wake.clear()
        return device.gaps()[num_steps // 4 :]
