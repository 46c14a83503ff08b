"""What a hand-off of 4,096 tokens costs the step threads of its two engines, beside what a request costs anyway.

CPU time of the thread from the messages that begin it to the last step that it brings about, less that of the same
request where nothing is handed off: 4,096 tokens of prompt, computed and kept, and one token drawn. The model computes
nothing, its layers only call the connector. Connectors and the engine without one take turns.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from statistics import median, quantiles
from typing import Any

from msgspec.structs import replace

from benchmarks.report import Claim, Context
from benchmarks.step_thread import BLOCK_SIZE, CONNECTORS, VOCAB_SIZE, engine, has_nixl, scatter, submit
from pdkv.connector_kit.bench.turns import take_turns
from pdkv.engine.core import EngineCore
from pdkv.engine.intake import prepare
from pdkv.testing.engine import InProcessEngine, SideBySide
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import RouterToEngine, Submit

NUM_TOKENS = 4096
LIMIT_MS = 0.3
LAYOUT = KVLayout(
    16, 2, 32, BLOCK_SIZE, "bfloat16", 2
)  # 16 MiB: enough to be pushed in as many parts as there ever are
STEP_TOKENS = 8192
NUM_BLOCKS = 3 * NUM_TOKENS // BLOCK_SIZE


class Stepped(InProcessEngine):
    """An engine, stepped here as its own loop would, and the CPU time that its core takes."""

    def __init__(self, build: Callable[[Callable[[], None]], EngineCore]) -> None:
        super().__init__(build)
        self.cpu_ms = 0.0
        core: Any = self.core
        handle = self._counted(core.handle)

        def handle_prepared(router: str, message: RouterToEngine, now: float) -> None:
            prepared = prepare(core.card, message) if isinstance(message, Submit) else None  # not the step thread
            handle(router, message, now, prepared)

        core.handle = handle_prepared
        core.scheduler.kv.pool.check_integrity = lambda: None  # it would empty the caches between two steps
        for name in ("wake", "step", "take_messages"):
            setattr(core, name, self._counted(getattr(core, name)))

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before = time.thread_time_ns()
            result = work(*args)
            self.cpu_ms += (time.thread_time_ns() - before) / 1e6
            return result

        return run


class Pair:
    """Two engines with one connector, or without; they hand requests over one after the other."""

    def __init__(self, name: str, stack: ExitStack, generator: random.Random) -> None:
        self._name = name
        self._generator = generator
        self._numbers = count()
        make = partial(engine, CONNECTORS[name], NUM_BLOCKS, max_tokens=STEP_TOKENS, batch=8, layout=LAYOUT)
        self._engines = [Stepped(lambda notify: stack.enter_context(make(notify=notify))) for _ in range(2)]
        for each in self._engines:
            scatter(each.core.scheduler.kv.pool, generator)
        self._pair = None if CONNECTORS[name] is None else SideBySide(*self._engines)

    def hand_over(self) -> tuple[float, float]:
        """CPU time of the source's step thread and of the reader's, in ms."""
        source, reader = self._engines
        source.cpu_ms = reader.cpu_ms = 0.0
        prompt = self._generator.choices(range(VOCAB_SIZE), k=NUM_TOKENS)
        request = submit(f"{self._name}-{next(self._numbers)}", prompt, 2)
        if self._pair is not None:
            self._pair.hand_over(request)
        else:
            source.ask(replace(request, params=submit("", [], 1).params))
            reader.ask(replace(request, output_token_ids=[7]))
        return source.cpu_ms, reader.cpu_ms


def run(context: Context) -> list[Claim]:
    """One claim per connector: the dearer of its two engines."""
    names = [name for name in CONNECTORS if not name.startswith("nixl") or has_nixl()]
    generator = random.Random(2)
    with ExitStack() as stack:
        pairs = {name: Pair(name, stack, generator) for name in names}
        gc.collect()
        gc.freeze()  # as engines do when they have started
        took = take_turns({name: pair.hand_over for name, pair in pairs.items()}, 3 if context.quick else 25, warm=2)
    return [_claim(name, took) for name in names if name != "none"]


def _claim(name: str, took: Mapping[str, Sequence[tuple[float, float]]]) -> Claim:
    figures = {}
    for index, who in enumerate(("source", "reader")):
        plain = median(times[index] for times in took["none"])
        lower, middle, upper = quantiles(times[index] - plain for times in took[name])
        figures |= {f"{who} ms": middle, f"{who} from": lower, f"{who} to": upper, f"{who} without ms": plain}
    most = max(figures["source ms"], figures["reader ms"])
    title = f"step thread, a transfer of {NUM_TOKENS} tokens, {name} / {LIMIT_MS} ms"
    return Claim(title, most / LIMIT_MS, 1.0, "lower", figures)
