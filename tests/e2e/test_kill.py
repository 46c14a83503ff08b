"""Requests that end badly leave nothing behind; engines are stopped, and each kind of process is killed under load: it
comes back, untouched requests are right, and none hangs.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from deployments import Launch, Running
from kills import (
    KILLS_BOUND_S,
    LATER,
    NUM_STREAMS,
    PROMPTS,
    check_all_engines,
    check_that_no_client_notices,
    kill_under_load,
    right_answers,
)
from traffic import (
    Answer,
    Ask,
    client_of,
    connections,
    holdings,
    send,
    send_all,
    stopped,
    wait_for_rest,
    wait_until_true,
)

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
    """Used as it is, and then killed piece by piece."""
    return module_launch("--prefill", "2", "--decode", "2", "--policy", "round_robin")


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


def test_requests_with_aborts_disconnects_and_tiny_deadlines(deployment: Running) -> None:
    """Memory must not grow in both halves: an allocator's free lists and heap fill up once, a leak goes on."""
    soak = Soak(deployment)
    soak.run(60, at_once=AT_ONCE)
    first = holdings(deployment)
    soak.run(70, at_once=AT_ONCE)
    second = holdings(deployment)
    soak.run(70, at_once=AT_ONCE)
    third = holdings(deployment)
    assert min(soak.ends[kind] for kind in ("right", "timeout", "close", "drop")) > 5, soak.ends
    assert soak.ask_for_all(at_once=1) == list(soak.expected.values())
    for before, after in pairwise((first, second, third)):
        assert after.descriptors == before.descriptors
        assert after.mappings == before.mappings
        assert after.shared_memory_files == before.shared_memory_files
    growth = {
        name: min(second.resident[name] / size, third.resident[name] / second.resident[name])
        for name, size in first.resident.items()
    }
    assert max(growth.values()) <= MAX_GROWTH, growth


def num_moves(deployment: Running) -> float:
    moves = re.search(r"^pdkv_moves_total (.*)$", deployment.get("/metrics").text, re.MULTILINE)
    assert moves is not None
    return float(moves[1])


def test_requests_leave_an_engine_that_is_stopped_under_load(deployment: Running) -> None:
    """F21. Router 2: those that it had, and those that came before it was a suspect, all missed their deadlines."""
    before = num_moves(deployment)

    async def stop_under_load() -> list[Answer]:
        turns, enough = asyncio.Semaphore(6), asyncio.Event()
        async with client_of(deployment) as client:

            async def one(number: int) -> Answer:
                async with turns:
                    if number == 12:
                        enough.set()
                    return await send(client, Ask(PROMPTS[1], 24, fields={"cache_salt": str(number)}))

            tasks = [asyncio.create_task(one(number)) for number in range(36)]
            await enough.wait()
            with stopped(deployment.pids()["decode-0"]):
                answers = await asyncio.gather(*tasks)
                (engine,) = [e for e in deployment.get("/topology").json()["engines"] if e["name"] == "decode-0"]
                assert engine["suspicion"].startswith("has been silent for ")
                wait_until_true(lambda: deployment.get("/health").status_code == 200, "the other engine does")
            return [*answers, await one(36)]

    answers = asyncio.run(stop_under_load())
    wait_for_rest(deployment)
    assert len({tuple(answer.token_ids or ()) for answer in answers}) == 1
    assert answers[0].token_ids is not None
    assert num_moves(deployment) > before


@pytest.fixture(scope="module")
def expected(deployment: Running) -> list[list[int]]:
    return right_answers(deployment)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-1"])
def test_a_killed_engine_takes_no_other_engines_requests_with_it(
    deployment: Running, expected: list[list[int]], victim: str
) -> None:
    check_that_no_client_notices(deployment, expected, victim)


def test_a_killed_router_comes_back_and_what_it_had_asked_for_ends(
    deployment: Running, expected: list[list[int]]
) -> None:
    engines = deployment.pids()

    def kill_router() -> bool:
        router = deployment.child_pid("pd router")
        streams, meanwhile = asyncio.run(kill_under_load(deployment, router, when_begun=NUM_STREAMS, later=LATER))
        for answer, token_ids in zip(streams, expected, strict=True):
            assert answer.broken or answer.token_ids == token_ids
        for answer, token_ids in zip(meanwhile, expected, strict=True):  # the launcher's socket keeps them for the next
            assert answer.broken or answer.status == 503 or answer.token_ids == token_ids[:20]
        deployment.wait_for_line("launcher: router is ready again")
        wait_until_true(lambda: deployment.pids() == engines, "each engine is known again, untouched")
        return any(answer.broken for answer in streams)

    wait_until_true(kill_router, "a kill amid streams", KILLS_BOUND_S)
    check_all_engines(deployment, expected)


def test_an_engine_comes_back_when_the_fork_server_is_gone_too(deployment: Running, expected: list[list[int]]) -> None:
    engines = deployment.pids()
    os.kill(deployment.child_pid("pd fork-server"), signal.SIGKILL)
    os.kill(engines["decode-1"], signal.SIGKILL)
    pid = int(deployment.wait_for_line(rf"router: decode-1 is ready \(pid (?!{engines['decode-1']}\b)(\d+)")[1])
    assert deployment.pids() == {**engines, "decode-1": pid}
    check_all_engines(deployment, expected)


def arenas_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the engines' shared memory that these processes have mapped."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {line.split()[4] for line in lines if "/memfd:pdkv" in line}
    return inodes


def test_a_killed_launcher_leaves_no_process_and_no_memory(launch: Launch) -> None:
    """F24: one of the engines has two ranks, each with a pool of its own."""
    deployment = launch("--prefill", "1", "--decode", "1", "--decode-tp", "2")
    engines = deployment.get("/topology").json()["engines"]
    arenas = arenas_of(pid for engine in engines for pid in engine["ranks"])
    assert len(arenas) >= 3
    streams, _ = asyncio.run(kill_under_load(deployment, deployment.process.pid, when_begun=NUM_STREAMS, later=[]))
    assert all(answer.token_ids is not None or answer.broken or answer.failed_clearly for answer in streams)
    assert deployment.finish(killed=True) == -signal.SIGKILL
    assert not arenas & arenas_of(psutil.pids())
    assert not list(deployment.directory.iterdir())
    with pytest.raises(httpx.ConnectError):
        deployment.get("/health")
