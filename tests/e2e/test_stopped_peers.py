"""Whoever waits for a process that is stopped (SIGSTOP) is told so at a deadline from the configuration, or goes on
without it, and when it runs again everything works and nothing is lost.
"""

import http.client
import itertools
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from deployments import NO_AUTHORITIES, Launch, Running
from serving_checks import Books, read_books, settled_books
from traffic import stop_process, stopped, wait_for_rest, wait_until_true

SHORT = ("--kv-load-timeout-s", "0.7", "--lease-timeout-s", "1")
"""Waited out here; loads succeed within them, too, and a lease is seen in the answers to several requests."""
PROMPT = "Whoever waits for something waits for a bounded time. " * 4
NUM_OUTPUT = 24


def ask(deployment: Running, *, salt: str = "", timeout_s: float = 30.0, **fields: Any) -> httpx.Response:
    body = {
        "model": "served", "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_OUTPUT, "ignore_eos": True,
        "return_token_ids": True, "cache_salt": salt, **fields,
    }  # fmt: skip
    headers = {"x-pd-timeout-s": str(timeout_s)}
    url = deployment.url + "/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, verify=NO_AUTHORITIES)


def tokens_of(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    assert len(token_ids) == NUM_OUTPUT
    return token_ids


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "1", "--decode", "1", *SHORT)


@pytest.fixture(scope="module")
def expected(deployment: Running) -> list[int]:
    return tokens_of(ask(deployment))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_request_whose_engine_is_stopped_ends_at_its_own_deadline(
    deployment: Running, expected: list[int], name: str
) -> None:
    """F1, F6: a status and a code, all blocks back."""
    with stopped(deployment.pids()[name]):
        reply = ask(deployment, salt=name, timeout_s=0.5)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "timeout"
    wait_for_rest(deployment)
    assert tokens_of(ask(deployment, salt=name)) == expected


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_health_is_503_while_the_only_engine_of_a_role_is_stopped(deployment: Running, name: str) -> None:
    """Attack 8: it said 200 all the while."""
    role = name.partition("-")[0]
    wait_until_true(lambda: deployment.get("/health").status_code == 200, "health before SIGSTOP")
    with stopped(deployment.pids()[name]):
        reply = wait_until_true(lambda: (r := deployment.get("/health")).status_code == 503 and r, "a 503")
        message = reply.json()["error"]["message"]
        assert message.startswith(f"no {role} engine is live: {name} has been silent for ")
        (engine,) = [e for e in deployment.get("/topology").json()["engines"] if e["name"] == name]
        assert engine["suspect"]
        assert engine["silent_for_s"] >= 3.0
    wait_until_true(lambda: deployment.get("/health").status_code == 200, "health after SIGCONT")
    assert len(tokens_of(ask(deployment, salt=f"again {name}"))) == NUM_OUTPUT


def leased_blocks(deployment: Running) -> int:
    """By the reports that come by themselves: one engine is stopped and will not answer a question."""
    engines = deployment.get("/topology", fresh=False).json()["engines"]
    return sum(int(engine["blocks"]["leased"]) for engine in engines)


def test_a_lease_ends_at_its_deadline_while_its_reader_is_stopped(deployment: Running, expected: list[int]) -> None:
    """F3, F4: the blocks come back, and a reader that comes late says nothing wrong."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(deployment.pids()["decode-0"]):
            reply = pool.submit(ask, deployment, salt="late")
            wait_until_true(lambda: leased_blocks(deployment), "a lease")
            wait_until_true(lambda: not leased_blocks(deployment), "no lease any more")
            assert not reply.done()
        assert tokens_of(reply.result()) == expected
    wait_for_rest(deployment)


@pytest.mark.parametrize(
    "connector", [("p2p",), pytest.param(("nixl", "mode=push"), marks=pytest.mark.slow)], ids="-".join
)
def test_decode_does_without_a_prefill_that_is_stopped_before_it_pushes(
    launch: Launch, expected: list[int], connector: tuple[str, ...]
) -> None:
    """F1, F13: at the load's deadline it computes the prompt itself, which is counted."""
    name, *options = connector
    flags = ("--connector", name, *(x for option in options for x in ("--connector-config", option)))
    deployment = launch("--prefill", "1", "--decode", "1", "--order", "concurrent", *flags, *SHORT)
    salts = map(str, itertools.count())

    def books_of_one() -> Books:
        before = read_books(deployment)
        assert tokens_of(ask(deployment, salt=next(salts))) == expected
        return settled_books(deployment, lambda now: (now - before).total("decode") >= len(PROMPT)) - before

    def loads() -> bool:
        return books_of_one().sources("decode")["remote"] > 0

    wait_until_true(loads, "a load: the first contact may take longer than its deadline")
    with stopped(deployment.pids()["prefill-0"]):
        books = books_of_one()
    assert books.of("kv_load_failures", "decode") == 1
    wait_until_true(loads, "a load after the stop")
    wait_for_rest(deployment)


def test_a_body_that_stops_in_the_middle_is_an_error_at_the_deadline(deployment: Running) -> None:
    host, port = deployment.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f'{head}Content-Length: 500\r\nx-pd-timeout-s: 0.3\r\n\r\n{{"model"'.encode())
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 504
        assert "0.3 s" in reply.read().decode()


def test_a_stream_that_nobody_reads_keeps_no_engine(deployment: Running) -> None:
    """F3: more than the sockets' buffers take is never written; the engines are free meanwhile."""
    host, port = deployment.url.removeprefix("http://").split(":")
    body = (
        f'{{"model": "served", "prompt": "{PROMPT}", "max_tokens": 700, "n": 8, "logprobs": 5, "stream": true, '
        '"ignore_eos": true, "temperature": 1}'
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nx-pd-timeout-s: 2\r\n"
    before = num_started(deployment)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until_true(lambda: num_started(deployment) == before + 8, "it has begun")
        wait_for_rest(deployment)
    assert deployment.complete("x").status_code == 200


def num_started(deployment: Running) -> int:
    """Choices that engines were given so far."""
    (line,) = [
        x for x in deployment.get("/metrics").text.splitlines() if x.startswith("pdkv_generations_started_total ")
    ]
    return int(float(line.split()[1]))


def test_a_stop_ends_engines_and_a_router_that_are_stopped(deployment: Running) -> None:
    """F24. The deployment's end."""
    for pid in (*deployment.pids().values(), deployment.child_pid("pd router")):
        stop_process(pid)
    deployment.process.send_signal(signal.SIGTERM)
    assert deployment.finish() == 0
    for name in ("router", "prefill-0", "decode-0"):
        assert re.search(rf"{name} \(pid \d+\) did not stop within", deployment.log), deployment.log
