"""Two launches that fall back on each other."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deployments import Launch, Running
from traffic import wait_until_true


def told(deployment: Running) -> dict[str, Any]:
    """What its router says of the other one, without asking engines that are stopped."""
    return dict(deployment.get("/topology", fresh=False).json()["fallback"])


def stop_engine(deployment: Running) -> int:
    """Stop it until the router knows; returns its pid."""
    pid = next(e["pid"] for e in deployment.get("/topology").json()["engines"] if e["name"] != "fallback")
    os.kill(pid, signal.SIGSTOP)
    wait_until_true(lambda: told(deployment)["reason"] == "disaster", "it is noticed")
    return int(pid)


@pytest.mark.slow
def test_a_launch_without_an_engine_is_served_by_the_other_one_and_two_of_them_make_no_loop(launch: Launch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engines = "--prefill", "0", "--decode", "1"
    other = launch(*engines, "--fallback", f"vllm=http://127.0.0.1:{port}")
    own = launch(*engines, "--port", str(port), "--fallback", f"vllm={other.url}")
    for each in (own, other):
        wait_until_true(lambda each=each: told(each)["open"], "it is taken into use")

    def ask() -> str:
        return str(own.complete("One two", max_tokens=12, temperature=0).json()["choices"][0]["text"])

    expected, stopped = ask(), [stop_engine(own)]
    assert ask() == expected
    assert told(own)["sent"] == {"disaster": 1}
    assert own.get("/health").json()["fallback"] == "disaster"
    assert 'pdkv_fallback_choices_total{reason="disaster"} 1.0' in own.get("/metrics", fresh=False).text
    stopped.append(stop_engine(other))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)  # each has none now, and the other one's request goes no further
        wait_until_true(lambda: not told(own)["open"], "it was refused")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert answer.result() == expected
    assert told(other)["sent"] == {}
