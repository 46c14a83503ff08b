"""What the step thread pays beside the model: a decode engine's steps under each connector, and one long request.

CPU time of the thread, which says the same on a machine that others use, with a forward pass that computes nothing.
Connectors take turns, so that a slow phase of the machine falls on all of them.
"""

import gc
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch

from benchmarks.report import Claim, Context
from pdkv.config import HandoffConfig
from pdkv.connectors.base import NO_TRANSFERS, WorkerConnector
from pdkv.connectors.nixl.agent import load_bindings
from pdkv.engine.core import EngineCore
from pdkv.engine.intake import prepare
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.plan import SampledTokens, StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended, Executor
from pdkv.errors import ConfigError
from pdkv.testing.engine import make_core, submit
from pdkv.testing.standin import VOCAB_SIZE
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import EngineToRouter, HandedOff, Loaded, Peers, Release, Submit, Tokens

T = TypeVar("T")
P = ParamSpec("P")

BLOCK_SIZE = 16
LAYOUT = KVLayout(1, 1, 8, BLOCK_SIZE, "bfloat16", 2)
LONG_TOKENS = 131_072
RATIO_LIMIT = 1.1
LIMIT_MS = 2.0
WAIT_S = 6.0

CONNECTORS: Mapping[str, tuple[str, Mapping[str, str]] | None] = {
    "none": None,
    "shared_memory": ("shared_memory", {}),
    "nixl pull": ("nixl", {}),
    "nixl push": ("nixl", {"mode": "push"}),
    "p2p": ("p2p", {}),
    "store": ("store", {"url": "memory://step-thread"}),
    "multi": ("multi", {"connectors": "shared_memory,p2p"}),
}


class DrawsOnly(Executor):
    """Computes nothing and draws the same token for everybody; the connector's worker side is a real one."""

    def __init__(self, worker: WorkerConnector | None, pool: torch.Tensor | None, num_blocks: int) -> None:
        self._worker = worker
        if worker is not None:
            self._kv_cache = torch.zeros(LAYOUT.pool_shape(num_blocks), dtype=torch.bfloat16) if pool is None else pool
            worker.register_kv_caches(self._kv_cache)

    def execute(self, plan: StepPlan) -> StepOutput:
        worker, meta = self._worker, plan.kv_meta
        transfers = NO_TRANSFERS
        if worker is not None and meta is not None:
            for cancel in plan.cancels:
                worker.cancel(*cancel)
            worker.start_load_kv(meta)
            for layer in range(self._kv_cache.shape[1] if meta.needs_layer_hooks else 0):
                worker.wait_for_layer_load(layer)
                worker.save_kv_layer(layer, self._kv_cache, meta)
            worker.wait_for_save()
            transfers = worker.get_finished()
        sampled = {share.key: SampledTokens([7], None) for share in plan.scheduled if share.samples}
        return StepOutput(plan.step_id, sampled, {}, transfers)

    def take_finished(self) -> Ended:
        return NOTHING_ENDED if self._worker is None else Ended(self._worker.get_finished())

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        if self._worker is not None:
            self._worker.update_peers(added, removed)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()


@contextmanager
def engine(
    connector: tuple[str, Mapping[str, str]] | None, num_blocks: int, *, max_tokens: int, batch: int, **fields: Any
) -> Iterator[EngineCore]:
    """An engine that computes nothing, made by `make_core(**fields)`.

    Args:
        connector: its name and its options; None: it has none.
        max_tokens: of one step.
        batch: requests of one step.
    """
    kind, options = connector or ("memory", None)
    core = make_core(
        name=f"step-thread-{secrets.token_hex(4)}", num_blocks=num_blocks, layout=LAYOUT, kv_checksum="on",
        limits=SchedulerLimits(batch, max_tokens), handoff=HandoffConfig(connector=kind), connector=kind,
        options=options, executor=lambda worker, pool: DrawsOnly(worker, pool, num_blocks), **fields,
    )  # fmt: skip
    try:
        yield core
    finally:
        core.shutdown()


