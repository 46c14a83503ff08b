"""Decode engines are killed amid requests of every kind: what clients get is what they get when nothing happens."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployments import Launch, Running
from faults.run import CONNECTOR
from kills import FEW_TOKENS, num_migrations
from traffic import client_of, wait_for_rest, wait_until_true

PROMPT = "A request outlives the engines that serve it. " * 3
NUM_OUTPUT = 160

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
            text = choice.get("text", delta.get("content")) or ""
            self.texts[index] = self.texts.get(index, "") + text
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
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                reply.add(json.loads(line.removeprefix("data: ")))
                on_event()
    return reply


async def ask_all(
    deployment: Running,
    cases: dict[str, dict[str, Any]],
    salt: str,
    kill_at: int = -1,
    victims: Sequence[int] = (),
) -> dict[str, Reply]:
    """All cases at once; the victims are killed with the event of that number."""
    num_events = 0

    def on_event() -> None:
        nonlocal num_events
        num_events += 1
        if num_events == kill_at:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

    async with client_of(deployment) as client:
        replies = await asyncio.gather(
            *(ask(client, fields, f"{salt}: {name}", on_event) for name, fields in cases.items())
        )
    return dict(zip(cases, replies, strict=True))


@pytest.mark.parametrize("connector", [("shared_memory",), ("nixl", "mode=push")], ids="-".join)
def test_no_reply_shows_that_all_decode_engines_were_killed(launch: Launch, connector: tuple[str, ...]) -> None:
    """Once when the first tokens are out, once in the middle: with nobody left, all wait for one to come back."""
    name, *options = connector
    flags = ("--connector", name, *(x for option in options for x in ("--connector-config", option)))
    deployment = launch("--prefill", "1", "--decode", "2", *flags)
    plain = asyncio.run(ask_all(deployment, CASES, "undisturbed"))
    cut = len(plain["sampled"].texts[0]) * 2 // 3
    stop = plain["sampled"].texts[0][cut : cut + 12]
    cases = {**CASES, "stop": {**CASES["sampled"], "stop": [stop]}}
    expected = {**plain, **asyncio.run(ask_all(deployment, {"stop": cases["stop"]}, "undisturbed, too"))}
    assert expected["stop"].reasons == {0: "stop"}
    assert len(expected["stop"].texts[0]) > cut // 2
    wait_for_rest(deployment)
    for kill_at in (3, 60 * len(cases)):
        victims = deployment.pids()

        before = num_migrations(deployment)
        pids = [pid for engine, pid in victims.items() if engine.startswith("decode")]
        compare(asyncio.run(ask_all(deployment, cases, f"kill at {kill_at}", kill_at, pids)), expected)
        assert num_migrations(deployment) > before
        wait_until_true(lambda: all(deployment.pids().values()), "all engines are back")
        assert not set(deployment.pids().values()) & set(pids)
        wait_for_rest(deployment)


EVERYTHING = {"prompt": PROMPT, "n": 4, "logprobs": 2, "echo": True, "frequency_penalty": 0.4, **SAMPLED, **STREAM}
MOMENTS = {"token 1": 1, "the middle": NUM_OUTPUT // 2, "the last but one": NUM_OUTPUT - 1}
"""Output tokens that are computed when decode dies; those that it had not sent die with it."""


def test_no_reply_shows_at_which_token_decode_was_killed(launch: Launch, tmp_path: Path) -> None:
    """n=4, logprobs, echo, a penalty and a seed in one request, and a stop string that begins before the cut."""
    switch = tmp_path / "die"
    options = ("--connector-config", "of=shared_memory", f"switch={switch}")
    flags = ("--prefill", "1", "--decode", "2", "--connector", "dying:Dying", *options)
    deployment = launch(*flags, environment={"PYTHONPATH": str(CONNECTOR)})
    expected = asyncio.run(ask_all(deployment, {"everything": EVERYTHING, "sampled": CASES["sampled"]}, "undisturbed"))
    text = expected["sampled"].texts[0]
    assert len(text) == NUM_OUTPUT
    for moment, num_tokens in MOMENTS.items():
        first = min(max(0, num_tokens - 6), NUM_OUTPUT - 12)
        stop = {**CASES["sampled"], "stop": [text[first : first + 12]]}
        assert first <= num_tokens < text.index(text[first : first + 12]) + 12, moment
        expected |= asyncio.run(ask_all(deployment, {"stop": stop}, f"before {moment}"))
        assert expected["stop"].reasons == {0: "stop"}
        for name, fields in (("everything", EVERYTHING), ("stop", stop)):
            wait_until_true(lambda: all(deployment.pids().values()), "all engines")
            before = num_migrations(deployment)
            switch.write_text(str(len(PROMPT) + num_tokens - 1))
            compare(asyncio.run(ask_all(deployment, {name: fields}, moment)), {name: expected[name]})
            assert not switch.exists(), (moment, name)
            assert num_migrations(deployment) > before, (moment, name)
    wait_until_true(lambda: all(deployment.pids().values()), "all engines are back")
    wait_for_rest(deployment)


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
