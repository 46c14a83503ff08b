"""How much of the time in which KV leaves the card passes under a model's steps; a trace shows it."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from gzip import open as gzip_open
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import RESULTS, Claim
from pdkv.connectors.step_done import StepDone, make_step_done
from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.units import UnitPool
from pdkv.kernels.streams import streams_of

NUM_STEPS = 8
ROUNDS = 3
LEAST_SHARE = 0.8
TIMEOUT_S = 30.0
GATHER = "_copy_units_kernel"

Span = tuple[float, float]
"""Begin and end, in one unit."""


class Shape(NamedTuple):
    """A step's products, and the pool whose blocks it fills: (blocks, layers, 2, heads, 16, head size)."""

    num_tokens: int
    hidden: int
    num_products: int
    pool: tuple[int, ...]
    num_blocks: int  # that leave in a step


LARGE = Shape(2048, 4096, 64, (1024, 32, 2, 8, 16, 128), 64)
SMALL = Shape(16, 32, 4, (256, 2, 2, 2, 16, 8), 8)


def run(device: str, is_tiny: bool) -> Iterator[Claim]:
    """One claim. The trace lies beside the results, as gpu-DATE-transfer-trace.json.gz."""
    steps = Steps(torch.device(device), SMALL if is_tiny else LARGE)
    steps.run(computes=True, copies=True)  # kernels are compiled and chosen
    ways = {"both": (True, True), "compute": (True, False), "transfer": (False, True)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (computes, copies) in ways.items():
            times[name].append(steps.run(computes=computes, copies=copies))
    both, compute, transfer = (median(times[name]) for name in ways)
    hidden = min(max((compute + transfer - both) / transfer, 0.0), 1.0)
    figures = {f"{name} ms": median(each) * 1e3 for name, each in times.items()}
    figures |= trace(steps, device, None if is_tiny else RESULTS)
    yield Claim("time in which KV leaves that passes under compute", hidden, LEAST_SHARE, "higher", figures)


def trace(steps: "Steps", device: str, folder: Path | None) -> dict[str, float]:
    """Write the trace, and say what it has of the device; nothing where the profiler may not look at it."""
    with tempfile.TemporaryDirectory() as temporary:
        path = (folder or Path(temporary)) / f"gpu-{datetime.now(UTC).date()}-transfer-trace.json.gz"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        with profile(activities=activities) as profiler:
            steps.run(computes=True, copies=True)
        profiler.export_chrome_trace(str(path))
        compute, transfers = spans_of_trace(path)
    busy = sum(stop - start for start, stop in transfers)
    return {"under compute in the trace": under(transfers, compute) / busy} if busy else {}


class Steps:
    """Steps of products, each of which fills blocks that a thread then copies to the host, behind the step's event."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        self._device, self._shape = device, shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._pool = torch.zeros(shape.pool, dtype=dtype, device=device)
        self._units = UnitPool(self._pool)
        self._hidden = torch.randn(shape.num_tokens, shape.hidden, dtype=dtype, device=device)
        self._weight = torch.randn(shape.hidden, shape.hidden, dtype=dtype, device=device) * shape.hidden**-0.5
        size = shape.num_blocks * self._units.unit_bytes(self._units.whole)
        self._slab = streams_of(device).make_pinned(size).numpy()
        self._thread = ThreadPoolExecutor(1)

    def run(self, *, computes: bool, copies: bool) -> float:
        """All steps, and one more, under which the last one's KV leaves; or only a part of that. Returns seconds."""
        start, leaving = perf_counter(), []
        for number in range(NUM_STEPS + 1):
            if computes:
                self._compute(number)
            done = make_step_done(self._device)
            done.record()
            if copies and number < NUM_STEPS:
                leaving.append(self._thread.submit(self._copy, number, done))
        for copy in leaving:
            copy.result(TIMEOUT_S)
        done.wait(TIMEOUT_S)
        return perf_counter() - start

    def _blocks(self, number: int) -> range:
        first = number * self._shape.num_blocks
        return range(first, first + self._shape.num_blocks)

    def _compute(self, number: int) -> None:
        hidden = self._hidden
        for _ in range(self._shape.num_products):
            hidden = hidden @ self._weight
        blocks = self._blocks(number)
        self._pool[blocks.start : blocks.stop] = hidden.view(-1)[0]

    def _copy(self, number: int, done: StepDone) -> None:
        units, whole = as_ids(list(self._blocks(number))), self._units.whole
        self._units.gather(units, whole, self._slab, after=done, timeout_s=TIMEOUT_S)


def spans_of_trace(path: Path) -> tuple[list[Span], list[Span]]:
    """What the device computed, and when KV left it, in a chrome trace of torch's profiler: microseconds."""
    with gzip_open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    compute, transfers = [], []
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind in ("kernel", "gpu_memcpy"):
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if GATHER in name or "DtoH" in name:
                transfers.append(span)
            elif kind == "kernel":
                compute.append(span)
    return compute, transfers


def under(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """How much of `spans` lies under any of `others`."""
    merged: list[Span] = []
    for start, stop in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return sum(max(min(stop, s[1]) - max(start, s[0]), 0.0) for start, stop in spans for s in merged)
