"""Conversations of many turns, played in rounds: each one's next turn has all that was said before in its prompt.

Lengths are as in ShareGPT: short questions, longer answers, both log-normal.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.client import Reply, complete
from benchmarks.load import random_prompt
from benchmarks.servers import Server
from pdkv.bench.serve import run_loop

QUESTION, ANSWER = (40.0, 0.9), (90.0, 0.7)
"""Tokens of a question and of an answer: the median, and sigma of the logarithm."""

LONGEST = 400


class Turn(NamedTuple):
    """What is said next, and how many tokens the answer has."""

    question: list[int]
    answer_len: int


class Conversation:
    """What one server has said in it, and what comes next."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.tokens: list[int] = []
        self.num_done = 0

    async def go_on(self, server: Server) -> Reply:
        """The next turn. Raises RuntimeError where it fails."""
        turn = self.turns[self.num_done]
        self.num_done += 1
        self.tokens += turn.question
        reply = await complete(
            server.url, model=server.model, prompt=self.tokens, max_tokens=turn.answer_len, token_ids=True
        )
        if not reply.ok or len(reply.token_ids) != turn.answer_len:
            raise RuntimeError(f"a turn failed: {reply.error}, {len(reply.token_ids)} of {turn.answer_len} tokens")
        self.tokens += reply.token_ids
        return reply


def make_turns(seed: int, num_conversations: int, num_turns: int) -> list[list[Turn]]:
    """The turns of each conversation; equal seeds make equal ones."""
    rng = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(1, min(LONGEST, round(median * rng.lognormvariate(0.0, sigma))))

    return [
        [Turn(random_prompt(rng, length(*QUESTION)), length(*ANSWER)) for _ in range(num_turns)]
        for _ in range(num_conversations)
    ]


def play(servers: Mapping[str, Server], plan: Sequence[Sequence[Turn]], at_once: int = 2) -> dict[str, list[float]]:
    """All conversations on each server, so many turns at a time; rounds of one turn each alternate between the servers.

    Returns:
        TTFT of each turn in seconds, by server.
    """
    talks = {name: [Conversation(turns) for turns in plan] for name in servers}
    times: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(len(plan[0])):
        for name in sorted(servers, reverse=turn % 2 == 0):
            times[name] += run_loop(_play_round(servers[name], talks[name], at_once))
    return times


async def _play_round(server: Server, conversations: Sequence[Conversation], at_once: int) -> list[float]:
    """One turn of each; TTFT in seconds, in their order."""
    gate = asyncio.Semaphore(at_once)

    async def one(conversation: Conversation) -> float:
        async with gate:
            return (await conversation.go_on(server)).ttft

    return list(await asyncio.gather(*map(one, conversations)))
