"""Answers that are gathered whole: one budget for all, shared by clients."""

import asyncio
import json

from asgi_client import begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say, tokens
from small_app import MODEL, ids, make_app

from pdkv.config import HttpLimits

COMPLETIONS = "/v1/completions"
LIMITS = HttpLimits(max_answer_memory=512 << 10)
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


def test_an_answer_that_alone_could_be_too_large_is_refused_at_once() -> None:
    dispatcher = FakeDispatcher(say(ids("ab")))
    body = BODY | {"n": 8, "logprobs": 20}
    reply = run(call(make_app(dispatcher, limits=LIMITS), "POST", COMPLETIONS, body))
    assert reply.status == 400
    assert "800 tokens in all choices" in reply.json()["error"]["message"]
    assert "524288 bytes (--max-answer-memory)" in reply.json()["error"]["message"]
    assert dispatcher.requests == []
    assert run(call(make_app(dispatcher, limits=LIMITS), "POST", COMPLETIONS, body | {"stream": True})).status == 200


async def test_answers_that_are_gathered_have_one_budget_and_others_go_on() -> None:
    """F37."""
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher, limits=LIMITS)
    reply, task = begin(app, "POST", COMPLETIONS, BODY)
    generation = await dispatcher.next_generation(0)
    while not generation.aborted:
        generation.put(tokens(*ids("a" * 100)))
        await asyncio.sleep(0)
    await task
    assert reply.status == 400
    assert "(--max-answer-memory)" in reply.json()["error"]["message"]
    for number in (1, 2):
        reply, task = begin(app, "POST", COMPLETIONS, BODY)
        (await dispatcher.next_generation(number)).put(tokens(*ids("ok"), end="stop"))
        await task
        assert json.loads(reply.body)["choices"][0]["text"] == "ok"
