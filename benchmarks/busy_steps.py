"""What loads and saves cost the steps beside them: decodes of one engine while hits come in and saves leave.

The engine is stepped here. Rounds take turns between steps with nothing else, steps while the KV of eight prompts is
loaded, and steps while that of eight prompts is saved; steps that compute prompts do not count.
"""

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.build_engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepPlan
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import CacheOrder, Finished, Submit

NUM_STREAMS = 8
STREAM_CONTEXT = 256
NUM_HITS = 8
HIT_TOKENS = 1024
LIMIT = 1.05
WAIT_S = 120.0

Beside = Literal["nothing", "loads", "saves"]


class BusyEngine:
    """An aggregated engine over host memory; times of its steps by what went on beside them."""

    def __init__(self, model: Path, directory: str, num_tokens: int, vocabulary: int) -> None:
        self._woken = threading.Event()
        self._rng = random.Random(5)
        self._vocabulary = vocabulary
        config = EngineConfig(
            model=model, device="cpu", threads=1, kv_cache_memory=1 << 30, max_num_seqs=64
        )
        url = f"host://{directory}/kv?capacity=3GiB"
        handoff = HandoffConfig(connector="store", connector_config={"url": url, "max_save_bytes": "1GiB"})
        self.core: EngineCore = build_engine(config, handoff, name="busy", epoch="1", notify=self._woken.set)
        self.core.router_joined("r", "1")
        self.prompts = [self._prompt(num_tokens) for _ in range(NUM_HITS)]
        self.times: dict[Beside, list[float]] = {"nothing": [], "loads": [], "saves": []}
        self._num_open = 0
        self._number = 0
        self._plan: StepPlan | None = None
        plan_step = self.core.plan_step

        def plan(now: float) -> StepPlan:
            self._plan = plan_step(now)
            return self._plan

        self.core.plan_step = plan  # type: ignore[method-assign]  # what a step computes nobody tells

    def close(self) -> None:
        self.core.shutdown()

    def submit(self, prompt: list[int], num_tokens: int) -> None:
        """Ask for so many tokens."""
        self._number += 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True)
        submit = Submit(
            request_id=f"r{self._number}", transfer_id=f"t{self._number}", attempt=0, prompt_token_ids=prompt,
            params=params,
        )  # fmt: skip
        self.core.handle("r", submit, time.monotonic())
        self._num_open += 1

    def begin_streams(self, num_tokens: int) -> None:
        """Streams that decode for so many steps."""
        for _ in range(NUM_STREAMS):
            self.submit(self._prompt(STREAM_CONTEXT), num_tokens)
        self.run_until(lambda: all(r.num_computed >= STREAM_CONTEXT for r in self.core.requests.values()))

    def forget(self) -> None:
        """The pool keeps nothing of the prompts; host memory does."""
        self.core.handle("r", CacheOrder(order_id="clear", action="clear", tier="pool"), time.monotonic())
        self.run_until(lambda: True)

    def fresh_prompts(self, num_tokens: int) -> list[list[int]]:
        """Prompts that nobody has seen."""
        return [self._prompt(num_tokens) for _ in range(NUM_HITS)]

    def run_until(self, is_over: "object") -> None:
        """Steps until `is_over()`."""
        assert callable(is_over)
        deadline = time.monotonic() + WAIT_S
        self.step()
        while not is_over():
            assert time.monotonic() < deadline, "it does not end"
            self.step()

    def step(self) -> None:
        """One step; its time counts where it computes tokens of the streams only."""
        if self._woken.is_set():
            self._woken.clear()
            self.core.wake()
        beside: Beside = "loads" if self.core.external.loads else "nothing" if self.core.external.is_idle else "saves"
        began = time.perf_counter()
        self.core.step(time.monotonic())
        seconds = time.perf_counter() - began
        for _, messages in self.core.take_messages(time.monotonic()):
            self._num_open -= sum(isinstance(message, Finished) for message in messages)
        assert self._plan is not None
        if self._plan.num_tokens == len(self._plan.scheduled) == NUM_STREAMS:
            self.times[beside].append(seconds)

    @property
    def is_alone(self) -> bool:
        """Whether nothing but the streams is under way."""
        return self._num_open <= NUM_STREAMS and self.core.external.is_idle

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(3, self._vocabulary), k=num_tokens)


@contextmanager
def _engine(model: Path, num_tokens: int, vocabulary: int) -> Iterator[BusyEngine]:
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as directory:
        engine = BusyEngine(model, directory, num_tokens, vocabulary)
        try:
            yield engine
        finally:
            engine.close()


def run(context: Context) -> list[Claim]:
    """Median step beside loads, and beside saves, of that beside nothing."""
    size, rounds, num_tokens = ("tiny", 1, 256) if context.quick else ("mid", 6, HIT_TOKENS)
    with _engine(find_model(context.models, size), num_tokens, 4096) as engine:
        for prompt in engine.prompts:  # into host memory
            engine.submit(prompt, 1)
        engine.run_until(lambda: engine._num_open == 0 and engine.core.external.is_idle)
        for turn in range(rounds + 1):
            engine.begin_streams(400)
            _play(engine, num_tokens)
            if not turn:  # the first warms up
                for times in engine.times.values():
                    times.clear()
            for request in list(engine.core.requests.values()):
                engine.core._on_abort("r", request.key)
            engine._num_open = 0
            engine.run_until(lambda: engine.core.external.is_idle)
    quiet = median(engine.times["nothing"])
    return [
        Claim(
            f"{size}, a step of {NUM_STREAMS} decodes while {NUM_HITS} x {num_tokens} tokens {what} / with nothing else",
            median(engine.times[beside]) / quiet,
            LIMIT,
            "lower",
            {"ms": median(engine.times[beside]) * 1e3, "alone ms": quiet * 1e3, "steps": float(len(engine.times[beside]))},
        )
        for beside, what in (("loads", "are loaded"), ("saves", "are saved"))
        if engine.times[beside]
    ]


def _play(engine: BusyEngine, num_tokens: int) -> None:
    """Nothing, hits, nothing, saves."""
    for _ in range(30):
        engine.step()
    engine.forget()
    for prompt in engine.prompts:
        engine.submit(prompt, 1)
    engine.run_until(lambda: engine.is_alone)
    for _ in range(30):
        engine.step()
    for prompt in engine.fresh_prompts(num_tokens):
        engine.submit(prompt, 1)
    engine.run_until(lambda: engine.is_alone)