def cpu_ms(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    """Milliseconds of this thread's CPU time."""
    before = time.thread_time_ns()
    work(*args, **kwargs)
    return (time.thread_time_ns() - before) / 1e6


def run(context: Context) -> list[Claim]:
    """One claim per connector, and one for the long request."""
    return [*decode_steps(context.quick), *long_request(context.quick)]


# --- a decode engine's steps --------------------------------------------------------------------------------------


def decode_steps(quick: bool) -> list[Claim]:
    """256 requests of 512 blocks each decode; the connector is there, and none of them is its business."""
    num_requests, num_blocks, steps, rounds = (8, 32, 4, 2) if quick else (256, 512, 32, 9)
    names = [name for name in CONNECTORS if not name.startswith("nixl") or has_nixl()]
    generator = random.Random(0)
    prompts = [
        generator.choices(range(VOCAB_SIZE), k=(num_blocks - 1) * BLOCK_SIZE - i % BLOCK_SIZE)
        for i in range(num_requests)
    ]
    took: dict[str, list[float]] = {name: [] for name in names}
    news = {name: threading.Event() for name in names}
    with ExitStack() as stack:
        cores = {
            name: stack.enter_context(
                engine(
                    CONNECTORS[name],
                    num_requests * (num_blocks + 128),
                    max_tokens=65_536,
                    batch=num_requests,
                    notify=news[name].set,
                )
            )
            for name in names
        }
        for name, core in cores.items():
            _fill(core, prompts, 128 * BLOCK_SIZE, news[name])
        gc.collect()
        gc.freeze()  # as engines do when they have started
        gc.disable()
        stack.callback(gc.enable)
        for _ in range(rounds):
            for name, core in cores.items():
                for _ in range(steps):
                    took[name].append(cpu_ms(_step, core))
        for core in cores.values():
            assert len(core.scheduler.running) == num_requests, "all of them decode until the last step"
    return [_ratio(name, took) for name in names if name != "none"]


def has_nixl() -> bool:
    """Whether the package is there."""
    try:
        load_bindings()
    except ConfigError:
        return False
    return True


def _fill(core: EngineCore, prompts: Sequence[list[int]], max_tokens: int, news: threading.Event) -> None:
    """All prompts are computed, and what they owe to others is sent.

    Where a prompt waits for the connector's answer, the others take no step: their tokens must last.
    """
    for i, prompt in enumerate(prompts):
        core.handle("r", submit(prompt, request_id=f"q{i}", max_tokens=max_tokens), time.monotonic())
    for _ in range(1000):
        news.clear()
        _step(core)
        is_computed = not core.scheduler.waiting and all(r.output_token_ids for r in core.scheduler.running)
        if is_computed and core.external.is_idle:
            return
        if all(r.output_token_ids for r in core.scheduler.running):
            news.wait(1.0)
    raise AssertionError("the prompts are never computed, or never sent")


def _step(core: EngineCore) -> None:
    now = time.monotonic()
    core.step(now)
    core.take_messages(now)


def _ratio(name: str, took: Mapping[str, Sequence[float]]) -> Claim:
    figures = {}
    for who in ("none", name):
        lower, middle, upper = quantiles(took[who])
        figures |= {f"{who} ms": middle, f"{who} lower quartile ms": lower, f"{who} upper quartile ms": upper}
    return Claim(
        f"decode step, 256 requests of 512 blocks, {name} / none",
        figures[f"{name} ms"] / figures["none ms"],
        RATIO_LIMIT,
        "lower",
        figures,
    )


# --- one long request ---------------------------------------------------------------------------------------------


class _Timed:
    """CPU time of what the step threads of two engines do, by name: in each round the longest, then the median."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def begin(self) -> None:
        """A new round."""
        self.rounds.append({})

    def __call__(self, name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        before = time.thread_time_ns()
        result = work(*args, **kwargs)
        took = (time.thread_time_ns() - before) / 1e6
        self.rounds[-1][name] = max(self.rounds[-1].get(name, 0.0), took)
        return result

    def figures(self) -> dict[str, float]:
        """Medians, in ms."""
        return {f"{name} ms": median(r.get(name, 0.0) for r in self.rounds) for name in self.rounds[0]}


def long_request(quick: bool) -> list[Claim]:
    """A prompt of 131k tokens is computed and handed off, pulled, found again; its blocks lie all over the pools."""
    num_tokens, rounds = (2_048, 2) if quick else (LONG_TOKENS, 7)
    num_blocks = 3 * num_tokens // BLOCK_SIZE
    generator = random.Random(1)
    timed = _Timed()
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(engine(CONNECTORS["shared_memory"], num_blocks, max_tokens=8192, batch=8))
            for _ in range(2)
        )
        prefill.handle("r", Peers([decode.card]), 0.0)
        decode.handle("r", Peers([prefill.card]), 0.0)
        for core in (prefill, decode):
            scatter(core.scheduler.kv.pool, generator)
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for number in range(rounds):
            timed.begin()
            prompt = generator.choices(range(VOCAB_SIZE), k=num_tokens)
            _hand_over(timed, prefill, decode, f"a{number}", prompt)
            _steps(timed, "found again", decode, submit(prompt, request_id=f"b{number}", max_tokens=1))
    figures = timed.figures()
    longest = max(figures, key=figures.__getitem__)
    return [
        Claim(
            f"a request of {num_tokens} tokens, its longest part on the step thread: {longest[:-3]} / 2 ms",
            figures[longest] / LIMIT_MS, 1.0, "lower", figures,
        )
    ]  # fmt: skip


def scatter(pool: BlockPool, generator: random.Random) -> None:
    """The next blocks to be taken come in no order."""
    block_ids = pool.allocate(pool.num_blocks)
    assert block_ids is not None
    shuffled = [int(block_id) for block_id in block_ids]
    generator.shuffle(shuffled)
    pool.release(shuffled, Holder.ACTIVE)


def _hand_over(timed: _Timed, prefill: EngineCore, decode: EngineCore, name: str, prompt: list[int]) -> None:
    request = submit(prompt, request_id=name, max_tokens=2)
    asked = msgspec.structs.replace(request, until="first_token", kv="handoff")
    messages = _steps(timed, "computed", prefill, asked)
    handoff = next(m for m in messages if isinstance(m, HandedOff)).handoff
    token_ids = [i for m in messages if isinstance(m, Tokens) for i in m.token_ids]
    asked = msgspec.structs.replace(request, kv="await_peer", output_token_ids=token_ids, handoff=handoff)
    messages = _steps(timed, "pulled", decode, asked)
    assert [m.ok for m in messages if isinstance(m, Loaded)] == [True]
    timed("released", prefill.handle, "r", Release(request.transfer_id, 0), time.monotonic())


def _steps(timed: _Timed, name: str, core: EngineCore, asked: Submit) -> list[EngineToRouter]:
    """Run one request to its end, and until all of it is in the cache."""
    took: list[EngineToRouter] = []
    prepared = prepare(core.card, asked)  # by the intake's thread
    timed(f"{name}: submit", core.handle, "r", asked, time.monotonic(), prepared)
    deadline = time.monotonic() + WAIT_S
    while core.requests or core.has_work:
        now = time.monotonic()
        assert now < deadline, f"request {asked.request_id} does not end"
        core.expire(now)
        core.scheduler.queues.needs_step = False
        plan = timed(f"{name}: schedule", core.scheduler.schedule, now)
        output = timed(f"{name}: connector", core.executor.execute, plan)
        timed(f"{name}: update", core.finish_step, output, now)
        for _, messages in timed(f"{name}: messages", core.take_messages, now):
            took += messages
    return took
