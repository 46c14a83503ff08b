"""Two models behind one router with fronts: each has its own text, until the engine of one dies."""

import json
import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import httpx
import pytest
import warm
from deployments import NO_AUTHORITIES, Launch, Running
from other_weights import change_norms, rewrite
from traffic import wait_until_true

ADDRESS = "127.{}.{}.{}".format(*(3 << 21 | os.getpid()).to_bytes(3))


@pytest.fixture
def next_model(served_model: Path, tmp_path: Path) -> Path:
    """Other weights, and a tokenizer whose ids of letters are others."""
    path = tmp_path / "next"
    shutil.copytree(served_model, path)
    rewrite(path, change_norms)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = sorted(token for token in vocabulary if token.isalpha())
    ids = [vocabulary[letter] for letter in letters]
    vocabulary |= dict(zip(letters, reversed(ids), strict=True))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def pd(launch: Running, *arguments: str, status: int = 0) -> str:
    done = warm.run([*warm.COMMAND, *arguments], env={**os.environ, "TMPDIR": str(launch.directory)})
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def prompt_ids(launch: Running, model: str) -> list[int]:
    reply = launch.complete("abc", model=model, max_tokens=4, return_token_ids=True)
    assert (reply.status_code, reply.json()["model"]) == (200, model), reply.text
    ids: list[int] = reply.json()["choices"][0]["prompt_token_ids"]
    return ids


@pytest.mark.slow
def test_two_models_behind_one_router(launch: Launch, next_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(uuid.uuid4().hex)
    join = ["--cluster-key-file", str(key)]
    router = launch(
        "--prefill", "0", "--decode", "1", "--router-fronts", "2", "--join-listen", f"tcp://{ADDRESS}:6999", *join,
        "--pool", f"next={next_model}", "--explain-share", "1",
    )  # fmt: skip
    assert router.complete("abc", model="next").status_code == 503
    place = ["--name", "n-0", "--listen", f"tcp://{ADDRESS}:7000", "--join", f"tcp://{ADDRESS}:6999", "--pool", "next"]
    own = ["--model", str(next_model), "--kv-cache-memory", "8MiB", "--threads", "1", *join]
    directory = Path(tempfile.mkdtemp(prefix="e2e-"))
    engine = Running([*own, *place], {}, directory, command="engine")
    try:
        wait_until_true(lambda: router.complete("abc", model="next").status_code == 200, "the pool serves")
        ids = {name: prompt_ids(router, name) for name in ("served", "next")}
        assert ids["served"] != ids["next"]
        text = router.complete("abc", model="next", max_tokens=8).json()["choices"][0]["text"]
        assert "got next=101" in pd(router, "split", "next=101", status=2)
        assert pd(router, "split", "next=100") == "next 100 %\n"
        reply = router.complete("abc", max_tokens=8)
        assert (reply.json()["model"], reply.json()["choices"][0]["text"]) == ("served", text)
        pools = router.get("/topology").json()["pools"]
        assert [(p["name"], p["models"], p["split_percent"], p["fault"]) for p in pools] == [
            ("next", ["next"], 100, "")
        ]
        body = {"model": "next", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        url, headers = router.url + "/v1/completions", {"x-pd-timeout-s": "10"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60, verify=NO_AUTHORITIES) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            engine.stop(signal.SIGKILL)
            assert [line for line in lines if "[DONE]" in line or "error" in line], "it ends"
        wait_until_true(lambda: router.complete("abc", model="next").status_code == 503, "the pool is dead")
        assert "the pool 'next' serves no request now" in router.complete("abc", model="next").text
        assert router.complete("abc", max_tokens=4).status_code == 200, "split requests are the launch's again"
        assert router.get("/health").json()["pools"].keys() == {"next"}
    finally:
        engine.discard()
        shutil.rmtree(directory)
