"""API keys of a real deployment: who gets in, whose cache it is, a reload by SIGHUP, and where no secret is seen."""

import re
import signal
from pathlib import Path
from typing import Any

import httpx
from deployments import Launch, Running

from pdkv.router.admission.api_keys import make_key

PROMPT = list(range(2, 210))


def post(deployment: Running, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "served", "prompt": PROMPT, "max_tokens": 2, **fields}
    return httpx.post(deployment.url + "/v1/completions", json=body, headers=headers, timeout=60)


def cached(deployment: Running, key: str) -> int:
    reply = post(deployment, key)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_keep_strangers_out_and_tenants_apart_and_are_read_again_on_sighup(launch: Launch, tmp_path: Path) -> None:
    """Attacks 16 and 17: `cached_tokens` tells nobody what another key's clients asked, and no secret is seen.

    That command lines have none either is seen in `test_secrets.py`.
    """
    made = {name: make_key(name) for name in ("alice", "bob", "carol")}
    keys = {name: key for name, (key, _) in made.items()}
    path = tmp_path / "keys.toml"
    path.write_text(made["alice"][1] + made["bob"][1])
    path.chmod(0o600)
    deployment = launch("--prefill", "0", "--decode", "1", "--api-key-file", str(path), "--protect-metrics")
    for key in (None, keys["carol"], keys["alice"] + "x"):
        reply = post(deployment, key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert cached(deployment, keys["alice"]) == 0
    assert cached(deployment, keys["alice"]) > 0
    assert cached(deployment, keys["bob"]) == 0
    assert deployment.get("/topology").status_code == 401

    path.write_text(made["alice"][1] + made["carol"][1])
    deployment.process.send_signal(signal.SIGHUP)
    deployment.wait_for_line(r"2 API keys are in force \(new: carol; gone: bob\)")
    assert post(deployment, keys["bob"]).status_code == 401
    assert cached(deployment, keys["carol"]) == 0
    assert cached(deployment, keys["alice"]) > 0  # her cache has outlived the reload

    shown = [deployment.log, *(reply.text for reply in map(deployment.get, ("/health", "/metrics", "/v1/models")))]
    hidden = [word for _, text in made.values() for word in re.findall(r'(?:"sha256:|salt = ")(\w+)"', text)]
    assert len(hidden) == 6
    assert not [secret for secret in (*keys.values(), *hidden) if secret in "\n".join(shown)]
    assert deployment.stop() == 0


def test_a_key_file_that_is_wrong_ends_the_launch_with_what_is_wrong(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "a"\n')
    path.chmod(0o600)
    deployment = launch("--decode", "1", "--api-key-file", str(path), wait=False)
    assert deployment.finish() == 2
    assert f"the key file {path}: Object missing required field `hash`" in deployment.log
