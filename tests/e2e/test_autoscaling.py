"""A launch that scales itself: a burst brings an engine, which leaves when it is over; nothing is lost or left."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployments import Launch, Running
from traffic import wait_until_true

PROFILE = """
step_s = 0.005
row_s = 0.0
prompt_token_s = 0.005
context_token_s = 0.0
num_layers = 1
num_kv_heads = 1
head_size = 16
max_model_len = 1024
vocab_size = 4096
"""
"""A prompt of 100 tokens takes half a second."""


def prefill_engines(deployment: Running) -> list[str]:
    engines = deployment.get("/topology", fresh=False).json()["engines"]
    return [e["name"] for e in engines if e["role"] == "prefill" and e["state"] == "ready" and not e["draining"]]


@pytest.mark.slow
def test_a_burst_brings_an_engine_that_leaves_afterwards(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(PROFILE)
    deployment = launch(
        "--model", f"paced:{tmp_path}/slow.toml", "--served-model-name", "served", "--no-check-finite",
        "--autoscale", "prefill=1..2,decode=1..2", "--slo-ttft-ms", "800", "--scale-down-after-s", "2",
        "--drain-s", "5",
    )  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda i: deployment.complete([10 + i] * 100, max_tokens=4), range(10))
        wait_until_true(lambda: len(prefill_engines(deployment)) == 2, "a second prefill engine takes part")
        assert [answer.status_code for answer in answers] == [200] * 10
        wait_until_true(lambda: len(prefill_engines(deployment)) == 1, "one of them has left")
        num_lines = len(deployment.log)
        answers = pool.map(lambda i: deployment.complete([30 + i] * 100, max_tokens=4), range(10))
        wait_until_true(lambda: "prefill-1 is started" in deployment.log[num_lines:], "one more starts again")
        deployment.process.send_signal(signal.SIGINT)
        assert deployment.finish() == 0
        assert [answer.status_code for answer in answers][:1] == [200]
