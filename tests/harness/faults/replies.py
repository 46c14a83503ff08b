"""Requests of every kind, and whether their replies are those that come when nothing happens."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from deployments import Running
from kills import FEW_TOKENS, KILLS_BOUND_S, num_migrations
from serving_checks import REQUEST_BOUND_S
from traffic import client_of, wait_for_engines, wait_for_rest, wait_until_true

from pdkv.launch.router_admin import RouterAdmin

PROMPT = "A request outlives the engines that serve it. " * 3
NUM_OUTPUT = 160
HANGS_S = 120.0

COMMON: dict[str, Any] = {"model": "served", "max_tokens": NUM_OUTPUT, "ignore_eos": True, **FEW_TOKENS}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED = {"seed": 7, "temperature": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT, "temperature": 0, **STREAM},
    "sampled": {"prompt": PROMPT, **SAMPLED, **STREAM},
    "n=4": {"prompt": PROMPT, "n": 4, **SAMPLED, **STREAM},
    "logprobs": {"prompt": PROMPT, "logprobs": 2, "frequency_penalty": 0.4, **SAMPLED, **STREAM},
    "echo": {"prompt": PROMPT, "echo": True, "logprobs": 1, **SAMPLED, **STREAM},
    "whole": {"prompt": PROMPT, "presence_penalty": 0.3, **SAMPLED},
    "chat": {"messages": [{"role": "user", "content": PROMPT}], **SAMPLED, **STREAM},
}


@dataclass
class Reply:
    """What a client has at the end, however it came."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # if asked for
    tokens: dict[int, list[str]] = field(default_factory=dict)  # of logprobs
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    num_usages: int = 0
    roles: int = 0

    def add(self, body: dict[str, Any]) -> None:
        """A whole reply or one event."""
        assert "error" not in body, body
        if body.get("usage") is not None:
            self.usage, self.num_usages = body["usage"], self.num_usages + 1
        for choice in body["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            self.roles += "role" in delta
            calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
            text = choice.get("text", delta.get("content")) or calls
            self.texts[index] = self.texts.get(index, "") + text
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                assert index not in self.reasons
                self.reasons[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
                values = [x for x in choice["logprobs"]["token_logprobs"] if x is not None]
                self.logprobs.setdefault(index, []).extend(values)


async def ask(client: httpx.AsyncClient, fields: dict[str, Any], salt: str, on_event: Callable[[], None]) -> Reply:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body, reply = {**COMMON, "cache_salt": salt, **fields}, Reply()
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        reply.add(answer.json())
        return reply
    async with client.stream("POST", path, json=body) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                reply.add(json.loads(line.removeprefix("data: ")))
                on_event()
    return reply


async def ask_all(
    deployment: Running, cases: dict[str, dict[str, Any]], salt: str, on_event: Callable[[int], None] = lambda _: None
) -> dict[str, Reply]:
    """All cases at once; the events of all streams together are numbered from 1."""
    numbers = itertools.count(1)
    async with client_of(deployment, REQUEST_BOUND_S) as client:  # they wait for each other
        replies = await asyncio.gather(
            *(ask(client, fields, f"{salt}: {name}", lambda: on_event(next(numbers))) for name, fields in cases.items())
        )
    return dict(zip(cases, replies, strict=True))


def ask_all_and_move(
    deployment: Running, cases: dict[str, dict[str, Any]], salt: str, name: str, move_at: int
) -> dict[str, Reply]:
    """All cases at once; what the engine of that name runs goes on elsewhere from the event of that number on."""
    router, tasks = RouterAdmin(deployment.run_dir), list[asyncio.Task[Any]]()

    def move(number: int) -> None:
        if number == move_at:
            tasks.append(asyncio.ensure_future(router.drain(name, 0.0, move=True)))

    async def run() -> dict[str, Reply]:
        replies = await ask_all(deployment, cases, salt, move)
        await asyncio.gather(*tasks)
        await router.resume(name)
        return replies

    return asyncio.run(run())


async def ask_each(
    deployment: Running, cases: Mapping[str, dict[str, Any]], salt: str
) -> dict[str, Reply | BaseException]:
    """All cases at once: what came of each, or why nothing did. One that hangs is a TimeoutError."""

    async def one(name: str, fields: dict[str, Any]) -> Reply:
        async with asyncio.timeout(HANGS_S):
            return await ask(client, fields, f"{salt}: {name}", lambda: None)

    async with client_of(deployment, HANGS_S) as client:
        found = await asyncio.gather(*(one(*case) for case in cases.items()), return_exceptions=True)
    return dict(zip(cases, found, strict=True))


def compare(replies: dict[str, Reply], expected: dict[str, Reply]) -> None:
    """Same text, reasons, usage, logprobs; one usage and one role."""
    for name, right in expected.items():
        mine = replies[name]
        assert mine.texts == right.texts, name
        assert (mine.reasons, mine.tokens) == (right.reasons, right.tokens), name
        assert mine.logprobs.keys() == right.logprobs.keys()
        for index, values in right.logprobs.items():
            assert mine.logprobs[index] == pytest.approx(values, abs=1e-3), name
        assert mine.usage == right.usage, name
        assert mine.num_usages == right.num_usages == 1, name
        assert mine.roles == right.roles, name


def kill_all_decodes(
    deployment: Running, cases: dict[str, dict[str, Any]], expected: dict[str, Reply], kill_at: int, salt: str
) -> int:
    """Kill all decode engines with the event of that number: no reply shows it, and the engines come back.

    Returns how many generations went on elsewhere. Engines are further than who reads: it is 0 where they had made all
    tokens by then, and where there were not so many events.
    """
    before = num_migrations(deployment)
    victims = [pid for engine, pid in deployment.pids().items() if engine.startswith("decode")]
    killed: list[int] = []

    def kill(number: int) -> None:
        if number == kill_at:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            killed.extend(victims)

    compare(asyncio.run(ask_all(deployment, cases, salt, kill)), expected)
    wait_for_engines(deployment, killed)
    wait_for_rest(deployment)
    return num_migrations(deployment) - before


def check_kill(deployment: Running, cases: dict[str, dict[str, Any]], expected: dict[str, Reply], kill_at: int) -> None:
    """`kill_all_decodes` again and again, until one comes amid the generations."""
    salts = (f"kill at {kill_at}, {attempt}" for attempt in itertools.count())
    wait_until_true(
        lambda: kill_all_decodes(deployment, cases, expected, kill_at, next(salts)),
        "a kill amid streams",
        KILLS_BOUND_S,
    )
