"""Two servers behind a router that starts no engine; here they are launches, which speak as vLLM does."""

import asyncio
import signal

from deployments import Launch
from kills import LATER, STREAMS, check, kill_under_load, right_answers


def test_streams_go_on_at_another_server_when_theirs_is_killed(launch: Launch) -> None:
    servers = [launch("--prefill", "0", "--decode", "1") for _ in range(2)]
    router = launch("--backend", f"vllm={servers[0].url},{servers[1].url}", "--policy", "round_robin")
    shown = router.get("/topology").json()["engines"]
    assert [(e["name"], e["role"], e["backend"], e["state"]) for e in shown] == [
        ("vllm-0", "any", "vllm", "ready"),
        ("vllm-1", "any", "vllm", "ready"),
    ]
    refused = router.complete("a", prompt_logprobs=1).json()["error"]
    assert (refused["param"], "vllm-0 (vllm) lacks it" in refused["message"]) == ("prompt_logprobs", True)
    expected = right_answers(servers[1])
    answers, later = asyncio.run(
        kill_under_load(router, servers[0].process.pid, when_begun=len(STREAMS) // 2, later=LATER)
    )
    servers[0].finish(killed=True)
    check(answers, expected)
    check(later, [ids[: ask.max_tokens] for ids, ask in zip(expected, LATER, strict=True)])
    assert router.get("/topology").json()["engines"][0]["state"] == "dead"
    assert servers[1].stop(signal.SIGTERM) == 0
