"""kill -9 of each kind of process under load: it comes back, untouched requests are right, and nobody hangs."""

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path

import httpx
import psutil
import pytest
from deployments import Launch, Running
from kills import (
    KILLS_BOUND_S,
    LATER,
    NUM_STREAMS,
    check_all_engines,
    check_that_no_client_notices,
    kill_under_load,
    right_answers,
)
from traffic import wait_until_true


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "2", "--decode", "2")


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


def arenas_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the engines' shared memory that these processes have mapped."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {line.split()[4] for line in lines if "/memfd:pdkv" in line}
    return inodes


def test_a_killed_launcher_leaves_no_process_and_no_memory(launch: Launch) -> None:
    """F24."""
    deployment = launch("--prefill", "1", "--decode", "2")
    arenas = arenas_of(deployment.pids().values())
    assert len(arenas) == 3
    streams, _ = asyncio.run(kill_under_load(deployment, deployment.process.pid, when_begun=NUM_STREAMS, later=[]))
    assert all(answer.token_ids is not None or answer.broken or answer.failed_clearly for answer in streams)
    assert deployment.finish(killed=True) == -signal.SIGKILL
    assert not arenas & arenas_of(psutil.pids())
    with pytest.raises(httpx.ConnectError):
        deployment.get("/health")
