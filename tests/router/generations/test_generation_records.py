"""What is known of single requests: while they run, after their end, and not for ever."""

import json
from typing import Any

import pytest
from asgi_client import call
from coroutines import run as run_main
from dispatch_rig import System, check_right, collect, live
from scripted_engine import make_request

from pdkv.errors import RequestFailed
from pdkv.router.generations.generation_records import NUM_ENDED
from pdkv.router.http.pages.admin import LauncherPages
from pdkv.wire.messages import Failed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_a_request_is_seen_while_it_runs_and_after_its_end() -> None:
    async with live(System(1, 1)) as system:
        system.backends["prefill-0"].held = True
        request = make_request(20, max_tokens=5, label="client-7", traceparent=TRACEPARENT)
        generation = system.dispatcher.start(request)
        (running,) = system.dispatcher.driver.find_requests("client-7")
        assert (running["state"], running["prefill"]) == ("running", {"engine": "prefill-0", "state": "running"})
        assert (running["decode"]["state"], running["output_tokens"], running["ended_s"]) == ("idle", 0, None)
        assert [(leg["part"], leg["ended_s"]) for leg in running["legs"]] == [("prefill", None)]
        system.backends["prefill-0"].release()
        tokens, _ = await collect(generation)
        for name in ("client-7", generation.request_id, TRACE):
            (ended,) = system.dispatcher.driver.find_requests(name)
            assert ended["generation_id"] == generation.request_id
        assert (ended["state"], ended["finish_reason"], ended["error"]) == ("finished", "length", None)
        assert (ended["prompt_tokens"], ended["output_tokens"], ended["attempt"]) == (20, len(tokens), 0)
        assert [leg["outcome"] for leg in ended["legs"]] == ["handed_off", "length"]
        assert 0 <= ended["legs"][0]["began_s"] <= ended["first_token_s"] <= ended["ended_s"] <= ended["age_s"]
        assert [t["source"] for t in ended["transfers"]] == ["prefill-0"]
        assert "prompt_token_ids" not in json.dumps(ended)


async def test_a_failed_request_says_why_and_a_retried_one_where_it_was() -> None:
    async with live(System(2, 1)) as system:
        for name in system.backends:
            system.backends[name].held = True
        generation = system.dispatcher.start(make_request(label="retried"))
        system.backends["prefill-0"].die()
        (seen,) = system.dispatcher.driver.find_requests("retried")
        assert (seen["attempt"], [leg["engine"] for leg in seen["legs"]]) == (1, ["prefill-0", "prefill-1"])
        system.backends["prefill-1"].engine.tasks.clear()
        system.backends["prefill-1"].say(Failed(generation.request_id, 1, "kv_corrupted", "it does not work", False))
        with pytest.raises(RequestFailed):
            await collect(generation)
        (failed,) = system.dispatcher.driver.find_requests("retried")
        assert (failed["state"], failed["error"]) == ("failed", {"code": "kv_corrupted", "message": "it does not work"})
        assert [leg["outcome"] for leg in failed["legs"]] == ["", "kv_corrupted"]


async def test_only_the_last_are_known_and_one_id_may_name_several() -> None:
    async with live(System(1, 1)) as system:
        first = await check_right(system, make_request(20, 1, label="first"))
        for _ in range(3):
            await check_right(system, make_request(20, 1, label="same"))
        assert len(system.dispatcher.driver.find_requests("same")) == 3
        assert system.dispatcher.driver.find_requests("") == []
        for _ in range(NUM_ENDED - 3):
            await check_right(system, make_request(20, 1, label="more"))
        assert system.dispatcher.driver.find_requests("first") == []
        assert system.dispatcher.driver.find_requests(first.request_id) == []
        assert len(system.dispatcher.driver.find_requests("more")) == 64


def test_the_endpoint_answers_with_json() -> None:
    class Known:
        @property
        def driver(self) -> "Known":
            return self

        @property
        def pools(self) -> list["Known"]:
            return [self]

        def find_requests(self, name: str) -> list[dict[str, Any]]:
            return [{"request_id": name}] if name == "a/b c" else []

    async def main() -> None:
        unused: Any = None  # nothing is asked of engines, or of their caches
        app = LauncherPages(Known(), unused, unused).app()  # type: ignore[arg-type]
        found = await call(app, "GET", "/admin/requests/a/b c")
        assert (found.status, found.json()) == (200, {"requests": [{"request_id": "a/b c"}]})
        for name in ("", "x" * 1000):
            missing = await call(app, "GET", f"/admin/requests/{name}")
            assert (missing.status, missing.json()["error"]["code"]) == (404, "request_not_found")
            assert len(missing.body) < 600

    run_main(main())
