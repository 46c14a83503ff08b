"""What loads and saves cost the steps beside them: decodes of one engine while hits come in and saves leave.

The engine is stepped here. Rounds take turns between steps with nothing else, steps while the KV of eight prompts is
loaded, and steps while that of eight prompts is saved; steps that compute prompts do not count.
"""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.build_engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import Abort, CacheOrder, Finished, RouterToEngine, Submit

NUM_STREAMS = 8
STREAM_CONTEXT = 256
NUM_PROMPTS = 8
HIT_TOKENS, SAVED_TOKENS = 4096, 1024
VOCABULARY = 4096
QUIET_STEPS = 20
STREAM_LEN = 2000  # never reached
LIMIT = 1.05
WAIT_S = 120.0

Beside = Literal["nothing", "loads", "saves"]


class BusyEngine:
    """An aggregated engine over host memory; times of its steps by what went on beside them."""

    def __init__(self, model: Path, directory: str) -> None:
        self.times: dict[Beside, list[float]] = {"nothing": [], "loads": [], "saves": []}
        self.num_open = 0  # requests
        self._woken = threading.Event()
        self._rng = random.Random(5)
        self._number = 0
        config = EngineConfig(model=model, device="cpu", threads=1, kv_cache_memory=2 << 30, max_num_seqs=64)
        options = {"url": f"host://{directory}/kv?capacity=4GiB", "max_save_bytes": "1GiB"}
        handoff = HandoffConfig(connector="store", connector_config=options)
        self.core: EngineCore = build_engine(config, handoff, name="busy", epoch="1", notify=self._woken.set)
        self.core.router_joined("r", "1")

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """Prompts that nobody has seen."""
        return [self._rng.choices(range(3, VOCABULARY), k=num_tokens) for _ in range(NUM_PROMPTS)]

    def ask(self, prompts: list[list[int]], num_output: int) -> None:
        """For so many tokens behind each."""
        for prompt in prompts:
            self._number += 1
            params = SamplingParams(max_tokens=num_output, temperature=0.0, seed=0, ignore_eos=True)
            submit = Submit(
                request_id=f"r{self._number}", transfer_id=f"t{self._number}", attempt=0, prompt_token_ids=prompt,
                params=params,
            )  # fmt: skip
            self.core.handle("r", submit, time.monotonic())
            self.num_open += 1

    def order(self, message: RouterToEngine) -> None:
        """Something that the next steps do."""
        self.core.handle("r", message, time.monotonic())

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """A step, and more until it is over."""
        deadline = time.monotonic() + WAIT_S
        self.step()
        while not is_over():
            assert time.monotonic() < deadline, "it does not end"
            self.step()

    def step(self) -> None:
        """One step; its time counts where it computes a token of each stream and nothing else."""
        if self._woken.is_set():
            self._woken.clear()
            self.core.wake()
        external = self.core.external
        beside: Beside = "loads" if external.loads else "nothing" if external.is_idle else "saves"
        began = time.perf_counter()
        self.core.settle_finished()
        plan = self.core.plan_step(time.monotonic())
        self.core.finish_step(self.core.executor.execute(plan), time.monotonic())
        seconds = time.perf_counter() - began
        for _, messages in self.core.take_messages(time.monotonic()):
            self.num_open -= sum(isinstance(message, Finished) for message in messages)
        if plan.num_tokens == len(plan.scheduled) == NUM_STREAMS:
            self.times[beside].append(seconds)

    @property
    def has_streams_only(self) -> bool:
        """Whether nothing else is under way."""
        return self.num_open == NUM_STREAMS and self.core.external.is_idle


@contextmanager
def _engine(model: Path) -> Iterator[BusyEngine]:
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as directory:
        engine = BusyEngine(model, directory)
        try:
            yield engine
        finally:
            engine.core.shutdown()


def run(context: Context) -> list[Claim]:
    """Median step beside loads, and beside saves, over that beside nothing."""
    size, rounds = ("tiny", 1) if context.quick else ("mid", 6)
    num_hit, num_saved = (512, 256) if context.quick else (HIT_TOKENS, SAVED_TOKENS)
    with _engine(find_model(context.models, size)) as engine:
        stored = [[*prompt, 7] for prompt in engine.prompts(num_hit)]  # a token is computed behind the hit
        engine.ask(stored, 1)
        engine.run_until(lambda: not engine.num_open and engine.core.external.is_idle)
        for turn in range(rounds + 1):
            if turn == 1:  # the first warms up
                for times in engine.times.values():
                    times.clear()
            _play(engine, stored, num_saved)
        quiet = median(engine.times["nothing"])
        loaded, saved = f"{num_hit} tokens are loaded", f"{num_saved} tokens are saved"
        claims = [(loaded, engine.times["loads"]), (saved, engine.times["saves"])]
    if not all(times for _, times in claims):
        raise RuntimeError(f"no step was beside them: {', '.join(what for what, times in claims if not times)}")
    return [_claim(size, times, quiet, what) for what, times in claims]


def _play(engine: BusyEngine, stored: list[list[int]], num_saved: int) -> None:
    """Streams, and beside them nothing, hits, nothing and saves."""
    engine.ask(engine.prompts(STREAM_CONTEXT), STREAM_LEN)
    engine.run_until(lambda: engine.has_streams_only)
    for prompts in (stored, engine.prompts(num_saved)):
        for _ in range(QUIET_STEPS):
            engine.step()
        engine.order(CacheOrder(order_id="forget", action="clear", tier="pool"))
        engine.ask(prompts, 1)
        engine.run_until(lambda: engine.has_streams_only)
    for key in list(engine.core.requests):
        engine.order(Abort(*key))
    engine.num_open = 0
    engine.run_until(lambda: engine.core.external.is_idle)


def _claim(size: str, times: list[float], quiet_s: float, what: str) -> Claim:
    figures = {"ms": median(times) * 1e3, "alone ms": quiet_s * 1e3, "steps": float(len(times))}
    title = f"{size}, a step of {NUM_STREAMS} decodes while {NUM_PROMPTS} x {what} / beside nothing"
    return Claim(title, median(times) / quiet_s, LIMIT, "lower", figures)
