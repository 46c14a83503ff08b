"""kill -9 of an engine under load, and what must hold of every answer, whatever the connector."""

import asyncio
import os
import signal
from typing import Any

from deployments import Running
from serving_checks import settled_books
from traffic import Answer, Ask, client_of, send, send_all, wait_for_engines, wait_for_rest, wait_until_true

NUM_STREAMS, NUM_TOKENS = 12, 160
PROMPTS = [f"Question {number}: " + "and so on, " * (number % 5 * 8) for number in range(NUM_STREAMS)]
FEW_TOKENS: dict[str, Any] = {"allowed_token_ids": [67, 68, 69, 70]}
"""What a stream may consist of. Without the compiled attention, who goes on with one computes in tiles what was
computed token by token, and logits differ in their last bits: of four tokens, next to no draw is another one.
"""
STREAMS = [Ask(prompt, NUM_TOKENS, stream=True, fields=FEW_TOKENS) for prompt in PROMPTS]
LATER = [Ask(prompt, 20, stream=bool(number % 2), fields=FEW_TOKENS) for number, prompt in enumerate(PROMPTS)]
"""What is asked while the victim is gone and afterwards: the beginnings of the same texts."""

KILLS_BOUND_S = 180.0
"""A client that a busy machine holds up sees streams begin that have ended: such a kill is repeated for so long."""


def kill_engines(deployment: Running) -> None:
    """kill -9 of all of them at once; returns when others are there and nothing is counted."""
    killed = [*deployment.pids().values()]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for_engines(deployment, killed)
    settled_books(deployment, lambda now: not any(map(now.total, now.roles)))


async def send_now(deployment: Running, asks: list[Ask]) -> list[Answer]:
    """Send them all at once."""
    async with client_of(deployment) as client:
        return await send_all(client, asks, at_once=NUM_STREAMS)


def right_answers(deployment: Running) -> list[list[int]]:
    """The right answers to STREAMS."""
    answers = asyncio.run(send_now(deployment, STREAMS))
    token_ids = [answer.token_ids or [] for answer in answers]
    assert {len(ids) for ids in token_ids} == {NUM_TOKENS}
    return token_ids


async def kill_under_load(
    deployment: Running, pid: int, *, when_begun: int, later: list[Ask]
) -> tuple[list[Answer], list[Answer]]:
    """Kill `pid` when so many of STREAMS have begun; ask `later` at once. Returns the answers to both."""
    begun: set[int] = set()
    enough = asyncio.Event()

    def on_event(stream: int) -> None:
        begun.add(stream)
        if len(begun) >= when_begun:
            enough.set()

    async with client_of(deployment) as client:
        streams = [
            asyncio.create_task(send(client, ask, lambda _, number=number: on_event(number)))  # type: ignore[misc]
            for number, ask in enumerate(STREAMS)
        ]
        for number, stream in enumerate(streams):  # one that fails before it begins is for the caller to see
            stream.add_done_callback(lambda _, number=number: on_event(number))  # type: ignore[misc]
        await enough.wait()
        os.kill(pid, signal.SIGKILL)
        meanwhile = await send_all(client, later, at_once=NUM_STREAMS)
        return await asyncio.gather(*streams), meanwhile


def check(answers: list[Answer], expected: list[list[int]]) -> None:
    """Every answer is the right one: no client notices that an engine died."""
    for number, (answer, token_ids) in enumerate(zip(answers, expected, strict=True)):
        assert answer.token_ids is not None, f"stream {number}: {answer}"
        pairs = enumerate(zip(answer.token_ids, token_ids, strict=True))
        wrong = next((i for i, (mine, right) in pairs if mine != right), None)
        assert wrong is None, f"stream {number} by {answer.prefill} and {answer.decode} is wrong from token {wrong} on"


def num_migrations(deployment: Running) -> int:
    """Generations that have gone on elsewhere, mid-stream."""
    (line,) = [x for x in deployment.get("/metrics").text.splitlines() if x.startswith("pdkv_migrations_total ")]
    return int(float(line.split()[1]))


def check_all_engines(deployment: Running, expected: list[list[int]]) -> None:
    """Everything rests, answers are right, and every engine has a part in them: one that was starved is passed over."""
    wait_for_rest(deployment)
    took_part: set[str | None] = set()

    def have_all_taken_part() -> bool:
        answers = asyncio.run(send_now(deployment, LATER))
        assert [answer.token_ids for answer in answers] == [ids[:20] for ids in expected]
        took_part.update(name for answer in answers for name in (answer.prefill, answer.decode))
        return took_part == {"prefill-0", "prefill-1", "decode-0", "decode-1"}

    wait_until_true(have_all_taken_part, "a part of every engine")
    wait_for_rest(deployment)


def check_that_no_client_notices(deployment: Running, expected: list[list[int]], victim: str) -> None:
    """Kill an engine under load: all streams are whole, it comes back, and all is as before."""
    if victim.startswith("decode"):
        wait_until_true(lambda: _kill(deployment, expected, victim), "a kill amid streams", KILLS_BOUND_S)
    else:
        _kill(deployment, expected, victim)
    check_all_engines(deployment, expected)


def _kill(deployment: Running, expected: list[list[int]], victim: str) -> int:
    """Kill it under load; returns how many streams have moved when it has come back."""
    # A decode engine dies in the middle of all streams, a prefill engine while most prompts are still waiting.
    when_begun = NUM_STREAMS if victim.startswith("decode") else 1
    before, num_before = deployment.pids(), num_migrations(deployment)
    streams, meanwhile = asyncio.run(kill_under_load(deployment, before[victim], when_begun=when_begun, later=LATER))
    check(streams, expected)
    check(meanwhile, [ids[:20] for ids in expected])
    assert f"launcher: {victim} (pid {before[victim]}) killed by SIGKILL" in deployment.log
    pid = int(deployment.wait_for_line(rf"router: {victim} is ready \(pid (?!{before[victim]}\b)(\d+)")[1])
    assert deployment.pids() == {**before, victim: pid}
    return num_migrations(deployment) - num_before
