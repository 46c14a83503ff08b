"""1P1D on one card: its tokens a second beside one engine that does both, and the share of TTFT in which KV travels.
And how fast values leave the host tier.
"""

import re
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from benchmarks.interference import Arrivals, p99_gap
from benchmarks.load import Workload, measure
from benchmarks.models import find_model, models_folder
from benchmarks.report import Claim
from benchmarks.servers import Server, get, pdkv
from pdkv.kernels.streams import streams_of

INPUT_LEN, OUTPUT_LEN = 2048, 128
LONG_INPUT_LEN = 8000
"""Tokens of a prompt of several chunks, each of which is read while the next one is computed."""

ROUNDS = 3


def run(device: str, scale: str) -> Iterator[Claim]:
    """Claims for each connector that reaches KV on the device, of a smoke run for one, and one about the host tier."""
    with models_folder() as folder:
        model = find_model(folder, "tiny" if scale == "tiny" else "large", device)
        yield _page_locked(torch.device(device), 1 << 20 if scale == "tiny" else 256 << 20)
        yield from _beside_one_engine("nixl", model, device, scale)
        if scale != "smoke":
            yield from _beside_one_engine("shared_memory", model, device, scale)  # last: CUDA IPC is not everywhere


def launches(device: str, scale: str) -> list[tuple[int, int, list[str]]]:
    """Numbers of prefill and decode engines, and other options, of what is started; the last one is aggregated."""
    options = ["--device", device, *(["--kv-cache-memory", "64MiB"] if scale == "tiny" else [])]
    options += ["--gpu-memory-utilization", f"{0.9 / 3:.2f}"] if device == "cuda" else []  # engines at a time: three
    connectors = ["nixl", *(["shared_memory"] if scale != "smoke" else [])]
    pairs = [[*options, "--connector", connector] for connector in connectors]
    chunk = ["--max-num-seqs", "16", "--max-num-batched-tokens", "32" if scale == "tiny" else "2048"]
    return [*((1, 1, pair) for pair in pairs), *((1, 1, [*pair, *chunk]) for pair in pairs), (0, 1, options)]


def _beside_one_engine(connector: str, model: Path, device: str, scale: str) -> Iterator[Claim]:
    num_tokens, num_requests = ((64, 8), 4) if scale == "tiny" else ((INPUT_LEN, OUTPUT_LEN), 64)
    whole, by_chunks = [options for *_, options in launches(device, scale) if connector in options]
    with pdkv(model, prefill=1, decode=1, options=by_chunks) as pd:
        yield _left_of_long_prompts(connector, pd, 64 if scale == "tiny" else LONG_INPUT_LEN)
    with (
        pdkv(model, prefill=1, decode=1, options=whole) as pd,
        pdkv(model, prefill=0, decode=1, options=launches(device, scale)[-1][2]) as aggregated,
    ):
        yield from _compare(connector, pd, aggregated, num_tokens, num_requests)
        load = Arrivals(1.0, 1, 64 if scale == "tiny" else LONG_INPUT_LEN)
        gaps = [p99_gap(server, load, 3.0 if scale == "tiny" else 15.0) for server in (pd, aggregated)]
    name = f"{connector}: p99 between tokens beside prompts of {load.prompt_len} tokens / in one aggregated engine"
    figures = {"1P1D p99 ms": gaps[0] * 1e3, "aggregated p99 ms": gaps[1] * 1e3}
    yield Claim(name, gaps[0] / gaps[1], 0.5, "lower", figures)


def _left_of_long_prompts(connector: str, pd: Server, num_tokens: int) -> Claim:
    """The share of the time to first token for which the second one waits beyond a step: of one prompt at a time."""
    run = measure(pd.url, pd.model, Workload(2 * ROUNDS, num_tokens, (8, 8)))
    gaps = [np.diff(reply.stamps) for reply in run.replies]
    left = max(median(float(each[0] - np.median(each[1:])) for each in gaps), 0.0)
    ttft = median(reply.ttft for reply in run.replies)
    name = f"{connector}: hand-off behind the first token / time to it, {num_tokens} tokens"
    return Claim(name, left / ttft, 0.05, "lower", {"hand-off ms": left * 1e3, "ttft ms": ttft * 1e3})


def _page_locked(device: torch.device, num_bytes: int) -> Claim:
    """How fast a device copies out of page-locked host memory, beside a copy through a pinned buffer."""
    streams, memory = streams_of(device), np.frombuffer(mmap(-1, num_bytes), np.uint8)
    buffer, there = streams.make_pinned(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy(source: torch.Tensor) -> float:
        done, began = streams.make_event(), perf_counter()
        if source is buffer:
            np.copyto(buffer.numpy(), memory)
        there.copy_(source, non_blocking=True)
        done.record()
        done.synchronize(10.0)
        return num_bytes / 1e9 / (perf_counter() - began)

    unlock = streams.lock_pages(memory)
    speeds = [median(copy(source) for _ in range(5)) for source in (torch.from_numpy(memory), buffer)]
    figures = {"page-locked GB/s": speeds[0], "through a buffer GB/s": speeds[1], "locked": float(unlock is not None)}
    if unlock is not None:
        unlock()
    return Claim(
        "copy out of page-locked host memory / through a buffer", speeds[0] / speeds[1], 1.5, "higher", figures
    )


def _compare(
    connector: str, pd: Server, aggregated: Server, num_tokens: tuple[int, int], num_requests: int
) -> Iterator[Claim]:
    rates: dict[str, list[float]] = {"1P1D": [], "aggregated": []}
    ttfts: list[float] = []
    before = _transfer_seconds(pd)
    for number in range(ROUNDS):
        for name, server in (("1P1D", pd), ("aggregated", aggregated)):
            load = Workload(num_requests, num_tokens[0], (num_tokens[1],) * 2, concurrency=8, seed=number + 1)
            run = measure(server.url, server.model, load)
            rates[name].append(sum(reply.num_tokens for reply in run.replies) / run.wall_s)
            if server is pd:
                ttfts.append(median(reply.ttft for reply in run.replies))
    spent = (_transfer_seconds(pd) - before) / (ROUNDS * num_requests)
    medians = {name: sorted(each)[ROUNDS // 2] for name, each in rates.items()}
    ttft = sorted(ttfts)[ROUNDS // 2]
    figures = {"transfer ms": spent * 1e3, "ttft ms": ttft * 1e3}
    yield Claim(f"{connector}: transfer / time to first token", spent / ttft, 0.05, "lower", figures)
    ratio = medians["1P1D"] / medians["aggregated"]
    figures = {f"{name} tok/s": rate for name, rate in medians.items()}
    limit = 0.97 if connector == "shared_memory" else 0.9
    yield Claim(f"{connector}: tokens/s of 1P1D / one aggregated engine", ratio, limit, "higher", figures)


def _transfer_seconds(server: Server) -> float:
    """Seconds of all loads from a peer."""
    text = get(server.url + "/metrics").decode()
    values = re.findall(r"^pdkv_kv_transfer_duration_seconds_sum(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    assert values, "the router tells of no transfers"
    return sum(map(float, values))
