"""Weights that are replaced under a running fleet: who restarts with them stays out, and no answer is wrong."""

import os
import shutil
import signal
from pathlib import Path

from deployments import Launch
from other_weights import WEIGHTS, merge_adapter, rewrite
from traffic import wait_until_true

PROMPTS = [f"{i} bottles of beer on the wall" for i in range(4)]


def test_an_engine_that_restarts_with_other_weights_stays_out(
    launch: Launch, served_model: Path, tmp_path: Path
) -> None:
    """Attack 1b: a mixed fleet was ready, and answers differed."""
    model = Path(shutil.copytree(served_model, tmp_path / "served"))
    deployment = launch("--model", str(model), "--prefill", "1", "--decode", "2", "--policy", "round_robin")

    def answers() -> list[str]:
        return [deployment.complete(p, max_tokens=12).json()["choices"][0]["text"] for p in PROMPTS]

    def engine(name: str) -> dict[str, object]:
        return next(e for e in deployment.get("/topology").json()["engines"] if e["name"] == name)

    expected = answers()
    os.link(model / WEIGHTS, tmp_path / "original")
    rewrite(model, merge_adapter)
    os.kill(deployment.pids()["decode-0"], signal.SIGKILL)
    said = deployment.wait_for_line(
        r"launcher: decode-0 did not start again: (decode-0 has model ([0-9a-f]{32}), .* model ([0-9a-f]{32}) .*)"
    )
    assert said[2] != said[3]
    for _ in range(2):  # on each decode engine that there is
        assert answers() == expected
    refused = engine("decode-0")
    assert (refused["state"], refused["pid"], refused["reason"]) == ("refused", None, said[1])
    assert engine("decode-1")["state"] == engine("prefill-0")["state"] == "ready"

    (tmp_path / "original").replace(model / WEIGHTS)
    wait_until_true(lambda: engine("decode-0")["state"] == "ready", "the engine is taken back")
    assert engine("decode-0")["reason"] is None
    for _ in range(2):
        assert answers() == expected
