"""Two real vLLM servers behind pdkv's router, used by OpenAI's client: what the router knows of their caches, or what a
prefill server passes to a decode server; and what is lost when one of them is killed, stands still, or loses its engine
process, and then begins again at its address.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai

from benchmarks.load import random_prompt
from benchmarks.models import find_model
from benchmarks.peers import NIXL, pair_side, router, vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, free_port, get, metric

STREAMS, TOKENS, CONVERSATIONS, TURNS = 100, 96, 25, 4
_KEPT = re.compile(r"POST .* request_id=(\w+) .*local_hit=(\d+)")
_TOLD_S = 2.0
"""Pause between turns, after which events have told of the turn before."""

_NOTHING = b'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0'


def run(context: Context) -> list[Claim]:
    """Hits known by events; then failures, one after the other, of the first server."""
    assert context.vllm is not None
    folder, model = context.vllm, find_model(context.models, "tiny")
    ports, events = [free_port(), free_port()], [(free_port(), free_port()) for _ in range(2)]

    def serve(number: int, *, wait: bool = True) -> contextlib.AbstractContextManager[Server]:
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        config |= {
            key: f"tcp://*:{port}" for key, port in zip(("endpoint", "replay_endpoint"), events[number], strict=True)
        }
        # In float32 a server that continues computes what the first one would have computed.
        options = ["--dtype", "float32", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(config)]
        return vllm(folder, model, cpus=str(number), options=options, port=ports[number], wait=wait)

    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        log = Path(logs, "router.log")
        servers = [stack.enter_context(serve(number, wait=number == 1)) for number in range(2)]
        words = [f"vllm=http://127.0.0.1:{port}" for port in ports]
        sources = [f"vllm-{i}=tcp://127.0.0.1:{at}/{again}" for i, (at, again) in enumerate(events)]
        options = ["--explain-share", "1", "--backend", *words, "--backend-kv-events", *sources]
        url = stack.enter_context(router(model, options, log)).url
        cases = [(f"one vLLM {name}", 0, act) for name, act in _FAILURES.items()]
        return [_hits(url, log), *_fail_in_turn(url, servers, cases, lambda i: stack.enter_context(serve(i)))]


def run_pair(context: Context, connector: str) -> list[Claim]:
    """A prefill and a decode server that pass KV over vLLM's "nixl", or by a "store" of pdkv's inside vLLM, for which
    the virtual environment needs pdkv; then failures of each.
    """
    assert context.vllm is not None
    folder, model, ports = context.vllm, find_model(context.models, "tiny"), [free_port(), free_port()]
    options = ["--dtype", "float32", "--block-size", "32"]
    with tempfile.TemporaryDirectory() as files, contextlib.ExitStack() as stack:
        transfer = {"nixl": NIXL, "store": _transfer_by_store(f"file://{files}/kv")}[connector]

        def serve(number: int, *, wait: bool = True) -> Server:
            side = pair_side(folder, model, number, options, transfer=transfer, port=ports[number], wait=wait)
            return stack.enter_context(side)

        servers = [serve(number, wait=number == 1) for number in range(2)]
        words = [f"vllm-{role}={server.url}" for role, server in zip(("prefill", "decode"), servers, strict=True)]
        url = stack.enter_context(router(model, ["--local-turns", "never", "--backend", *words])).url
        cases = [
            (f"{role} server {name}", i, _FAILURES[name])
            for i, role in enumerate(("prefill", "decode"))
            for name in ("killed", "stopped")
        ]
        return [_passed(url, connector, *servers), *_fail_in_turn(url, servers, cases, serve)]


def _transfer_by_store(url: str) -> dict[str, Any]:
    return {
        "kv_connector": "PdkvConnector",
        "kv_connector_module_path": "pdkv.vllm.adapter",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connector": "store", "config": {"url": url}},
    }


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[Callable[..., Any]]:
    """OpenAI's client: a completion of exactly `max_tokens`, with token ids."""
    more = {"ignore_eos": True, "return_token_ids": True}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", timeout=180, max_retries=0) as client:
        yield partial(client.completions.create, model="m", extra_body=more)


# --- hits -------------------------------------------------------------------------------------------------------------


def _hits(url: str, log: Path) -> Claim:
    """The prompt tokens that vLLM says it had cached, and those of them that the router expected there."""
    asyncio.run(_talk(url))
    expected, cached = {}, {}
    for line in log.read_text().splitlines():
        if (at := line.find('{"request_id"')) >= 0:
            decision = json.loads(line[at:])
            choice = decision["choices"][-1]
            [expected[decision["request_id"]]] = [
                c["match"] for c in choice["candidates"] if c["engine"] == choice["chosen"]
            ]
        elif (found := _KEPT.search(line)) is not None:
            cached[found[1]] = int(found[2])
    known = sum(min(expected[name], num) for name, num in cached.items())
    figures = {
        "cached": sum(cached.values()),
        "known": known,
        "expected": sum(expected.values()),
        "requests": len(cached),
    }
    return Claim("hits known by KV events / cached as vLLM says", known / figures["cached"], 0.95, "higher", figures)


