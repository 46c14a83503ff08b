"""What a server of another engine lacks, and requests ask for."""

from typing import Any

import pytest
from asgi_client import call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, eos, ids, make_app

from pdkv.router.engines.foreign_kinds import lacking, read_backends

LACKS = lacking(read_backends(["openai=http://a"]))
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def ask(path: str, **fields: Any) -> tuple[int, Any]:
    app = make_app(FakeDispatcher(say([*ids("ab"), eos()])), lacks=LACKS)
    reply = run(call(app, "POST", path, {"model": MODEL, **fields}))
    return reply.status, reply.json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 0}, "seed"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_k": 3}, "top_k"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"cache_salt": "s"}, "cache_salt"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_it_is_refused_by_the_name_of_its_field_and_of_the_server(fields: dict[str, Any], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    status, body = ask(path, **{"prompt": "Hello", **fields} if "messages" not in fields else fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(f"{param} is not possible here: openai-0 (openai) lacks it")


def test_what_has_no_effect_and_what_the_router_does_itself_is_no_reason() -> None:
    harmless = {"seed": 1, "temperature": 0, "ignore_eos": False, "stop_token_ids": [], "repetition_penalty": 1.0}
    assert ask("/v1/completions", prompt="Hello", n=2, stop="x", cache_salt="", **harmless)[0] == 200
