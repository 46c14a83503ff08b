"""What a hand-off of 4,096 tokens costs the step threads of its two engines, beside what a request costs anyway.

CPU time of the thread from the messages that begin it to the last step that it brings about, less that of the same
request where nothing is handed off: 4,096 tokens of prompt, computed and kept, and one token drawn. The model computes
nothing, its layers only call the connector. Connectors and the engine without one take turns.
"""

import gc
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import ParamSpec, TypeVar

import msgspec

from benchmarks.report import Claim, Context
from benchmarks.step_thread import BLOCK_SIZE, CONNECTORS, VOCAB_SIZE, WAIT_S, engine, has_nixl, scatter, submit
from pdkv.connectors.base import TransferKey
from pdkv.engine.core import EngineCore
from pdkv.engine.intake import prepare
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import (
    Allocated,
    Continue,
    EngineToRouter,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Peers,
    Release,
    RouterToEngine,
    Submit,
    Tokens,
)

T = TypeVar("T")
P = ParamSpec("P")

NUM_TOKENS = 4096
LIMIT_MS = 0.3
LAYOUT = KVLayout(
    16, 2, 32, BLOCK_SIZE, "bfloat16", 2
)  # 16 MiB: enough to be pushed in as many parts as there ever are
STEP_TOKENS = 8192
NUM_BLOCKS = 3 * NUM_TOKENS // BLOCK_SIZE


