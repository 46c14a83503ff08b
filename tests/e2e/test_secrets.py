"""A store's password: in no command line, log line, error, or page of the router."""

from pathlib import Path

import pytest
from deployments import Launch, Running
from store_servers import RedisServer

PASSWORD = "kX9-s3cret/and@more"
QUOTED = "kX9-s3cret%2Fand%40more"
PROMPT = list(range(2, 210))


def shown(deployment: Running) -> str:
    """Everything that others may read of a deployment."""
    lines = [" ".join(process.cmdline()) for process in deployment.survivors()]
    assert len(lines) >= 4, lines  # the launcher, the router and two engines at least
    pages = [deployment.get(path).text for path in ("/topology", "/metrics", "/health", "/v1/models")]
    return "\n".join([*lines, *pages, deployment.log])


@pytest.mark.usefixtures("real_pd")
@pytest.mark.parametrize(
    ("method", "given_by"),
    [("spawn", "environment"), pytest.param("fork", "file", marks=pytest.mark.slow)],
)
def test_a_password_is_seen_nowhere(launch: Launch, tmp_path: Path, method: str, given_by: str) -> None:
    """Attack 17: spawned engines had it in their argv, and so had `pd` itself, for want of another way."""
    with RedisServer("--requirepass", PASSWORD) as server:
        url = server.url.replace("unix://", f"unix://:{QUOTED}@")
        (tmp_path / "url").write_text(url + "\n")
        options = ["connect_timeout_s=0.5", "operation_timeout_s=0.5"]
        environment = {"PDKV_CONNECTOR_CONFIG": ",".join([f"url={url}", *options])}
        flags = ["--connector-config", f"url=@{tmp_path / 'url'}", *options]
        deployment = launch(
            *["--start-method", method, "--connector", "store", *(flags if given_by == "file" else [])],
            environment=environment if given_by == "environment" else {},
        )
        assert deployment.complete(PROMPT, max_tokens=2).status_code == 200
        assert 'source="store"' in deployment.get("/metrics").text
        server.kill()
        assert deployment.complete(PROMPT[::-1], max_tokens=2).status_code == 200  # with the store's errors
        text = shown(deployment)
        assert PASSWORD not in text
        assert QUOTED not in text
        assert deployment.stop() == 0
    assert "kX9" not in deployment.log
