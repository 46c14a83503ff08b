"""A load sends what its sessions say, when they say it, and reports what became of each request."""

from collections.abc import Sequence
from typing import Any

import pytest
from word_server import run

from pdkv.bench.datasets import Maker, Shape, agents
from pdkv.bench.serve import Pace
from pdkv.bench.workload import Session, Turn, one_turn

TALK = [Session((Turn([1, 2], 2), Turn([3], 1), Turn([4], 1)))]
TEXTS = [Session((Turn("a b", 2), Turn("c", 1)))]


@pytest.mark.parametrize(
    ("sessions", "endpoint", "field", "expected"),
    [
        (TALK, "completions", "prompt", [[1, 2], [1, 2, 7, 7, 3], [1, 2, 7, 7, 3, 7, 4]]),
        (TEXTS, "completions", "prompt", ["a b", "a bww c"]),
        (
            TEXTS,
            "chat",
            "messages",
            [
                [{"role": "user", "content": "a b"}],
                [
                    {"role": "user", "content": "a b"},
                    {"role": "assistant", "content": "ww"},
                    {"role": "user", "content": "c"},
                ],
            ],
        ),
    ],
    ids=["ids", "texts", "chat"],
)
def test_a_turn_follows_the_answers_before_it(
    sessions: Sequence[Session], endpoint: str, field: str, expected: list[Any]
) -> None:
    found, bodies, _ = run(sessions, endpoint=endpoint)
    assert [body[field] for body in bodies] == expected
    assert all(sent.reply.ok for sent in found.requests)
    assert [sent.turn for sent in found.requests] == [*range(len(expected))]


def test_a_failed_request_ends_its_session_and_no_other() -> None:
    sessions = [TALK[0], one_turn([9], 3)]
    found, bodies, _ = run(sessions, status=lambda body: 503 if body["prompt"] == [1, 2] else 200)
    assert sorted((sent.session, sent.reply.error) for sent in found.requests) == [(0, "HTTP 503: no"), (1, None)]
    assert len(bodies) == found.num_unsent == 2


def test_a_server_that_never_answers_costs_the_bound() -> None:
    found, *_ = run([one_turn([1], 1)], status=lambda body: 0, timeout_s=0.01)
    assert "no end within 0.01 s" in str(found.requests[0].reply.error)


def test_concurrency_is_bounded_and_what_is_added_to_bodies_arrives() -> None:
    sessions = [one_turn([n], 1) for n in range(20)]
    _, bodies, most = run(sessions, pace=Pace(max_concurrency=2), extra={"top_k": 4}, ignore_eos=False)
    assert most <= 2
    assert len(bodies) == 20
    assert all(body["top_k"] == 4 and "ignore_eos" not in body for body in bodies)


def test_an_agents_session_has_the_published_shape() -> None:
    shape = Shape(num_prompts=33, max_context=6800)
    [session] = agents(shape, Maker(0, as_text=False))
    answers = [turn.max_tokens for turn in session.turns]
    prompts, context = [], 0
    for turn in session.turns:
        context += len(turn.prompt)
        prompts.append(context)
        context += turn.max_tokens
    assert len(session.turns) == 33
    assert sum(prompts) / sum(answers) == pytest.approx(131, rel=0.15)
    assert 0.9 * 6800 <= context <= 6800 * 1.01
    assert 1 - prompts[-1] / sum(prompts) == pytest.approx(0.94, abs=0.02)