class Stepped:
    """An engine, stepped here as its own loop would, and the CPU time that this takes."""

    def __init__(self, core: EngineCore, news: threading.Event) -> None:
        self.core = core
        self.cpu_ms = 0.0
        self.num_steps = 0
        self._news = news

    def tell(self, *messages: RouterToEngine) -> None:
        """Messages that arrive together."""
        for message in messages:
            prepared = prepare(self.core.card, message) if isinstance(message, Submit) else None  # not the step thread
            self._count(self.core.handle, "r", message, time.monotonic(), prepared)

    def run(self) -> list[EngineToRouter]:
        """Steps until nothing is to be done without news."""
        sent: list[EngineToRouter] = []
        while True:
            if self._news.is_set():
                self._news.clear()
                sent += self._count(self._wake)
            if not self.core.has_work:
                return sent
            self.num_steps += 1
            sent += self._count(self._step)

    def run_until(
        self, is_over: Callable[[list[EngineToRouter]], bool], other: "Stepped | None" = None
    ) -> list[EngineToRouter]:
        """`run`, and wait for news, until the messages so far say that it is over; so does the other one meanwhile."""
        sent = self.run()
        deadline = time.monotonic() + WAIT_S
        while not is_over(sent):
            assert time.monotonic() < deadline, f"it does not end: {sent}"
            self._news.wait(1e-3)
            told = other.run() if other is not None else []
            self.tell(*_find(told, KVReady))
            sent += self.run()
        return sent

    def _step(self) -> list[EngineToRouter]:
        now = time.monotonic()
        self.core.step(now)
        return self._take(now)

    def _wake(self) -> list[EngineToRouter]:
        self.core.wake()
        return self._take(time.monotonic())

    def _take(self, now: float) -> list[EngineToRouter]:
        return [message for _, messages in self.core.take_messages(now) for message in messages]

    def _count(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        before = time.thread_time_ns()
        result = work(*args, **kwargs)
        self.cpu_ms += (time.thread_time_ns() - before) / 1e6
        return result


class Pair:
    """Two engines with one connector; they hand requests over one after the other."""

    def __init__(self, name: str, stack: ExitStack, generator: random.Random) -> None:
        self.name = name
        made = []
        for _ in range(2):
            news = threading.Event()
            core = stack.enter_context(
                engine(CONNECTORS[name], NUM_BLOCKS, max_tokens=STEP_TOKENS, batch=8, layout=LAYOUT, notify=news.set)
            )
            scatter(core.scheduler.kv.pool, generator)
            made.append(Stepped(core, news))
        self.source, self.reader = made
        self.kind = self.source.core.card.kind
        if CONNECTORS[name] is not None:
            for one, other in ((self.source, self.reader), (self.reader, self.source)):
                one.tell(Peers([other.core.card]))
                one.run()

    def hand_over(self, name: str, prompt: list[int]) -> tuple[float, float]:
        """CPU time of the source's step thread and of the reader's, in ms."""
        source, reader = self.source, self.reader
        source.cpu_ms = reader.cpu_ms = 0.0
        request = submit(name, prompt, 2)
        if CONNECTORS[self.name] is None:
            self._compute(request)
        elif self.kind == "push":
            self._push(request)
        else:
            self._pull(request)
        source.run_until(lambda _: source.core.external.is_idle, reader)
        reader.run_until(lambda _: reader.core.external.is_idle, source)
        return source.cpu_ms, reader.cpu_ms

    def _compute(self, request: Submit) -> None:
        self.source.tell(msgspec.structs.replace(request, params=submit("", [], 1).params))
        self.source.run()
        self.reader.tell(msgspec.structs.replace(request, output_token_ids=[7]))
        self.reader.run()

    def _pull(self, request: Submit) -> None:
        self.source.tell(msgspec.structs.replace(request, until="first_token", kv="handoff"))
        sent = self.source.run_until(lambda told: bool(_find(told, HandedOff)))
        (handed_off,) = _find(sent, HandedOff)
        output = _tokens(sent)
        asked = msgspec.structs.replace(request, kv="await_peer", output_token_ids=output, handoff=handed_off.handoff)
        self.reader.tell(asked, *_find(sent, KVReady))
        self.reader.run_until(lambda told: bool(_find(told, Finished)), self.source)
        self.source.tell(Release(request.transfer_id, 0))

    def _push(self, request: Submit) -> None:
        self.reader.tell(msgspec.structs.replace(request, kv="await_peer"))
        (allocated,) = _find(self.reader.run(), Allocated)
        self.source.tell(
            msgspec.structs.replace(request, until="first_token", kv="handoff"),
            KVTicket(request.request_id, 0, allocated.ticket or b""),
        )
        self.reader.tell(Continue(request.request_id, 0, _tokens(self.source.run())))
        self.reader.run_until(lambda told: bool(_find(told, Finished)), self.source)
        key = TransferKey(request.transfer_id, 0)  # the source hears that all is sent when the reader has it
        self.source.run_until(lambda _: not self.source.core.external.has_saves(key))
        self.source.tell(Release(*key[:2]))


def _find(messages: Sequence[EngineToRouter], kind: type[T]) -> list[T]:
    return [message for message in messages if isinstance(message, kind)]


def _tokens(messages: Sequence[EngineToRouter]) -> list[int]:
    return [token_id for message in _find(messages, Tokens) for token_id in message.token_ids]


def run(context: Context) -> list[Claim]:
    """One claim per connector: the dearer of its two engines."""
    rounds = 3 if context.quick else 25
    names = [name for name in CONNECTORS if not name.startswith("nixl") or has_nixl()]
    generator = random.Random(2)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        pairs = [Pair(name, stack, generator) for name in names]
        gc.collect()
        gc.freeze()  # as engines do when they have started
        for number in range(rounds + 2):
            for pair in pairs:
                prompt = generator.choices(range(VOCAB_SIZE), k=NUM_TOKENS)
                times = pair.hand_over(f"{pair.name}-{number}", prompt)
                if number >= 2:
                    took[pair.name].append(times)
    return [_claim(name, took) for name in names if name != "none"]


def _claim(name: str, took: Mapping[str, Sequence[tuple[float, float]]]) -> Claim:
    figures = {}
    for index, who in enumerate(("source", "reader")):
        plain = median(times[index] for times in took["none"])
        lower, middle, upper = quantiles(times[index] - plain for times in took[name])
        figures |= {f"{who} ms": middle, f"{who} from": lower, f"{who} to": upper, f"{who} without ms": plain}
    most = max(figures["source ms"], figures["reader ms"])
    return Claim(
        f"step thread, a transfer of {NUM_TOKENS} tokens, {name} / {LIMIT_MS} ms",
        most / LIMIT_MS,
        1.0,
        "lower",
        figures,
    )
