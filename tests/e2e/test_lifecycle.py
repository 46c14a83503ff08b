"""Hundreds of requests, most of which do not end well, leave nothing behind and change no answer."""

import asyncio
import random
from collections import Counter
from itertools import pairwise

import pytest
from deployments import Launch, Running
from traffic import Answer, Ask, client_of, connections, holdings, send_all, wait_for_rest, wait_until_true

MAX_GROWTH = 1.02
AT_ONCE = 16
NUM_PROMPTS = 40
LENGTHS = (5, 16, 47, 120, 300)  # tokens
OUTPUTS = (1, 9, 40)


def draw_prompts(rng: random.Random) -> list[str]:
    """A fixed set, so that caches of prompts are warm after one round; every third one has a shared beginning."""
    prompts = []
    for number in range(NUM_PROMPTS):
        own = "".join(rng.choices("abcdefghij ", k=LENGTHS[number % len(LENGTHS)]))
        prompts.append("What many prompts begin with, some blocks long. " * (number % 3 == 0) + own)
    return prompts


def draw_asks(rng: random.Random, prompts: list[str], count: int) -> list[Ask]:
    """All prompts, most with a client that leaves or a deadline that passes."""
    asks = []
    for number in range(count):
        end = rng.choice(["read", "read", "close", "drop", "deadline"])
        stream = end == "close" or (end != "drop" and rng.random() < 0.5)
        amount = {"close": rng.choice([0, 1, 3, 20]), "drop": rng.choice([0.001, 0.01, 0.03, 0.1])}.get(end, 0.0)
        if end == "deadline":
            amount = rng.choice([0.001, 0.005, 0.02, 0.08])
        asks.append(Ask(prompts[number % NUM_PROMPTS], rng.choice(OUTPUTS), stream, end, amount))  # type: ignore[arg-type]
    return asks


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "2", "--decode", "2")


class Soak:
    """One deployment, the prompts that are sent to it, and what the right answers are."""

    def __init__(self, deployment: Running) -> None:
        self.deployment = deployment
        self.rng = random.Random(8)
        self.prompts = draw_prompts(self.rng)
        self.ends: Counter[str] = Counter()
        self.expected = dict(zip(self.prompts, self.ask_for_all(at_once=NUM_PROMPTS), strict=True))

    def ask_for_all(self, *, at_once: int) -> list[list[int]]:
        """What is answered to each prompt, in full."""
        answers = self.send([Ask(prompt, max(OUTPUTS)) for prompt in self.prompts], at_once=at_once)
        token_ids = [answer.token_ids or [] for answer in answers]
        assert [len(ids) for ids in token_ids] == [max(OUTPUTS)] * NUM_PROMPTS
        return token_ids

    def send(self, asks: list[Ask], *, at_once: int) -> list[Answer]:
        """The answers, once the engines are at rest and the router has seen that its clients are gone."""

        async def send_them() -> list[Answer]:
            async with client_of(self.deployment) as client:
                return await send_all(client, asks, at_once=at_once)

        answers = asyncio.run(send_them())
        wait_for_rest(self.deployment)
        wait_until_true(lambda: not connections(self.deployment), "no client's connection")
        return answers

    def run(self, count: int, *, at_once: int) -> None:
        """Send so many requests, check every answer that comes, and count how they end."""
        asks = draw_asks(self.rng, self.prompts, count)
        for ask, answer in zip(asks, self.send(asks, at_once=at_once), strict=True):
            assert not answer.broken
            if answer.token_ids is not None:
                assert answer.token_ids == self.expected[ask.prompt][: ask.max_tokens]
                self.ends["right"] += 1
            elif answer.error is not None:
                assert (ask.end, answer.error["code"]) == ("deadline", "timeout")
                self.ends["timeout"] += 1
            else:
                self.ends[ask.end] += 1


def test_900_requests_with_aborts_disconnects_and_tiny_deadlines(deployment: Running) -> None:
    """Memory must not grow in both halves: an allocator's free lists and heap fill up once, a leak goes on."""
    soak = Soak(deployment)
    soak.run(100 - NUM_PROMPTS, at_once=AT_ONCE)
    after_100 = holdings(deployment)
    soak.run(400, at_once=AT_ONCE)
    after_500 = holdings(deployment)
    soak.run(400, at_once=AT_ONCE)
    after_900 = holdings(deployment)
    assert min(soak.ends[kind] for kind in ("right", "timeout", "close", "drop")) > 10, soak.ends
    assert soak.ask_for_all(at_once=1) == list(soak.expected.values())
    for before, after in pairwise((after_100, after_500, after_900)):
        assert after.descriptors == before.descriptors
        assert after.mappings == before.mappings
        assert after.shared_memory_files == before.shared_memory_files
    growth = {
        name: min(after_500.resident[name] / size, after_900.resident[name] / after_500.resident[name])
        for name, size in after_100.resident.items()
    }
    assert max(growth.values()) <= MAX_GROWTH, growth
