"""pdkv's router and others over the same servers that compute nothing (fake_vllm.py): hits and times to the first token
over shared prefixes, and requests that fail when a server does.

    python -m venv DIR/NAME && DIR/NAME/bin/pip install NAME==VERSION     for each of sglang-router, smg, vllm-router
    python -m benchmarks.run routers_prefixes routers_failures --routers DIR

Each router gets the protocol of the servers that it is made for: pdkv and vllm-router vLLM's, prefill before decode,
the others SGLang's, both at once. Options are the defaults, but for the policy `cache_aware` of the others.
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from benchmarks.report import Claim, Context
from benchmarks.servers import free_port, get, post, running
from pdkv.config import DEFAULT_MODEL

OTHERS = ("sglang-router", "smg", "vllm-router")
_FAKE = Path(__file__).parent / "fake_vllm.py"
_VOCABULARY = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
_WORDS = [token[1:] for token in _VOCABULARY if token[0] == "Ġ" and token[1:].isalpha()]
"""Words of one token each."""

ENGINES, RATE, PROMPTS = 8, 40.0, 1200
BEGINNINGS, SHARED, OWN = 64, 2048, 256
TOKENS_A_S, CACHE = 2500.0, 1 << 16
PATIENCE_S = 1.5
_TIMES = 12


class Fake(NamedTuple):
    """One server that computes nothing."""

    url: str
    role: str
    events: int
    pid: int

    def counts(self) -> dict[str, int]:
        """Counts of requests and of prompt tokens."""
        counts: dict[str, int] = json.loads(get(self.url + "/counts"))
        return counts


class Router(NamedTuple):
    """A router that is ready."""

    url: str
    pid: int


def _others(context: Context) -> tuple[Path, list[str]]:
    """The folder of other routers, and which of them are there."""
    assert context.routers is not None
    folder = context.routers.resolve()
    return folder, [name for name in OTHERS if (folder / name / "bin").is_dir()]


@contextlib.contextmanager
def _fakes(name: str, roles: Sequence[str], *options: str) -> Iterator[list[Fake]]:
    with contextlib.ExitStack() as stack:
        found = []
        for role in roles:
            port, events = free_port(), free_port()
            url = f"http://127.0.0.1:{port}"
            own = [
                "--port",
                str(port),
                "--role",
                role,
                "--owner",
                "sglang" if name in ("sglang-router", "smg") else "vllm",
            ]
            own += ["--events", str(events)] if name == "pdkv" and role == "any" else []
            process = stack.enter_context(running([sys.executable, "-P", str(_FAKE), *own, *options], url))
            found.append(Fake(url, role, events, process.pid))
        yield found


@contextlib.contextmanager
def _router(folder: Path, name: str, fakes: Sequence[Fake]) -> Iterator[Router]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (_ours if name.startswith("pdkv") else partial(_theirs, folder))(name, fakes, port)
    with running(command, url) as process:
        _wait_answer(url)
        yield Router(url, process.pid)


def _ours(name: str, fakes: Sequence[Fake], port: int) -> list[str]:
    words = [f"{'vllm' if fake.role == 'any' else f'vllm-{fake.role}'}={fake.url}" for fake in fakes]
    command = [sys.executable, "-P", "-m", "pdkv.cli", "launch", str(DEFAULT_MODEL), "--port", str(port)]
    command += ["--served-model-name", "m", "--log-level", "warning", "--backend", *words]
    if name == "pdkv" and fakes[0].role == "any":
        command += ["--backend-kv-events", *(f"vllm-{i}=tcp://127.0.0.1:{f.events}" for i, f in enumerate(fakes))]
    return command


def _theirs(folder: Path, name: str, fakes: Sequence[Fake], port: int) -> list[str]:
    bin_dir = folder / name / "bin"
    start = {"sglang-router": [str(bin_dir / "python"), "-m", "sglang_router.launch_router"]}
    command = start.get(name) or [str(bin_dir / name), *(["launch"] if name == "smg" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1"]
    if fakes[0].role == "any":
        return [*command, "--worker-urls", *(fake.url for fake in fakes)]
    command += ["--vllm-pd-disaggregation" if name == "vllm-router" else "--pd-disaggregation"]
    ports = itertools.count(9001)
    for fake in fakes:
        bootstrap = [str(next(ports))] if fake.role == "prefill" and name != "vllm-router" else []
        command += [f"--{fake.role}", fake.url, *bootstrap]
    return command


def _wait_answer(url: str) -> None:
    """Until the router has servers: some are healthy before. Raises RuntimeError."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            post(url + "/v1/completions", {"model": "m", "prompt": "is it", "max_tokens": 1}, 5.0)
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} answered no request within 60 s")


class Sent(NamedTuple):
    """One request."""

    ok: bool
    ttft_s: float


async def _send(session: aiohttp.ClientSession, url: str, prompt: str, most: int, patience_s: float) -> Sent:
    body = {"model": "m", "prompt": prompt, "max_tokens": most, "stream": True, "temperature": 0}
    begin, first, ended = time.perf_counter(), 0.0, False
    try:
        async with asyncio.timeout(patience_s), session.post(url + "/v1/completions", json=body) as response:
            async for line in response.content:
                first = first or (time.perf_counter() if line.startswith(b"data: {") and b'"text"' in line else 0.0)
                ended |= line.startswith(b"data: [DONE]")
            return Sent(response.status == 200 and ended and first > 0, first - begin)
    except (TimeoutError, aiohttp.ClientError):
        return Sent(False, 0.0)


