"""Two models behind one application: names, splits, keys, and a pool without engines."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, ids, served

from pdkv.errors import ConfigError
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.engines.address import read_split
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.app import create_app, model_provider
from pdkv.router.request import PoolNews, Split

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Two:
    """The launch's own model, whose every answer is "own", and the pool "next", whose every one is "next"."""

    def __init__(self, keys: KeyRing | None = None, **shares: float) -> None:
        self.own, self.next = FakeDispatcher(say(ids("own"))), FakeDispatcher(say(ids("next")))
        self.own.pools.add("next", ["next", "big"], cast(Dispatcher, self.next))
        self.own.pools.split(shares)
        model = dataclasses.replace(served(64, ["next", "big"]), pool="next")
        both = dataclasses.replace(served(), others=[model])
        self.app = create_app(cast(Dispatcher, self.own), both, keys=keys)

    def ask(self, model: str | None = MODEL, path: str = COMPLETIONS, key: str = "", **fields: Any) -> Exchange:
        body = {"max_tokens": 8, **fields} | ({} if model is None else {"model": model})
        if path == COMPLETIONS:
            body = {"prompt": "x", **body}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return run(call(self.app, "POST", path, body, headers))

    def said(self, *args: Any, **fields: Any) -> str:
        reply = self.ask(*args, **fields)
        assert reply.status == 200, reply.body
        [choice] = reply.json()["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    def get(self, path: str) -> str:
        return run(call(self.app, "GET", path, None)).body.decode()


def test_a_name_chooses_the_model_and_its_engines() -> None:
    two = Two()
    assert [two.said(name) for name in (MODEL, None, "next", "big")] == ["own", "own", "next", "next"]
    assert two.ask("big").json()["model"] == "next"
    reply = two.ask("other")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "this server has 'small', 'next', 'big'" in reply.json()["error"]["message"]
    assert [r.pool for r in (*two.own.requests, *two.next.requests)] == ["", "", *["next"] * 3]
    listed = run(call(two.app, "GET", "/v1/models", None)).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [(MODEL, 128), ("next", 64), ("big", 64)]


def test_a_split_moves_requests_and_keeps_conversations_together() -> None:
    two = Two(next=30)
    turns: list[dict[str, str]] = []
    for number in range(60):
        first = {"role": "user", "content": f"question {number}"}
        turns = [{"role": "system", "content": "s"}, first, {"role": "assistant", "content": "a"}, first]
        said = two.said(path=CHAT, messages=turns[:2])
        assert said == two.said(path=CHAT, messages=turns), "the same conversation"
        assert said == two.said(path=CHAT, messages=turns), "again"
    assert 6 <= sum(request.pool == "next" for request in two.next.requests) / 3 <= 30
    splits = [request.split for request in (*two.own.requests, *two.next.requests)]
    assert [s.pool for s in splits if s] == [r.pool for r in (*two.own.requests, *two.next.requests)]
    small = {s.draw for s in splits if s and s.pool}
    assert {Split(draw, {"next": 40.0}).pool for draw in small} == {"next"}, "a larger share keeps those it had"
    texts = {two.said(prompt=f"{n}", session_id="one session") for n in range(5)}
    assert len(texts) == 1
    assert two.ask().json()["model"] == MODEL


def test_all_or_none_are_split() -> None:
    two = Two(next=100)
    assert {two.said(prompt=f"{n}") for n in range(5)} == {"next"}
    assert two.ask(prompt="y").json()["model"] == MODEL, "the name that was asked for"
    assert two.said(prompt="x" * 60, max_tokens=8) == "own", "too long for the pool's model"
    assert two.own.requests[-1].split == Split(two.own.requests[-1].split.draw, {"next": 100.0}, ["next"])  # type: ignore[union-attr]
    of_ids = {"prompt": [5, 6]}, {"prompt": [[5, 6]]}, {"logit_bias": {"5": 1}}, {"return_token_ids": True}
    for named in (*of_ids, {"prompt_logprobs": 0}):
        assert two.said(**named) == "own", "ids are the own model's"  # type: ignore[arg-type]
    two.own.pools.split({"next": 0})
    assert {two.said(prompt=f"{n}") for n in range(5)} == {"own"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"next": "101"}, "got next=101"),
        ({"next": "-1"}, "got next=-1"),
        ({"next": "some"}, "got next=some"),
        ({"next": "nan"}, "got next=nan"),
        ({"nxt": "5"}, "0 to 100 of one of next, b was expected, got nxt=5"),
        ({"next": "60", "b": "50"}, "at most 100 percent in all"),
    ],
)
def test_a_split_that_is_none_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_split(given, ["next", "b"])


def test_a_pool_without_engines_is_named_and_gets_no_split_requests() -> None:
    two = Two(next=100)
    two.next.is_down = lambda: True  # type: ignore[method-assign]
    two.next.ready = False
    reply = two.ask("next")
    assert (reply.status, reply.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "the pool 'next' serves no request now: no decode engine is live" in reply.json()["error"]["message"]
    assert two.said() == "own"
    assert '"pools":{"next":"no decode engine is live"}' in two.get("/health")


def test_a_pool_that_dies_while_a_request_is_tokenized_gets_no_split_one() -> None:
    two = Two(next=100)
    asked: list[None] = []
    two.next.is_down = lambda: asked.append(None) or len(asked) > 1  # type: ignore[method-assign, func-returns-value]
    assert two.said() == "own"
    assert [request.split and request.split.without for request in two.own.requests] == [["next"]]


def test_a_key_has_the_models_that_its_line_names(tmp_path: Path) -> None:
    (key, line), path = make_key("a"), tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(f'{line}models = ["{MODEL}"]\n')
    two = Two(KeyRing(path), next=100)
    assert two.said(key=key) == "own", "not by a split, either"
    reply = two.ask("next", key=key)
    assert (reply.status, "this server has 'small'" in reply.json()["error"]["message"]) == (404, True)
    headers = {"authorization": f"Bearer {key}"}
    listed = run(call(two.app, "GET", "/v1/models", None, headers)).json()["data"]
    assert [card["id"] for card in listed] == [MODEL]
    assert run(call(two.app, "GET", "/v1/models/next", None, headers)).status == 404
    assert run(call(two.app, "POST", "/tokenize", {"model": "next", "prompt": "x"}, headers)).status == 404


def test_metrics_of_a_pool_have_its_label() -> None:
    two = Two()
    for name in (MODEL, "next", "next"):
        two.said(name)
    text = two.get("/metrics")
    assert 'pdkv_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
    assert 'pdkv_requests_total{endpoint="completions",outcome="ok",pool="next"} 2.0' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "each family once"
    assert "pdkv_requests_in_flight 0.0" in text
    assert 'pdkv_requests_in_flight{pool="next"} 0.0' in text


def test_all_models_are_known_before_a_dispatcher_has_told_of_engines() -> None:
    both = dataclasses.replace(served(), others=[served(64, ["next"])])
    now = model_provider(PoolNews, both)()
    assert [(model.name, model.max_model_len) for model in (now, *now.others)] == [(MODEL, 128), ("next", 64)]
