"""docs/operations.md is true: each of its commands, and a stop, under load without a loss."""

import asyncio
import contextlib
import os
import re
import resource
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from deployments import Launch, Running
from steady_load import PROMPTS, check_whole, steady_load
from traffic import Answer, Ask, client_of, send, stopped, wait_until_true

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("pd ")
]


def pd(deployment: Running, *arguments: str, status: int = 0) -> str:
    """Standard output of a `pd` command that finds the only launch there is; the errors where it must fail."""
    done = warm.run([*warm.COMMAND, *arguments], env={**os.environ, "TMPDIR": str(deployment.directory)})
    assert done.returncode == status, done.stdout + done.stderr + deployment.log
    return done.stdout if status == 0 else done.stderr


def roles(deployment: Running) -> dict[str, str]:
    """Of all engines, which must be ready."""
    engines = deployment.get("/topology").json()["engines"]
    assert {e["state"] for e in engines} == {"ready"}
    return {e["name"]: e["role"] for e in engines}


def test_the_commands_of_the_page_in_turn_lose_nothing(launch: Launch) -> None:
    """On one prefill and one decode engine, each of which is stood in for while it is restarted.

    Few clients: where engines starve they are suspects, and the last other one gets no new role.
    """
    first, *rest = COMMANDS
    deployment = launch(*shlex.split(first)[2:])
    before = deployment.pids()
    outputs: dict[str, str] = {}
    with steady_load(deployment, num_clients=2) as load:
        for command in rest:
            wait_until_true(lambda: not any(e["suspect"] for e in topology(deployment)), "nobody is starved")
            outputs[command] = pd(deployment, *shlex.split(command)[1:])
            load.wait_for_answers(3)
            if command == "pd scale --decode 2":
                assert roles(deployment) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
            if command == "pd role decode-1 prefill":
                assert roles(deployment)["decode-1"] == "prefill"
                assert set(deployment.pids().values()) > set(before.values()), "nobody was restarted for it"
    assert outputs["pd scale --decode 2"] == "there are 1 prefill, 2 decode\n"
    assert outputs["pd drain decode-1"] == "decode-1 is drained\n"
    assert re.search(r"^decode-0 +decode +ready +\d+ +\d+$", outputs["pd engines"], re.MULTILINE), outputs
    assert roles(deployment) == {"prefill-0": "prefill", "decode-0": "decode"}
    after = deployment.pids()
    assert set(before.values()).isdisjoint(after.values())
    assert "--prefill must be at least 1, got 0" in pd(deployment, "scale", "--prefill", "0", status=2)
    assert "draining decode-0 would leave no engine" in pd(deployment, "drain", "decode-0", status=2)
    assert re.fullmatch(r"http://\S+ has stopped \(pid \d+\)\n", pd(deployment, "stop"))
    assert deployment.finish() == 0
    assert "no launch of this user is ready" in pd(deployment, "stop", status=1)


@pytest.fixture(scope="module")
def few_open_files() -> Iterator[None]:
    """The soft limit on open files is below the hard one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1] - 1), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def fleet(module_launch: Launch, few_open_files: None) -> Running:
    """Two prefill engines and one decode engine, to which another one comes."""
    return module_launch("--prefill", "2", "--decode", "1", "--drain-s", "60")


def test_a_router_that_is_started_again_knows_the_engines_of_now(fleet: Running) -> None:
    """And what was said about them. Then all are restarted at once: what runs is moved and stays whole."""
    pd(fleet, "scale", "--decode", "2")
    pd(fleet, "drain", "prefill-1")
    pd(fleet, "role", "decode-0", "any")
    os.kill(fleet.child_pid("pd router"), signal.SIGKILL)
    fleet.wait_for_line("launcher: router is ready again")
    wait_until_true(lambda: {e["state"] for e in topology(fleet)} == {"ready"}, "all engines known")
    assert {e["name"]: (e["role"], e["drained"]) for e in topology(fleet)} == {
        "prefill-0": ("prefill", False), "prefill-1": ("prefill", True),
        "decode-0": ("any", False), "decode-1": ("decode", False),
    }  # fmt: skip
    before = fleet.pids()
    with steady_load(fleet, num_clients=3, max_tokens=200):
        pd(fleet, "resume", "prefill-1")
        shown = pd(fleet, "status")
        assert pd(fleet, "restart", "--rolling", "--drain-s", "0") == "4 engines were restarted\n"
    assert re.search(
        r"^requests: [1-9]\d* in flight, \d+ of their choices queued, \d+\.\d/s begun$", shown, re.MULTILINE
    )
    assert re.search(r"^tokens: [1-9]\d*\.\d/s out, ", shown, re.MULTILINE)
    assert re.search(r"^decode-0 +any +ready +\d+ +\d+ +\d+% +\d+%$", shown, re.MULTILINE)
    assert "go on elsewhere" in fleet.log
    after = fleet.pids()
    assert before.keys() == after.keys()
    assert set(before.values()).isdisjoint(after.values())


def topology(deployment: Running) -> list[dict[str, object]]:
    engines: list[dict[str, object]] = deployment.get("/topology").json()["engines"]
    return engines


def num_decoding(engines: list[dict[str, Any]]) -> int:
    """Requests that decode engines have."""
    return sum(engine["requests"] for engine in engines if engine["role"] in ("decode", "any"))


def test_a_stop_under_load_answers_what_has_begun(fleet: Running) -> None:
    """Every process of the launch may have as many open files as the host allows."""
    for process in fleet.survivors():
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard, process.name()
    decodes = [pid for name, pid in fleet.pids().items() if name.startswith("decode")]
    asks = [Ask(PROMPTS[number % 4], 400, stream=number % 2 == 0) for number in range(12)]

    async def stop_under_load() -> tuple[list[Answer], Answer]:
        async with client_of(fleet) as client:
            answers = [asyncio.create_task(send(client, ask)) for ask in asks]

            async def until_decoding(num: int) -> None:
                async with asyncio.timeout(60):
                    while num_decoding((await client.get("/topology")).json()["engines"]) < num:
                        await asyncio.sleep(0)

            await until_decoding(1)
            with contextlib.ExitStack() as stack:  # none of them ends meanwhile
                for pid in decodes:
                    stack.enter_context(stopped(pid))
                await until_decoding(len(asks))
                await asyncio.to_thread(pd, fleet, "stop", "--wait-s", "0", status=1)
                line = await asyncio.to_thread(
                    fleet.wait_for_line, r"router: stopping: (\d+) requests still run, at most 60 s"
                )
                assert int(line[1]) == len(asks)
                assert (await client.get("/health")).json()["error"]["code"] == "draining"
                late = await send(client, Ask("late", 5))
            return await asyncio.gather(*answers), late

    answers, late = asyncio.run(stop_under_load())
    check_whole(list(zip(asks, answers, strict=True)), 400)
    assert late.status == 503
    assert late.error is not None
    assert late.error["code"] == "draining"
    assert fleet.finish() == 0
    said = [line.partition(": ")[2] for line in fleet.lines]
    assert said.index("stopping") < said.index("stopped")
