"""Conversations of many turns, played in rounds: each one's next turn has all that was said before in its prompt.

Lengths are as in ShareGPT: short questions, longer answers, both log-normal.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence

from benchmarks.load import random_prompt
from benchmarks.servers import Server
from pdkv.bench.client import Client, Reply
from pdkv.bench.serve import Conversation, Target, run_loop
from pdkv.bench.workload import Session, Turn

QUESTION, ANSWER = (40.0, 0.9), (90.0, 0.7)
"""Tokens of a question and of an answer: the median, and sigma of the logarithm."""

LONGEST = 400


def make_turns(seed: int, num_conversations: int, num_turns: int) -> list[Session]:
    """The turns of each conversation; equal seeds make equal ones."""
    rng = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(1, min(LONGEST, round(median * rng.lognormvariate(0.0, sigma))))

    return [
        Session([Turn(random_prompt(rng, length(*QUESTION)), length(*ANSWER)) for _ in range(num_turns)])
        for _ in range(num_conversations)
    ]


def play(servers: Mapping[str, Server], plan: Sequence[Session], at_once: int = 2) -> dict[str, list[float]]:
    """All conversations on each server, so many turns at a time; rounds of one turn each alternate between the servers.

    Returns:
        TTFT of each turn in seconds, by server.
    """
    talks = {name: [Conversation("completions", is_talk=True) for _ in plan] for name in servers}
    times: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(len(plan[0].turns)):
        turns = [session.turns[number] for session in plan]
        for name in sorted(servers, reverse=number % 2 == 0):
            times[name] += run_loop(_play_round(servers[name], talks[name], turns, at_once))
    return times


async def _play_round(
    server: Server, talks: Sequence[Conversation], turns: Sequence[Turn], at_once: int
) -> list[float]:
    """One turn of each; TTFT in seconds, in their order. Raises RuntimeError where one fails."""
    gate = asyncio.Semaphore(at_once)

    async def one(talk: Conversation, turn: Turn) -> float:
        async with gate:
            talk.ask(turn.prompt)
            reply = Reply(keep_text=True)
            with Client(server.url) as client:
                await client.stream("/v1/completions", talk.body(Target(server.url, server.model), turn), reply)
            if not reply.ok or len(reply.token_ids) != turn.max_tokens:
                raise RuntimeError(f"a turn failed: {reply.error}, {len(reply.token_ids)} of {turn.max_tokens} tokens")
            talk.answer(reply)
            return reply.ttft

    return list(await asyncio.gather(*map(one, talks, turns)))
