"""What Codex and the Agents SDK send to /v1/responses, by the shapes of Codex's public source, and what they get."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from asgi_client import Exchange, call
from codex_bodies import CODEX, DOCS, HISTORY, PATCH, SHELL
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from response_events import typed_events, whole_of
from small_app import MODEL, eos, ids, make_app, served, tokenizer

from pdkv.config import HttpApi, HttpLimits
from pdkv.errors import InvalidRequest, RequestAborted
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.http.responses_api import tools as own_tools
from pdkv.router.http.responses_api.prepare import RESPONSES, Kept, prepare_responses
from pdkv.router.http.responses_api.protocol import ResponsesBody
from pdkv.router.http.responses_api.store import ResponseStore
from pdkv.text import Tokenizer

PATH = "/v1/responses"
SENT: dict[str, Any] = {"model": MODEL, **CODEX}
SHOWN = Tokenizer(
    tokenizer()._backend,
    chat_template="{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}\n"
    "{% endfor %}",
)


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def ask(answer: str, body: dict[str, Any], **options: Any) -> Exchange:
    """One request; the prompts are in `prompts`."""
    dispatcher = FakeDispatcher(say([*ids(answer), eos()]))
    app = make_app(dispatcher, api=HttpApi(tool_parser="hermes"), max_model_len=4000, **options)
    exchange = run(call(app, "POST", PATH, body))
    prompts[:] = [tokenizer().decode(request.prompt_token_ids) for request in dispatcher.requests]
    return exchange


prompts: list[str] = []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("given", ["first turn", "a history"])
@pytest.mark.parametrize("policy", ["reject", "ignore"])
def test_a_request_of_codex(given: str, stream: bool, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("small_app.tokenizer", lambda: SHOWN)
    body = {**SENT, "stream": stream, "stream_options": SENT["stream_options"] if stream else None}
    if given == "a history":
        body["input"] = HISTORY
    exchange = run(
        call(
            make_app(
                dispatcher := FakeDispatcher(say([*ids("Hi"), eos()])),
                api=HttpApi(tool_parser="hermes", unknown_fields=policy),
                max_model_len=4000,
            ),
            "POST",
            PATH,
            body,
        )
    )
    assert exchange.status == 200, exchange.body
    reply = whole_of(typed_events(exchange.body)) if stream else exchange.json()
    assert (reply["output"][0]["content"][0]["text"], reply["tools"]) == ("Hi", [SHELL, PATCH, DOCS])
    assert (reply["store"], reply["service_tier"]) == (False, "default")
    prompt = SHOWN.decode(dispatcher.requests[0].prompt_token_ids)
    told, _ = json.JSONDecoder().raw_decode(prompt)
    assert [tool["function"]["name"] for tool in told] == ["shell", "apply_patch", "mcp__docs__find"]
    assert told[1]["function"]["description"].endswith("start: /x/")
    assert told[1]["function"]["parameters"]["required"] == ["input"]
    if given == "a history":
        assert '[mcp__docs__find {"q": 1}]' in prompt
        assert '[apply_patch {"input": "a \\"é\\"\\n"}]' in prompt
        assert "tool=found" in prompt
        assert "tool=done" in prompt
        assert "example.org" not in prompt


def test_what_was_left_out_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_tools, "_log_limit", own_tools.LogLimit())
    with caplog.at_level(logging.INFO, "pdkv.router.http.responses_api.tools"):
        assert ask("Hi", SENT).status == 200
        assert ask("Hi", SENT).status == 200
    assert [r.getMessage() for r in caplog.records] == [
        "left out tools that this server does not have: image_generation, tool_search, web_search"
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (hermes("shell", command=["ls"]), {"name": "shell", "arguments": '{"command": ["ls"]}'}),
        (hermes("mcp__docs__find", q=1), {"name": "find", "namespace": "mcp__docs__", "arguments": '{"q": 1}'}),
        (hermes("apply_patch", input='*** "é"\n+x'), {"name": "apply_patch", "input": '*** "é"\n+x'}),
        (hermes("apply_patch", patch="+x"), {"name": "apply_patch", "input": '{"patch": "+x"}'}),  # as it is
        (hermes("unheard_of"), {"name": "unheard_of", "arguments": "{}"}),
    ],
)
def test_calls_come_back_as_the_client_named_its_tools(answer: str, expected: dict[str, str], stream: bool) -> None:
    body = {**SENT, "stream": stream, "stream_options": None}
    exchange = ask(answer, body)
    reply = whole_of(typed_events(exchange.body)) if stream else exchange.json()
    [item] = reply["output"]
    assert item["type"] == ("custom_tool_call" if "input" in expected else "function_call")
    assert {name: item[name] for name in item if name not in ("id", "call_id", "type", "status")} == expected
    again = [*SENT["input"], item, {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}]
    assert ask("Hi", {**body, "input": again}).status == 200  # it can be sent back as it is


def test_a_plain_namespace_gives_its_functions_no_other_names() -> None:
    tools = [{"type": "namespace", "name": "functions", "tools": [SHELL]}, {**DOCS, "name": "docs"}]
    own = own_tools.read_own_tools(tools)
    assert list(own.names) == ["shell", "docs__find"]
    assert own.places == ["tools[0].tools[0]", "tools[1].tools[0]"]


# --- previous_response_id -----------------------------------------------------------------------------------------


class Rig:
    """An application with the keys "a" and "b"."""

    def __init__(self, tmp_path: Path, answer: str = "Fine.", **limits: Any) -> None:
        made = {name: make_key(name) for name in ("a", "b")}
        self.keys = {name: key for name, (key, _) in made.items()}
        self.file = tmp_path / "keys"
        self.file.write_text("\n".join(lines for _, lines in made.values()))
        self.file.chmod(0o600)
        self.dispatcher = FakeDispatcher(say([*ids(answer), eos()]))
        self.ring = KeyRing(self.file)
        self.app = make_app(
            self.dispatcher,
            keys=self.ring,
            limits=HttpLimits(**limits),
            api=HttpApi(tool_parser="hermes"),
            max_model_len=4000,
        )

    def ask(self, key: str, given: Any, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        body = {"model": MODEL, "input": given, **fields}
        exchange = run(call(self.app, "POST", PATH, body, headers))
        streamed = exchange.headers["content-type"].startswith("text/event-stream")
        return whole_of(typed_events(exchange.body)) if streamed else exchange.json()

    @property
    def prompt(self) -> str:
        return tokenizer().decode(self.dispatcher.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_goes_on_from_a_response(tmp_path: Path, stream: bool) -> None:
    rig = Rig(tmp_path)
    first = rig.ask("a", "Hello", instructions="Be brief.", stream=stream)
    assert (first["store"], first["previous_response_id"]) == (True, None)
    message = [{"role": "user", "content": [{"type": "input_text", "text": "And?"}]}]
    second = rig.ask("a", message, previous_response_id=first["id"], stream=stream)
    assert second["previous_response_id"] == first["id"]
    assert rig.prompt == "user: Hello\nassistant: Fine.\nuser: And?\n"  # instructions are of one request alone
    rig.ask("a", "More", previous_response_id=second["id"])
    assert rig.prompt == "user: Hello\nassistant: Fine.\nuser: And?\nassistant: Fine.\nuser: More\n"
    rig.ask("a", "Else", previous_response_id=first["id"])  # another way from there
    assert rig.prompt == "user: Hello\nassistant: Fine.\nuser: Else\n"


def test_the_results_of_a_call_follow_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, hermes("mcp__docs__find", q=1))
    first = rig.ask("a", "Hello", tools=[DOCS])
    [item] = first["output"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "found"}
    assert rig.ask("a", [output], tools=[DOCS], previous_response_id=first["id"])["status"] == "completed"
    assert rig.prompt.endswith("tool: found\n")


def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    first = rig.ask("a", "Hello")
    unkept = rig.ask("a", "Hello", store=False)
    assert unkept["store"] is False
    told = set()
    for key, name in (("b", first["id"]), ("a", unkept["id"]), ("a", "resp_0"), ("a", "")):
        error = rig.ask(key, "x", previous_response_id=name).get("error")
        if not name:
            assert error is None  # no id: no conversation
            continue
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
        told.add(error["message"].replace(name, "ID"))
    assert len(told) == 1, "another key's response is told from none"
    other, lines = make_key("a")  # another one takes its name over
    rig.file.write_text(lines)
    rig.ring.reload()
    rig.keys["a"] = other
    assert rig.ask("a", "x", previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"


def test_nothing_is_kept_without_keys_or_time(tmp_path: Path) -> None:
    first = ask("Hi", {"model": MODEL, "input": "x"}).json()
    assert first["store"] is False
    error = ask("Hi", {"model": MODEL, "input": "x", "previous_response_id": first["id"]}).json()["error"]
    assert (error["param"], "no responses are kept" in error["message"]) == ("previous_response_id", True)
    rig = Rig(tmp_path, keep_responses_s=0)
    assert rig.ask("a", "x")["store"] is False
    assert "no responses are kept" in rig.ask("a", "x", store=True)["error"]["message"]


def test_failed_responses_are_not_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_kept_responses=1)  # no room for any
    first = rig.ask("a", "Hello")
    assert rig.ask("a", "x", previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"


def test_a_hundred_thousand_responses_take_what_they_may() -> None:
    now = itertools.count()
    store = ResponseStore(1 << 20, 1e9, 1 << 20, lambda: float(next(now)))
    store.put("small", "r", None, b'"mine"')
    for number in range(100_000):
        store.put("large", f"r{number}", None, b'"x"')
        assert store.held <= 1 << 20
    assert store.conversation("small", "r") == [b'"mine"'], "who keeps little is not pushed out"
    assert store.conversation("large", "r99999") == [b'"x"']
    with pytest.raises(InvalidRequest, match="r0"):
        store.conversation("large", "r0")


def test_responses_are_forgotten_in_time() -> None:
    now = [0.0]
    store = ResponseStore(1 << 20, 10.0, 100, lambda: now[0])
    store.put("a", "1", None, b'"1"')
    now[0] = 6.0
    store.put("a", "2", "1", b'"2"')
    assert store.conversation("a", "2") == [b'"1"', b'"2"']
    now[0] = 15.0  # it was used nine seconds ago
    assert store.conversation("a", "1") == [b'"1"']
    now[0] = 26.0
    with pytest.raises(InvalidRequest):
        store.conversation("a", "2")
    assert store.held == 0
    store.put("a", "3", None, b"x" * 101)
    with pytest.raises(InvalidRequest, match="more than 100 bytes"):
        store.conversation("a", "3")


def test_a_long_conversation_is_no_work_of_the_event_loop_and_may_be_no_larger_than_a_body() -> None:
    """A short request that names it would be prepared there."""
    kept, body = Kept(ResponseStore(4 << 20, 9.0, 4 << 20), "a"), ResponsesBody(input="x", previous_response_id="r2")
    for number, previous in enumerate([None, "r0", "r1"]):
        kept.store.put("a", f"r{number}", previous, b",".join([b'{"type": "web_search_call"}'] * 1000))
    num_left = 5

    def cancelled() -> bool:
        nonlocal num_left
        num_left -= 1
        return num_left < 0

    with pytest.raises(RequestAborted):
        prepare_responses(body, served(), cancelled, kept)
    assert num_left == -1, "at the next occasion"
    kept.store.put("a", "r2", "r1", b",".join([b'{"type": "web_search_call"}'] * 50_000))
    with pytest.raises(InvalidRequest, match="lists and objects: drop or summarize the oldest messages"):
        prepare_responses(body, served(), kept=kept)


def test_what_running_requests_hold_of_their_input_counts_and_makes_room() -> None:
    kept = Kept(ResponseStore(1 << 20, 9.0, 1 << 20), "a")
    given = [{"role": "user", "content": "x"}, {"type": "web_search_call", "result": "x" * 400_000}]
    body = RESPONSES.decode(json.dumps({"input": given}).encode())
    jobs = [prepare_responses(body, served(), kept=kept) for _ in range(3)]
    assert kept.store.held > 800_000
    for number, job in enumerate(jobs):
        assert job.keep is not None
        job.keep(f"r{number}", b'"out"')
    [items] = kept.store.conversation("a", "r2")
    assert (items[:15], items[-6:]) == (b'{"role":"user",', b',"out"')
    with pytest.raises(InvalidRequest, match="no response 'r0'"):
        kept.store.conversation("a", "r0")


def test_a_request_without_a_response_leaves_nothing_and_a_long_run_is_kept_from_its_end() -> None:
    now = [0.0]
    store = ResponseStore(1 << 20, 10.0, 100, lambda: now[0])
    refused, keep = store.begin("a", None, b'"refused"'), store.begin("a", None, b'"mine"')
    both = store.held
    del refused
    assert store.held < both
    now[0] = 60.0
    keep("r", b'"out"')
    now[0] = 69.0
    assert store.conversation("a", "r") == [b'"mine","out"']
    now[0] = 80.0
    with pytest.raises(InvalidRequest):
        store.conversation("a", "r")
    assert store.held == 0


def test_namespaces_within_each_other_and_a_great_many_tools_are_refused() -> None:
    deep = '{"input": "x", "tools": [' + '{"type": "namespace", "name": "n", "tools": [' * 10_000 + "]}" * 10_000 + "]}"
    exchange = run(call(make_app(FakeDispatcher()), "POST", PATH, deep.encode()))
    assert exchange.status == 400
    many = {"model": MODEL, "input": "x", "tools": [{"type": "function", "name": "f"}] * 100_000}
    error = ask("Hi", many).json()["error"]
    assert "fewer or simpler tools" in error["message"]
