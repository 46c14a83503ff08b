"""An operator has an engine's next steps traced while it serves."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from deployments import Launch


@pytest.mark.slow
def test_an_admin_gets_a_trace_of_an_engine_under_load(launch: Launch) -> None:
    admin = {"authorization": "Bearer profile-test"}
    deployment = launch("--prefill", "1", "--decode", "1", environment={"PDKV_API_KEY": "profile-test"})

    def profile(**body: Any) -> httpx.Response:
        return httpx.post(deployment.url + "/admin/profile", json=body, headers=admin, timeout=60.0)

    assert httpx.post(deployment.url + "/admin/profile", json={"engine": "decode-0"}).status_code == 401
    assert (profile(engine="decode-7").status_code, profile(engine="decode-0", steps=0).status_code) == (404, 400)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(profile, engine="decode-0", steps=256, seconds=8)
        answers = [pool.submit(deployment.complete, "One", admin, max_tokens=200) for _ in range(2)]
        assert all(answer.result().status_code == 200 for answer in answers)
        again = profile(engine="decode-0", steps=1)
        told = first.result().json()
    assert (again.status_code, "already" in again.text) == (409, True) or told["steps"] < 256
    (path,) = deployment.directory.rglob(told["file"])
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"].split()[0] for event in events if event.get("cat") == "user_annotation"}
    assert {"pdkv.step", "pdkv.decode", "pdkv.transfer"} <= names
    assert (told["engine"], told["bytes"]) == ("decode-0", path.stat().st_size)
