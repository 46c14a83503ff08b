"""Requests at a fixed rate, whether or not others are done, and what became of each."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from deployments import Running
from kills import FEW_TOKENS
from traffic import BOUND_S, Answer, Ask, client_of, send

MAX_TOKENS = 60
PROMPTS = tuple(f"Fault {i}: " + "and so on, " * (i % 4 * 20) for i in range(12))
"""Of 9 to 670 tokens."""

LONG = (Ask("Full prefill: " + "and so on, " * 62, 2, fields=FEW_TOKENS), Ask("Full decode", 300, fields=FEW_TOKENS))
"""What fills the KV pool of a prefill engine, and of a decode engine."""

_numbers = itertools.count()


@dataclass
class Sent:
    """One request."""

    ask: Ask
    number: int  # of its right answer
    began: float
    ended: float = 0.0
    answer: Answer | None = None  # None: it hung


@dataclass
class Load:
    """Open-loop: `rate` requests a second, in turn streamed and whole, none of whose prompts is in a cache."""

    client: httpx.AsyncClient
    label: str
    rate: float
    limit_s: float | None = None
    bound_s: float = BOUND_S  # after which one hangs
    sent: list[Sent] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, num: int, until: asyncio.Event | None = None) -> None:
        """Send so many, and more until the event."""
        began, count = time.monotonic(), 0
        while count < num or (until is not None and not until.is_set()):
            number = len(self.sent)
            self.begin(Ask(PROMPTS[number % len(PROMPTS)], MAX_TOKENS, stream=bool(number % 2), fields=FEW_TOKENS))
            count += 1
            await asyncio.sleep(max(0.0, began + count / self.rate - time.monotonic()))

    def begin(self, ask: Ask, number: int | None = None) -> None:
        """Send one."""
        sent = Sent(ask, len(self.sent) % len(PROMPTS) if number is None else number, time.monotonic())
        self.sent.append(sent)
        self.tasks.append(asyncio.create_task(self._one(sent)))

    async def finish(self) -> None:
        """Wait for all answers."""
        await asyncio.gather(*self.tasks)
        self.over.set()

    async def _one(self, sent: Sent) -> None:
        salt = f"{self.label}/{next(_numbers)}"
        ask = sent.ask._replace(fields={**sent.ask.fields, "cache_salt": salt})
        if self.limit_s is not None:
            ask = ask._replace(end="deadline", amount=self.limit_s)
        try:
            sent.answer = await send(self.client, ask, bound_s=self.bound_s)
        except TimeoutError:
            sent.answer = None
        sent.ended = time.monotonic()


@asynccontextmanager
async def load_on(deployment: Running, label: str, rate: float, limit_s: float | None = None) -> AsyncIterator[Load]:
    """A load whose requests have the label as their x-request-id."""
    async with client_of(deployment) as client:
        client.headers["x-request-id"] = label
        yield Load(client, label, rate, limit_s)


async def right_answers(deployment: Running) -> list[list[int]]:
    """To all prompts and to those of LONG behind them, when nothing happens."""
    async with load_on(deployment, "undisturbed", 1000.0) as load:
        for prompt in PROMPTS:
            load.begin(Ask(prompt, MAX_TOKENS, fields=FEW_TOKENS))
        for ask in LONG:
            load.begin(ask)
        await load.finish()
    answers = [sent.answer.token_ids if sent.answer is not None else None for sent in load.sent]
    assert all(answers), answers
    return [ids or [] for ids in answers]


async def capacity(deployment: Running, num: int, at_once: int = 24) -> float:
    """Requests a second, when so many are always under way."""
    async with load_on(deployment, "capacity", 1000.0) as load:
        turns = asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            async with turns:
                load.begin(Ask(PROMPTS[number % len(PROMPTS)], MAX_TOKENS, stream=bool(number % 2), fields=FEW_TOKENS))
                await load.tasks[-1]

        began = time.monotonic()
        await asyncio.gather(*map(one, range(num)))
        return num / (time.monotonic() - began)
