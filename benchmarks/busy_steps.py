"""What loads and saves cost the steps beside them: an engine decodes while hits come in and saves leave.

The engine is stepped here, on one thread of two. Loads: rounds take turns between steps with nothing else, steps that
compute a token behind a hit in the engine's own pool, and steps while the KV of eight prompts is loaded; these are
compared with steps that computed as many tokens. Saves: the same prompts are computed beside the same streams by this
engine and by one without a store.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.engine.core import EngineCore
from pdkv.testing.engine import InProcessEngine, of_type, submit
from pdkv.wire.messages import Abort, Finished, RouterToEngine
from pdkv.wire.tiers import CacheOrder

NUM_STREAMS = 8
STREAM_CONTEXT = 256
NUM_PROMPTS = 8
HIT_TOKENS, SAVED_TOKENS = 4096, 1024
VOCABULARY = 4096
QUIET_STEPS = 20
STREAM_LEN = 2000  # never reached
LIMIT = 1.05
WAIT_S = 120.0


class Step(NamedTuple):
    """One step of an engine."""

    num_tokens: int  # that it computed
    seconds: float
    is_loading: bool  # from before its beginning


class BusyEngine(InProcessEngine):
    """An aggregated engine over host memory, or over nothing; the benchmark says when it takes a step."""

    def __init__(self, build: Callable[[Callable[[], None]], EngineCore]) -> None:
        super().__init__(build)
        self.steps: list[Step] = []
        self.num_open = 0  # requests
        self._rng = random.Random(5)
        self._number = 0

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """New prompts."""
        return [self._rng.choices(range(3, VOCABULARY), k=num_tokens) for _ in range(NUM_PROMPTS)]

    def order(self, message: RouterToEngine) -> None:
        """Something that the next steps do."""
        self.core.handle("r", message, self.clock.now())

    def want(self, prompts: list[list[int]], num_output: int) -> None:
        """So many tokens behind each, of the next steps."""
        for prompt in prompts:
            self._number += 1
            self.order(submit(prompt, request_id=f"r{self._number}", max_tokens=num_output))
            self.num_open += 1

    def step_until(self, is_over: Callable[[], bool]) -> None:
        """A step, and more until it is over."""
        deadline = time.monotonic() + WAIT_S
        self.step()
        while not is_over():
            assert time.monotonic() < deadline, "it does not end"
            self.step()

    def step(self) -> None:
        """One step."""
        if self._is_woken:
            self._is_woken = False
            self.core.wake()
        is_loading = bool(self.core.external.loads)
        began = time.perf_counter()
        self.core.settle_finished()
        plan = self.core.plan_step(self.clock.now())
        self.core.finish_step(self.core.executor.execute(plan), self.clock.now())
        seconds = time.perf_counter() - began
        for _, messages in self.core.take_messages(self.clock.now()):
            self.num_open -= len(of_type(messages, Finished))
        if plan.num_tokens:
            self.steps.append(Step(plan.num_tokens, seconds, is_loading))

    @property
    def has_streams_only(self) -> bool:
        """Whether nothing else is under way: the last step drew a token of each stream."""
        is_quiet = self.num_open == NUM_STREAMS and self.core.external.is_idle
        return is_quiet and bool(self.steps) and self.steps[-1].num_tokens == NUM_STREAMS

    def start_streams(self) -> None:
        """Eight requests decode, and nothing else happens."""
        self.steps.clear()
        self.want(self.prompts(STREAM_CONTEXT), STREAM_LEN)
        self.step_until(lambda: self.has_streams_only)
        self.steps.clear()

    def end_streams(self) -> None:
        """Nothing is left."""
        for key in list(self.core.requests):
            self.order(Abort(*key))
        self.num_open = 0
        self.step_until(lambda: self.core.external.is_idle)


@contextmanager
def _engine(model: Path, *, has_store: bool) -> Iterator[BusyEngine]:
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as directory:
        options = {"url": f"host://{directory}/kv?capacity=4GiB"}
        engine = BusyEngine.of_model(
            model, "store" if has_store else "", options, threads=1, kv_cache_memory=2 << 30, max_num_seqs=64
        )
        with closing(engine):
            yield engine


def run(context: Context) -> list[Claim]:
    """Median step beside loads / beside none; steps with prompts that are saved / that are not."""
    size, rounds = ("tiny", 1) if context.quick else ("mid", 3)
    num_hit, num_saved = (512, 256) if context.quick else (HIT_TOKENS, SAVED_TOKENS)
    model = find_model(context.models, size)
    with _engine(model, has_store=True) as engine:
        loads = _measure_loads(engine, num_hit, rounds)
        with _engine(model, has_store=False) as other:
            saves = _measure_saves(engine, other, num_saved, rounds)
    beside = f"{size}, steps of {NUM_STREAMS} decodes"
    return [
        Claim(f"{beside} while {NUM_PROMPTS} x {num_hit} tokens are loaded / not", *loads),
        Claim(f"{beside} and of {NUM_PROMPTS} x {num_saved} tokens that are saved / not", *saves),
    ]


Found = tuple[float, float, Literal["lower"], dict[str, float]]


def _measure_loads(engine: BusyEngine, num_tokens: int, rounds: int) -> Found:
    stored = [[*prompt, 7] for prompt in engine.prompts(num_tokens)]  # a token is computed behind the hit
    engine.want(stored, 1)
    engine.step_until(lambda: not engine.num_open and engine.core.external.is_idle)
    alone: list[Step] = []
    took: list[Step] = []
    for turn in range(rounds + 1):
        engine.start_streams()
        for prompt in stored:
            for _ in range(QUIET_STEPS // NUM_PROMPTS):
                engine.step()
            engine.want([prompt], 1)
            engine.step_until(lambda: engine.has_streams_only)
        quiet = [step for step in engine.steps if not step.is_loading]
        engine.order(CacheOrder(order_id="forget", action="clear", tier="pool"))
        engine.steps.clear()
        engine.want(stored, 1)
        engine.step_until(lambda: engine.has_streams_only)
        if turn:  # the first warms up
            alone += quiet
            took += [step for step in engine.steps if step.is_loading]
        engine.end_streams()
    normal = _normal(alone)
    ratios = _ratios(took, normal)
    figures = {"ms": median(step.seconds for step in took) * 1e3, "alone ms": normal[NUM_STREAMS] * 1e3}
    return median(ratios), LIMIT, "lower", figures | {"steps": float(len(ratios))}


def _measure_saves(engine: BusyEngine, other: BusyEngine, num_tokens: int, rounds: int) -> Found:
    took: dict[BusyEngine, list[Step]] = {engine: [], other: []}
    for turn in range(rounds + 1):
        prompts = engine.prompts(num_tokens)
        for each in (engine, other) if turn % 2 else (other, engine):
            each.start_streams()
            each.want(prompts, 1)
            each.step_until(lambda each=each: each.has_streams_only)
            if turn:
                took[each] += each.steps
            each.end_streams()
    ratios = _ratios(took[engine], _normal(took[other]))
    sums = [sum(step.seconds for step in steps) for steps in took.values()]
    figures = {"s": sums[0], "without s": sums[1], "steps": float(len(ratios))}
    return median(ratios), LIMIT, "lower", figures


def _normal(steps: Iterable[Step]) -> dict[int, float]:
    """Seconds of a step, by the tokens that it computes."""
    seconds: dict[int, list[float]] = {}
    for step in steps:
        seconds.setdefault(step.num_tokens, []).append(step.seconds)
    return {num_tokens: median(each) for num_tokens, each in seconds.items()}


def _ratios(steps: Sequence[Step], normal: Mapping[int, float]) -> list[float]:
    """Each step's time, as a part of that of a normal one that computes as many tokens.

    Raises:
        RuntimeError: there is none.
    """
    ratios = [step.seconds / normal[step.num_tokens] for step in steps if step.num_tokens in normal]
    if not ratios:
        raise RuntimeError(f"no step of {len(steps)} could be compared")
    return ratios
