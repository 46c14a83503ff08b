"""Decode engines are killed amid requests of every kind: what clients get is what they get when nothing happens."""

import asyncio
from pathlib import Path

import httpx
import pytest
from deployments import Launch
from faults.replies import CASES, ask_all, check_kill
from faults.tokens import cut_by_token
from kills import KILLS_BOUND_S, STREAMS, kill_under_load, num_migrations, right_answers
from traffic import wait_for_engines, wait_for_rest, wait_until_true


@pytest.mark.parametrize(
    "connector", [("shared_memory",), pytest.param(("nixl", "mode=push"), marks=pytest.mark.slow)], ids="-".join
)
def test_no_reply_shows_that_all_decode_engines_were_killed(launch: Launch, connector: tuple[str, ...]) -> None:
    """Once when the first tokens are out, once some tokens later: with nobody left, all wait for one to come back."""
    name, *options = connector
    flags = ("--connector", name, *(x for option in options for x in ("--connector-config", option)))
    deployment = launch("--prefill", "1", "--decode", "2", *flags)
    plain = asyncio.run(ask_all(deployment, CASES, "undisturbed"))
    cut = len(plain["sampled"].texts[0]) * 2 // 3
    stop = plain["sampled"].texts[0][cut : cut + 12]
    cases = {**CASES, "stop": {**CASES["sampled"], "stop": [stop]}}
    expected = {**plain, **asyncio.run(ask_all(deployment, {"stop": cases["stop"]}, "undisturbed, too"))}
    assert expected["stop"].reasons == {0: "stop"}
    assert len(expected["stop"].texts[0]) > cut // 2
    wait_for_rest(deployment)
    for kill_at in (3, 20 * len(cases)):
        check_kill(deployment, cases, expected, kill_at)


def test_no_reply_shows_at_which_token_decode_was_killed(launch: Launch, tmp_path: Path) -> None:
    """n=4, logprobs, echo, a penalty and a seed in one request, and a stop string that begins before the cut."""
    outcomes = list(cut_by_token(launch, "shared_memory", tmp_path, rounds=1, beside={}))
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert (outcome.requests, outcome.failed, outcome.wrong, outcome.hung) == (2, 0, 0, 0), outcome
        assert outcome.there == 2
        assert outcome.counters["migrations"] >= 2


def test_streams_beyond_prefill_s_length_outlive_their_decode_engine(launch: Launch) -> None:
    """Prefill has a sixth of the length that decode has, and that is advertised; some prompts exceed it, too."""
    long, most = 160, 1000
    lengths = ("--prefill-max-model-len", str(long), "--decode-max-model-len", str(most))
    deployment = launch("--prefill", "1", "--decode", "2", "--policy", "round_robin", *lengths)
    assert [len(ask.prompt) + ask.max_tokens > long for ask in STREAMS] == [True] * len(STREAMS)
    assert {len(ask.prompt) > long for ask in STREAMS} == {True, False}
    assert httpx.get(deployment.url + "/v1/models").json()["data"][0]["max_model_len"] == most
    whole = deployment.complete([65] * (most - 50), max_tokens=50, ignore_eos=True).json()
    assert whole["usage"]["completion_tokens"] == 50
    assert deployment.complete([65] * (most - 50), max_tokens=51).json()["error"]["code"] == "context_length_exceeded"
    expected = right_answers(deployment)

    def kill() -> int:
        before, pids = num_migrations(deployment), deployment.pids()
        victim = pids["decode-0"]
        streams, _ = asyncio.run(kill_under_load(deployment, victim, when_begun=len(STREAMS), later=[]))
        assert [answer.token_ids for answer in streams] == expected, deployment.log
        wait_for_engines(deployment, [victim])
        return num_migrations(deployment) - before

    wait_until_true(lambda: kill() >= 2, "a kill amid streams", KILLS_BOUND_S)
    wait_for_rest(deployment)