def _sent(url: str, prompts: Sequence[str], *, at_once: int = 1, most: int = 2, patience_s: float = 60.0) -> list[Sent]:
    """A closed loop."""

    async def run() -> list[Sent]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(prompt: str) -> Sent:
                async with gate:
                    return await _send(session, url, prompt, most, patience_s)

            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(run())


def _words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num))


# --- hits -------------------------------------------------------------------------------------------------------------


async def _arrive(url: str, rng: random.Random, num: int) -> list[Sent]:
    beginnings = [_words(rng, SHARED) for _ in range(BEGINNINGS)]
    weights = [1 / (i + 1) for i in range(BEGINNINGS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks, due = [], time.perf_counter()
        for _ in range(num):
            due += rng.expovariate(RATE)
            await asyncio.sleep(due - time.perf_counter())
            prompt = f"{rng.choices(beginnings, weights)[0]} {_words(rng, OWN)}"
            tasks.append(asyncio.create_task(_send(session, url, prompt, 1, 120.0)))
        return await asyncio.gather(*tasks)


def prefixes(context: Context) -> list[Claim]:
    """The share of prompt tokens that servers had, and times to the first token, each beside pdkv's."""
    folder, names = _others(context)
    num = 40 if context.quick else PROMPTS
    found = {name: _prefixes_of(folder, name, num) for name in ("pdkv", "pdkv without events", *names)}
    ours = found.pop("pdkv")
    claims = []
    for name, theirs in found.items():
        figures = {f"pdkv {key}": value for key, value in ours.items()} | {f"its {k}": v for k, v in theirs.items()}
        claims.append(Claim(f"hits of pdkv / of {name}", ours["hits"] / theirs["hits"], 1.0, "higher", figures))
        claims.append(Claim(f"TTFT p99 of pdkv / of {name}", ours["p99 s"] / theirs["p99 s"], 1.0, "lower", figures))
    return claims


def _prefixes_of(folder: Path, name: str, num: int) -> dict[str, float]:
    options = ("--rate", str(TOKENS_A_S), "--cache", str(CACHE))
    with _fakes(name, ["any"] * ENGINES, *options) as fakes, _router(folder, name, fakes) as router:
        sent = asyncio.run(_arrive(router.url, random.Random(1), num))
        counts = [fake.counts() for fake in fakes]
    ttfts = [one.ttft_s for one in sent if one.ok] or [np.nan]
    hits = sum(count["cached"] for count in counts) / sum(count["prompt"] for count in counts)
    most = max(count["requests"] for count in counts) / len(sent)
    p50, p99 = map(float, np.percentile(ttfts, (50, 99)))
    found = {"hits": hits, "p50 s": p50, "p99 s": p99, "failed": len(sent) - len(ttfts), "most at one": most}
    print(name, found, flush=True)
    return found


# --- failures ---------------------------------------------------------------------------------------------------------


def _fault(name: str, fake: Fake) -> None:
    get_fault = f"{fake.url}/fault/{name}"
    with contextlib.suppress(ValueError):  # its answer is empty
        post(get_fault, {})


def _kill(fake: Fake) -> None:
    import os
    import signal

    os.kill(fake.pid, signal.SIGKILL)


_FAILURES: dict[str, tuple[str, Callable[[Fake], None]]] = {
    "one prefill answers 500": ("prefill", partial(_fault, "error")),
    "one decode resets": ("decode", partial(_fault, "reset")),
    "one prefill is killed": ("prefill", _kill),
    "one prefill hangs": ("prefill", partial(_fault, "hang")),
}


def failures(context: Context) -> list[Claim]:
    """Failed of 12 requests one after the other, the mean of three times, over two prefill and two decode servers."""
    folder, names = _others(context)
    claims, turns = [], range(1 if context.quick else 3)
    for title, (role, act) in _FAILURES.items():
        found = {}
        for name in ("pdkv", *names):
            found[name] = float(np.mean([_failed(folder, name, role, act, turn) for turn in turns]))
            print(title, name, found[name], flush=True)
        ours = found.pop("pdkv")
        beside = ", ".join(f"{name} {num:.1f}" for name, num in found.items())
        claims.append(Claim(f"{title}: failed of {_TIMES} ({beside})", ours, min(found.values()), "lower", found))
    return claims


def _failed(folder: Path, name: str, role: str, act: Callable[[Fake], None], turn: int) -> int:
    rng = random.Random(turn)
    roles = ["prefill", "prefill", "decode", "decode"]
    with _fakes(name, roles) as fakes, _router(folder, name, fakes) as router:
        sent = _sent(router.url, [_words(rng, 200) for _ in range(4)])
        if not all(one.ok for one in sent):
            raise RuntimeError(f"{name}: {sum(not one.ok for one in sent)} of 4 failed before the fault")
        act(next(fake for fake in fakes if fake.role == role))
        sent = _sent(router.url, [_words(rng, 200) for _ in range(_TIMES)], patience_s=PATIENCE_S)
    return sum(not one.ok for one in sent)
