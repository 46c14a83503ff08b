"""Failures of the field that no other test provokes with real processes (docs/field-failures.md has them all)."""

import asyncio
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from deployments import Launch, Running
from traffic import Ask, client_of, send, stopped, wait_for_rest, wait_until_true

from pdkv.connector_kit.rig.sockets import listeners

PROMPT = "What many prompts begin with, some blocks long. "
LONG_S = "600"


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    """No lease ends by its deadline while a test runs, and no ping tells of a client that has left."""
    flags = ("--kv-load-timeout-s", "500", "--lease-timeout-s", LONG_S, "--stream-ping-s", LONG_S)
    return module_launch("--prefill", "1", "--decode", "1", *flags)


@pytest.fixture(scope="module")
def pushing(module_launch: Launch) -> Running:
    """The same over p2p."""
    return module_launch("--prefill", "1", "--decode", "1", "--lease-timeout-s", LONG_S, "--connector", "p2p")


def leased_blocks(deployment: Running) -> int:
    engines = deployment.get("/topology", fresh=False).json()["engines"]
    return sum(int(engine["blocks"]["leased"]) for engine in engines)


def test_a_client_that_leaves_before_decode_starts_ends_the_lease_at_once(deployment: Running) -> None:
    """F3: decode is stopped, so that nothing but the router's word can end the lease."""

    async def leave() -> None:
        async with client_of(deployment) as client:
            request = asyncio.create_task(send(client, Ask(PROMPT, 50, stream=True)))
            await asyncio.to_thread(wait_until_true, lambda: leased_blocks(deployment), "a lease")
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    with stopped(deployment.pids()["decode-0"]):
        asyncio.run(leave())
        wait_until_true(lambda: not leased_blocks(deployment), "no lease any more")
    wait_for_rest(deployment)


def test_clients_that_use_one_request_id_do_not_meet(deployment: Running) -> None:
    """F14: it is a label; each gets the answer to its own prompt."""
    prompts = [PROMPT * (number % 3 + 1) + str(number) for number in range(8)]
    alone = [deployment.complete(prompt, max_tokens=12).json()["choices"] for prompt in prompts]

    async def ask() -> list[object]:
        async with client_of(deployment) as client:
            bodies = [{"model": "served", "prompt": prompt, "temperature": 0, "max_tokens": 12} for prompt in prompts]
            posts = [client.post("/v1/completions", json=b, headers={"x-request-id": "the-same"}) for b in bodies]
            replies = await asyncio.gather(*posts)
        assert {reply.headers["x-request-id"] for reply in replies} == {"the-same"}
        return [reply.json()["choices"] for reply in replies]

    assert asyncio.run(ask()) == alone


@pytest.mark.parametrize("field", ["kv_transfer_params", "remote_host", "handoff", "ticket"])
def test_transfer_parameters_of_a_client_are_refused_and_nobody_is_called(deployment: Running, field: str) -> None:
    """F15."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        value = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "remote_engine_id": "prefill-0"}
        reply = deployment.complete(PROMPT, **{field: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
        assert deployment.complete(PROMPT).status_code == 200
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_pickles_on_every_socket_run_nothing(pushing: Running, tmp_path: Path) -> None:
    """F16: bare, behind lengths of several kinds, and as a body."""
    deployment = pushing
    assert deployment.complete(PROMPT).status_code == 200  # now the group between the engines listens, too
    mark = tmp_path / "it-ran"
    bomb = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()  # of pickle's protocol 0: os.mkdir(mark)
    sizes = [len(bomb).to_bytes(size, order) for size in (1, 4, 8) for order in ("little", "big")]  # type: ignore[arg-type]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    found = {listener for process in processes(deployment) for listener in listeners(process.pid)}
    assert len(found) > 4
    for listener in found:
        for prefix in (b"", head, *sizes):
            with socket.socket(listener.family, listener.type) as connection:
                connection.settimeout(10)
                connection.connect(listener.address)
                connection.sendall(prefix + bomb)
    assert deployment.complete(PROMPT).status_code == 200
    wait_for_rest(deployment)
    assert not mark.exists()
    os.mkdir(mark)  # which the bomb could have made
    wait_until_true(lambda: json.loads(deployment.get("/health").text) == {"status": "ok"}, "health")


def processes(deployment: Running) -> list[psutil.Process]:
    launcher = psutil.Process(deployment.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def check_the_last_request_frees_its_blocks(deployment: Running) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda number: deployment.complete(PROMPT * 4 + str(number)), range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    wait_for_rest(deployment)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["deployment", "pushing"])
def test_the_last_request_frees_its_blocks_without_another_one(name: str, request: pytest.FixtureRequest) -> None:
    """F19: nothing comes after it, and leases last long."""
    check_the_last_request_frees_its_blocks(request.getfixturevalue(name))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_last_request_over_nixl_frees_its_blocks_without_another_one(launch: Launch, mode: str) -> None:
    flags = ["--connector", "nixl", "--connector-config", f"mode={mode}"]
    check_the_last_request_frees_its_blocks(
        launch("--prefill", "1", "--decode", "1", "--lease-timeout-s", LONG_S, *flags)
    )
