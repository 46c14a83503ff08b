"""Workloads of random prompts and streams of exact lengths, sent by the client of `pd bench`."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.bench.client import Client, Reply
from pdkv.bench.report import Run
from pdkv.bench.serve import Conversation, Pace, Target, run_loop, send
from pdkv.bench.workload import Turn, one_turn


class Workload(NamedTuple):
    """What is sent, in a closed loop. Equal seeds send equal prompts and lengths in equal order."""

    num_requests: int
    input_len: int
    output_len: tuple[int, int]  # tokens, both ends included
    concurrency: int = 1
    seed: int = 0


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids in [10, 4000)."""
    return rng.choices(range(10, 4000), k=length)


def send_all(url: str, model: str, workload: Workload) -> Run:
    """Send a workload and wait for all answers; one of another length than was asked for has failed."""
    rng = random.Random(workload.seed)
    prompts = [random_prompt(rng, workload.input_len) for _ in range(workload.num_requests)]
    sessions = [one_turn(prompt, rng.randint(*workload.output_len)) for prompt in prompts]
    run = run_loop(send(Target(url, model), sessions, Pace(max_concurrency=workload.concurrency)))
    for reply, wanted in ((sent.reply, sent.wanted) for sent in run.requests):
        if reply.ok and reply.num_tokens != wanted:
            reply.error = f"{reply.num_tokens} tokens instead of {wanted}"
    return run


def check(replies: Sequence[Reply]) -> None:
    """Raises RuntimeError if one failed: a figure over what is left would be wrong."""
    errors = [reply.error for reply in replies if not reply.ok]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(replies)} requests failed: {errors[0]}")


def measure(url: str, model: str, workload: Workload) -> Run:
    """`send_all`. Raises RuntimeError: a request failed."""
    run = send_all(url, model, workload)
    check(run.replies)
    return run


async def complete(url: str, *, model: str, prompt: list[int], max_tokens: int, reply: Reply | None = None) -> Reply:
    """Stream one greedy completion of exactly `max_tokens` tokens. Never raises: the reply says what went wrong.

    Args:
        reply: is filled in while the answer comes, for callers that cancel this before its end.
    """
    ahead = Conversation("completions", is_talk=False)
    ahead.ask(prompt)
    body = ahead.body(Target(url, model), Turn(prompt, max_tokens))
    reply = Reply() if reply is None else reply
    with Client(url) as client:
        await client.stream("/v1/completions", body, reply)
    if reply.ok and reply.num_tokens != max_tokens:
        reply.error = f"{reply.num_tokens} tokens instead of {max_tokens}"
    return reply
