"""How long a device waits for its host while an engine decodes, in a trace of what the device does."""

import json
from collections.abc import Callable
from gzip import open as gzip_open
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Claim
from pdkv import LLM, SamplingParams

Span = tuple[float, float]
"""Begin and end, in microseconds."""

BATCHES = (64, 512)

LIMIT = 0.02
"""Share of the time."""

_INPUT_LEN, _OUTPUT_LEN = 32, 96

_WINDOW = (0.5, 0.9)
"""The part of the trace after the prompts and before the last step."""

_LEAST_GAP_US = 20.0
"""Shorter ones lie between the kernels of a graph, too."""


def claim(llm: LLM, batch: int, model: str, device: str) -> Claim:
    """The share of the time in which the device waits, where `batch` requests decode; `llm` has room for them."""
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_LEN, ignore_eos=True)
    prompts = [[(11 * i + 5 * j) % 4000 + 2 for j in range(_INPUT_LEN)] for i in range(batch)]
    found = gaps(work(lambda: llm.generate(prompts, params, use_tqdm=False), device))
    name = f"{model}, {batch} decode: time in which the device waits for its host / all of it"
    return Claim(name, found["waits ms"] / found["ms"], LIMIT, "lower", found)


def work(run: Callable[[], object], device: str) -> list[Span]:
    """What the device does meanwhile, in microseconds; a host that computes itself never waits for itself."""
    if device == "cpu":
        run()
        return [(0.0, 1.0)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return spans_of_trace(path)


def spans_of_trace(path: Path) -> list[Span]:
    """What the device computed and copied, in a chrome trace of torch's profiler."""
    with gzip_open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    ran = (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy"))
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in ran]


def gaps(spans: list[Span]) -> dict[str, float]:
    """What lies between spans, in microseconds, of a device's work; of the window, in milliseconds."""
    begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
    first, last = (begin + share * (end - begin) for share in _WINDOW)
    found, until = list[float](), first
    for start, stop in sorted(spans):
        if start >= last:
            break
        if start - until >= _LEAST_GAP_US:
            found.append(start - until)
        until = max(until, stop)
    figures = {"ms": (last - first) / 1e3, "waits ms": sum(found) / 1e3, "waits": float(len(found))}
    return figures | {"longest ms": max(found, default=0.0) / 1e3}
