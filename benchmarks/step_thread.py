"""What the step thread pays beside the model: a decode engine's steps under each connector.

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
from statistics import quantiles
from typing import Any, ParamSpec

import torch

from benchmarks.report import Claim, Context
from pdkv.config import HandoffConfig
from pdkv.connectors.base import NO_TRANSFERS, WorkerConnector
from pdkv.connectors.nixl.agent import load_bindings
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import SampledTokens, StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended, Executor
from pdkv.errors import ConfigError
from pdkv.testing.engine import make_core, submit
from pdkv.testing.standin import VOCAB_SIZE
from pdkv.wire.kv import EngineCard, KVLayout

P = ParamSpec("P")

BLOCK_SIZE = 16
LAYOUT = KVLayout(1, 1, 8, BLOCK_SIZE, "bfloat16", 2)
RATIO_LIMIT = 1.1

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
    """256 requests of 512 blocks each decode; the connector is there, and none of them is its business."""
    quick = context.quick
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
