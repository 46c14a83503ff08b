"""Workloads of random prompts, sent by the client of `pd bench`."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.bench.client import Reply
from pdkv.bench.report import Run
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.bench.workload import one_turn


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
