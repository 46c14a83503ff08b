"""Steady load: requests whose tokens are known, from clients that behave and clients that do not."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import httpx
from oracle import Expected
from traffic import Answer, Ask, End, send

from pdkv.errors import EngineUnavailable, PdkvError, RequestFailed, TransferError
from soak.backends import REQUEST_TIMEOUT_S
from soak.journal import Journal

SLACK_S = 20.0
"""A request that takes longer than its deadline and this hangs; a stopped router and a busy machine are in it."""

ROUTER_RESTART_S = 5.0
"""So long after the death of a router a connection may still break: it was accepted and not yet served."""

REQUESTS_PER_SALT = 30
TINY_S = (0.002, 0.01, 0.05, 0.2)
MAX_REMEMBERED = 40


def _codes(kind: type[PdkvError]) -> set[str]:
    return {kind.code}.union(*map(_codes, kind.__subclasses__()))


KNOWN_CODES = _codes(EngineUnavailable) | _codes(RequestFailed) | _codes(TransferError)


class Trial(NamedTuple):
    """A request and the right tokens."""

    ask: Ask
    expected: Sequence[int]


class Load:
    """Draws requests, sends them and judges the answers."""

    def __init__(self, client: httpx.AsyncClient, expected: Sequence[Expected], journal: Journal, seed: int) -> None:
        self._client = client
        self._expected = expected
        self._journal = journal
        self._seed = seed
        self._num_drawn = 0
        self._answered: deque[Trial] = deque(maxlen=MAX_REMEMBERED)  # last ones with the right answer

    async def work(self, number: int, stop: asyncio.Event) -> None:
        """One client: a request after the other, until `stop`."""
        rng = random.Random(f"{self._seed}/{number}")
        while not stop.is_set():
            if await self.send(self.draw(rng)) not in ("right", "left"):
                await asyncio.sleep(0.05)  # it fails at once: let others work

    async def burst(self, seed: str, count: int) -> None:
        """So many at once."""
        rng = random.Random(seed)
        await asyncio.gather(*(self.send(self.draw(rng)) for _ in range(count)))

    async def verify(self, at_once: int) -> None:
        """Nothing is broken now: every prompt, and what was answered lately once more; all must be right."""
        salt = f"verify-{self._seed}-{self._num_drawn}"
        self._num_drawn += 1
        trials = [self._trial(e.prompt, e.output, salt) for e in self._expected]
        trials += [*self._answered]
        turns = asyncio.Semaphore(at_once)

        async def one(trial: Trial) -> None:
            async with turns:
                outcome = await self.send(trial._replace(ask=trial.ask._replace(end="read")))
            if outcome != "right":
                self._journal.violation(f"at rest a request ended with {outcome}: {_describe(trial)}")

        await asyncio.gather(*map(one, trials))

    def draw(self, rng: random.Random) -> Trial:
        """The next request. Its salt is a young one mostly, so that there is something to be transferred."""
        self._num_drawn += 1
        salt = self._num_drawn // REQUESTS_PER_SALT
        if rng.random() < 0.2:
            salt -= rng.randrange(1, 6)
        expected = rng.choice(self._expected)
        turn = rng.choice((0, 0, len(expected.output) // 2))  # a second turn: the prompt ends with generated tokens
        prompt, output = [*expected.prompt, *expected.output[:turn]], expected.output[turn:]
        end: End = rng.choices(("read", "close", "drop", "deadline"), (14, 2, 2, 2))[0]
        amount = {"close": rng.choice((0, 1, 5)), "drop": rng.choice(TINY_S), "deadline": rng.choice(TINY_S)}
        stream = end == "close" or (end != "drop" and rng.random() < 0.5)
        trial = self._trial(prompt, output[: rng.choice((1, 8, len(output)))], f"{self._seed}-{salt}")
        return trial._replace(ask=trial.ask._replace(end=end, stream=stream, amount=amount.get(end, 0.0)))

    def _trial(self, prompt: Sequence[int], output: Sequence[int], salt: str) -> Trial:
        fields = {"temperature": 0, "cache_salt": salt}
        return Trial(Ask(list(prompt), len(output), fields=fields), output)

    async def send(self, trial: Trial) -> str:
        """Send one; returns how it ended."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S + SLACK_S):
                answer = await send(self._client, trial.ask)
        except TimeoutError:
            self._journal.violation(f"no end within its deadline + {SLACK_S:g} s: {_describe(trial)}")
            outcome = "hung"
        else:
            outcome = self._judge(trial, answer, began)
        self._journal.outcomes[outcome] += 1
        if trial.ask.end == "read":
            self._journal.patient[outcome] += 1
        return outcome

    def _judge(self, trial: Trial, answer: Answer, began: float) -> str:
        ended, journal = time.monotonic(), self._journal
        tokens = answer.token_ids if answer.token_ids is not None else answer.begun
        if list(tokens) != list(trial.expected[: len(tokens)]):
            journal.violation(f"wrong tokens {list(tokens)} instead of {trial.expected}: {_describe(trial)}, {answer}")
            return "wrong"
        if answer.token_ids is not None:
            if len(tokens) != len(trial.expected):
                journal.violation(f"{len(tokens)} tokens instead of {len(trial.expected)}: {_describe(trial)}")
                return "wrong"
            journal.worst_s = max(journal.worst_s, ended - began)
            self._answered.append(trial)
            return "right"
        if answer.broken:
            if not any(began < t + ROUTER_RESTART_S and t <= ended for t in journal.router_deaths):
                journal.violation(f"the connection broke: {_describe(trial)}")
            return "broken with its router"
        if answer.error is not None:
            journal.worst_s = max(journal.worst_s, ended - began)
            code = answer.error["code"]
            if not answer.failed_clearly or code not in KNOWN_CODES:
                journal.violation(f"an unclear error {answer.status} {answer.error}: {_describe(trial)}")
            return f"error {code}"
        return "left"


def _describe(trial: Trial) -> str:
    ask = trial.ask
    salt = ask.fields["cache_salt"]
    return f"{len(ask.prompt)} + {ask.max_tokens} tokens, salt {salt}, {'stream, ' * ask.stream}{ask.end}"


def shortest(expected: Iterable[Expected], max_tokens: int) -> list[Expected]:
    """Those with prompts that are not longer."""
    return [e for e in expected if len(e.prompt) <= max_tokens]