async def _talk(url: str) -> None:
    """Conversations over six shared beginnings."""
    rng = random.Random(1)
    beginnings = [random_prompt(rng, 320) for _ in range(6)]
    async with _client(url) as complete:

        async def one(number: int) -> None:
            prompt = [*beginnings[number % 6]]
            for _ in range(TURNS):
                prompt += random_prompt(rng, rng.randrange(20, 90))
                answer = await complete(prompt=prompt, max_tokens=24, temperature=0)
                prompt += answer.choices[0].token_ids
                await asyncio.sleep(_TOLD_S)

        await asyncio.gather(*map(one, range(CONVERSATIONS)))


def _passed(url: str, connector: str, prefill: Server, decode: Server) -> Claim:
    """The prompt tokens that the decode server says it was passed; answers are those of the prefill server alone."""
    rng, name = random.Random(2), "vllm:prompt_tokens_by_source_total"
    prompts = [random_prompt(rng, 256 + i) for i in range(40)]
    answers, right = (asyncio.run(_again(at, prompts)) for at in (url, prefill.url))
    passed, total = metric(decode, name, source="external_kv_transfer"), metric(decode, name)
    wrong = sum(answer != other for answer, other in zip(answers, right, strict=True))
    figures = {"requests": len(prompts), "prompt tokens": total, "wrong": wrong}
    title = f"prompt tokens passed to a decode vLLM by {connector} / of all there"
    return Claim(title, passed / total, 0.9, "higher", figures)


# --- failures ---------------------------------------------------------------------------------------------------------


def _engine_processes(pid: int) -> list[int]:
    """What computes under an API server."""
    tree = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in tree if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _signal_engine(number: signal.Signals, pid: int) -> None:
    [engine] = _engine_processes(pid)
    os.kill(engine, number)


_FAILURES: dict[str, Callable[[int], None]] = {
    "killed": lambda pid: os.killpg(pid, signal.SIGKILL),
    "its engine process killed": partial(_signal_engine, signal.SIGKILL),
    "stopped": lambda pid: os.killpg(pid, signal.SIGSTOP),
    "its engine process stopped": partial(_signal_engine, signal.SIGSTOP),
}


def _fail_in_turn(
    url: str,
    servers: list[Server],
    cases: Sequence[tuple[str, int, Callable[[int], None]]],
    serve: Callable[[int], Server],
) -> Iterator[Claim]:
    """Failures (name, server, what happens to its process), one after the other; `serve` begins that server again."""
    for name, number, act in cases:
        yield _failure(name, url, servers[1 - number], partial(act, servers[number].pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(servers[number].pid, signal.SIGKILL)
        servers[number] = serve(number)
        asyncio.run(_wait_used(url, servers[number]))


def _failure(name: str, url: str, other: Server, act: Callable[[], None]) -> Claim:
    """Half of the streams are greedy, half sampled; greedy ones have the tokens of a server that nothing happens to."""
    rng = random.Random(name)
    prompts = [random_prompt(rng, 40) for _ in range(STREAMS)]
    answers, seconds = asyncio.run(_streams(url, prompts, act))
    lost = sum(len(answer) != TOKENS for answer in answers)
    wrong = sum(
        a != b
        for a, b in zip(answers[::2], asyncio.run(_again(other.url, prompts[::2])), strict=True)
        if len(a) == TOKENS
    )
    figures = {"lost": lost, "wrong": wrong, "longest pause s": seconds}
    return Claim(f"{name}: lost or wrong of {STREAMS}", lost + wrong, 0.0, "lower", figures)


async def _streams(url: str, prompts: Sequence[list[int]], act: Callable[[], None]) -> tuple[list[list[int]], float]:
    """The tokens of each, and the longest pause in one. `act` is called when a third of them have five tokens."""
    begun, pauses, loop = set[int](), [0.0], asyncio.get_running_loop()
    async with _client(url) as complete:

        async def one(number: int, prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            last = loop.time()
            try:
                stream = await complete(prompt=prompt, max_tokens=TOKENS, temperature=float(number % 2), stream=True)
                async for chunk in stream:
                    tokens += [i for choice in chunk.choices for i in choice.token_ids or []]
                    pauses.append(loop.time() - last)
                    last, was = loop.time(), len(begun)
                    begun.update([number] if len(tokens) >= 5 else [])
                    if (was, len(begun)) == (STREAMS // 3 - 1, STREAMS // 3):
                        act()
            except openai.OpenAIError as error:
                print(f"lost after {len(tokens)} tokens: {error!r}", flush=True)
            return tokens

        return await asyncio.gather(*map(one, range(len(prompts)), prompts)), max(pauses)


async def _again(url: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    async with _client(url) as complete:
        answers = await asyncio.gather(*(complete(prompt=p, max_tokens=TOKENS, temperature=0) for p in prompts))
        return [answer.choices[0].token_ids for answer in answers]


async def _wait_used(url: str, server: Server) -> None:
    """Until a server that began again at its address has generated something. Raises TimeoutError."""
    async with asyncio.timeout(60), _client(url) as complete:
        while _NOTHING in get(server.url + "/metrics"):
            await asyncio.gather(*(complete(prompt=[i] * 20, max_tokens=4) for i in range(10, 18)))
