"""Two servers behind a router that starts no engine; here they are launches, which speak as vLLM does."""

import asyncio

import kills
import pytest
from deployments import Launch
from traffic import wait_until_true


@pytest.mark.slow
def test_streams_go_on_at_another_server_when_theirs_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy: a server that goes on draws with a seed of its own."""
    greedy = [ask._replace(fields={**ask.fields, "temperature": 0}) for ask in (*kills.STREAMS, *kills.LATER)]
    monkeypatch.setattr(kills, "STREAMS", greedy[: len(kills.STREAMS)])
    servers = [launch("--prefill", "0", "--decode", "1") for _ in range(2)]
    router = launch("--backend", f"vllm={servers[0].url},{servers[1].url}", "--policy", "round_robin")
    shown = router.get("/topology").json()["engines"]
    assert [(e["name"], e["role"], e["backend"], e["state"]) for e in shown] == [
        ("vllm-0", "any", "vllm", "ready"),
        ("vllm-1", "any", "vllm", "ready"),
    ]
    refused = router.complete("a", prompt_logprobs=1).json()["error"]
    assert (refused["param"], "vllm-0 (vllm) lacks it" in refused["message"]) == ("prompt_logprobs", True)
    shown = [url.complete("a", logprobs=1).json()["choices"][0]["logprobs"]["tokens"] for url in (router, servers[0])]
    assert shown[0] == shown[1]
    expected, later = kills.right_answers(servers[1]), greedy[len(kills.STREAMS) :]

    def kill() -> int:
        wait_until_true(lambda: router.get("/topology").json()["engines"][0]["state"] == "ready", "the server is back")
        front = servers[0].child_pid("pd router")
        answers, meanwhile = asyncio.run(kills.kill_under_load(router, front, when_begun=6, later=later))
        kills.check(answers, expected)
        kills.check(meanwhile, [ids[: ask.max_tokens] for ids, ask in zip(expected, later, strict=True)])
        return kills.num_migrations(router)

    wait_until_true(kill, "a stream goes on elsewhere", bound_s=kills.KILLS_BOUND_S)
