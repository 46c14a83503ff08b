"""A store's password, an API key and its hash: in no command line, log line, error, or page of the router."""

import re
from pathlib import Path

import httpx
import pytest
from deployments import Launch, Running
from store_servers import RedisServer

from pdkv.router.admission.api_keys import make_key

PASSWORD = "kX9-s3cret/and@more"
QUOTED = "kX9-s3cret%2Fand%40more"
PROMPT = list(range(2, 210))


def shown(deployment: Running, headers: dict[str, str]) -> str:
    """Everything that others may read of a deployment, and what the holder of a key may."""
    lines = [" ".join(process.cmdline()) for process in deployment.survivors()]
    assert len(lines) >= 3, lines  # the launcher, the router and an engine at least
    paths = ("/topology", "/metrics", "/health", "/v1/models")
    pages = [httpx.get(deployment.url + path, headers=headers, timeout=60).text for path in paths]
    return "\n".join([*lines, *pages, deployment.log])


@pytest.mark.usefixtures("real_pd")
@pytest.mark.parametrize(
    ("method", "given_by"), [("spawn", "environment"), pytest.param("fork", "file", marks=pytest.mark.slow)]
)
def test_a_password_is_seen_nowhere(launch: Launch, tmp_path: Path, method: str, given_by: str) -> None:
    """Attack 17: spawned engines had it in their argv, and so had `pd` itself, for want of another way."""
    key, key_file = make_key("alice")
    (path := tmp_path / "keys.toml").touch(mode=0o600)
    path.write_text(key_file)
    secrets = (PASSWORD, QUOTED, key, *re.findall(r'(?:"sha256:|salt = ")(\w+)"', key_file))
    with RedisServer("--requirepass", PASSWORD) as server:
        url = server.url.replace("unix://", f"unix://:{QUOTED}@")
        (tmp_path / "url").write_text(url + "\n")
        options = ["connect_timeout_s=0.5", "operation_timeout_s=0.5"]
        environment = {"PDKV_CONNECTOR_CONFIG": ",".join([f"url={url}", *options])}
        flags = ["--connector-config", f"url=@{tmp_path / 'url'}", *options]
        deployment = launch(
            *("--prefill", "0", "--decode", "1", "--start-method", method),
            *("--connector", "store", "--api-key-file", str(path)),
            *(flags if given_by == "file" else []),
            environment=environment if given_by == "environment" else {},
        )
        headers = {"authorization": f"Bearer {key}"}
        assert deployment.complete(PROMPT, headers, max_tokens=2).status_code == 200
        assert 'source="store"' in deployment.get("/metrics").text
        server.kill()
        assert deployment.complete(PROMPT[::-1], headers, max_tokens=2).status_code == 200  # with the store's errors
        text = shown(deployment, headers)
        assert not [secret for secret in secrets if secret in text]
        assert deployment.stop() == 0
    assert "kX9" not in deployment.log
