"""Tool parsers from a file, and calls that have to be where there is no parser."""

import json
from pathlib import Path
from typing import Any

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, eos, ids, make_app

from pdkv.config import HttpApi
from pdkv.errors import ConfigError
from pdkv.parsers.registry import check_parser_names, find_tool_parser

CHAT = "/v1/chat/completions"
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("get_time", "search")
]
PLUGIN = """
from pdkv.parsers.tool_parser import ToolParser

class Arrow(ToolParser):
    markers = ("=>",)

    @classmethod
    def recognises(cls, chat_template):
        return False

    def _read_text(self, text, at):
        if text.startswith("=>", at) and "\\n" in text:
            name, _, arguments = text[at + 2 : text.index("\\n", at)].partition(" ")
            self._begin_call(name)
            self._arguments(arguments)
            self._end_call()
            return text.index("\\n", at) + 1
        return at if "=>".startswith(text[at : at + 2]) else self._all(text, at)

    def _all(self, text, at):
        self._text(text[at:])
        return len(text)

    def _flush(self, rest):
        self._text(rest)
"""


def plugin(tmp_path: Path, text: str = PLUGIN, mode: int = 0o600) -> Path:
    path = tmp_path / "arrow.py"
    path.write_text(text)
    path.chmod(mode)
    return path


def ask(answer: str, api: HttpApi, **fields: Any) -> Exchange:
    dispatcher = FakeDispatcher(say([*ids(answer), eos()]))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": FUNCTIONS, **fields}
    exchange = run(call(make_app(dispatcher, api=api, max_model_len=2000), "POST", CHAT, body))
    grammars[:] = [request.params.grammar for request in dispatcher.requests]
    assert not any(generation.aborted for generation in dispatcher.generations) or exchange.status != 200
    return exchange


grammars: list[Any] = []


def calls(exchange: Exchange) -> list[tuple[str, str]]:
    assert exchange.status == 200, exchange.body
    made = exchange.json()["choices"][0]["message"].get("tool_calls") or []
    return [(one["function"]["name"], one["function"]["arguments"]) for one in made]


@pytest.mark.parametrize("name", ["auto", "Arrow"])
def test_a_parser_of_a_file(tmp_path: Path, name: str) -> None:
    api = HttpApi(tool_parser=name, tool_parser_plugin=plugin(tmp_path))
    assert calls(ask('=>search {"a": 1}\n', api)) == [("search", '{"a": 1}')]
    assert "calls cannot be enforced" in ask("x", api, tool_choice="required").json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('of mine')", "KeyError: 'of mine'"),
        ("self._state = self._other; return at", "Arrow changes its state endlessly"),
        ("self._parts += [5, 6]; return len(text)", "Arrow failed"),
    ],
)
def test_what_it_raises_fails_the_request(tmp_path: Path, body: str, words: str, stream: bool) -> None:
    text = PLUGIN.replace(
        "    def _read_text(self, text, at):\n", f"    def _read_text(self, text, at):\n        {body}\n"
    )
    text += "\n    def _other(self, text, at):\n        self._state = self._read_text\n        return at\n"
    api = HttpApi(tool_parser_plugin=plugin(tmp_path, text))
    exchange = ask("x", api, stream=stream)
    if exchange.headers["content-type"].startswith("application/json"):
        assert exchange.status == 500
        error = exchange.json()["error"]
    else:
        error = exchange.events()[-1]["error"]
    assert "the tool parser Arrow failed" in error["message"]
    assert words in error["message"]
    assert calls(ask("x", api, tool_choice="none")) == []  # others are served


def test_a_grammar_that_it_cannot_make_fails_the_request(tmp_path: Path) -> None:
    text = PLUGIN + "\n    @classmethod\n    def syntax(cls, tools, knows, *, several):\n        return 1 / 0\n"
    exchange = ask("x", HttpApi(tool_parser_plugin=plugin(tmp_path, text)), tool_choice="required")
    assert (exchange.status, "ZeroDivisionError" in exchange.json()["error"]["message"]) == (500, True)


@pytest.mark.parametrize(
    ("text", "mode", "name", "words"),
    [
        (PLUGIN, 0o620, "auto", "may be written by other users"),
        (PLUGIN, 0o602, "auto", "may be written by other users"),
        ("1 / 0", 0o600, "auto", "failed: ZeroDivisionError"),
        ("def", 0o600, "auto", "failed: SyntaxError"),
        ("from pdkv.parsers.hermes import HermesParser", 0o600, "auto", "defines no subclass"),
        (PLUGIN + PLUGIN.replace("Arrow", "Bow"), 0o600, "auto", "defines Arrow, Bow: choose one with --tool-parser"),
        (PLUGIN, 0o600, "Arow", r"defines no 'Arow' \\(did you mean 'Arrow'\\?\\)"),
        ("#" * (1 << 20) + "\n", 0o600, "auto", "more than 1048576 bytes"),
        ("\udcff", 0o600, "auto", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_plugin(tmp_path: Path, text: str, mode: int, name: str, words: str) -> None:
    path = tmp_path / "plugin.py"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words.replace("\\\\", "\\")):
        find_tool_parser(name, "", path)


def test_what_others_may_write_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        check_parser_names("auto", "none", plugin(tmp_path, mode=0o666))
    with pytest.raises(ConfigError, match="cannot be read"):
        check_parser_names("auto", "none", tmp_path / "nowhere.py")
    check_parser_names("Arrow", "none", plugin(tmp_path))  # which has its names, is known when it runs
    assert find_tool_parser("hermes", "", plugin(tmp_path)) is find_tool_parser("hermes", "")


NONE = HttpApi(tool_parser="none")


@pytest.mark.parametrize("stream", [True, False])
def test_calls_that_have_to_be_are_a_list_without_a_parser(stream: bool) -> None:
    answer = '[{"name": "search", "parameters": {"a": [1, "]"]}}, {"name": "get_time", "parameters": {}}]'
    exchange = ask(answer, NONE, tool_choice="required", stream=stream)
    assert exchange.status == 200, exchange.body
    assert grammars[0].kind == "tags"
    assert '\\"name\\"' in grammars[0].text
    if not stream:
        assert calls(exchange) == [("search", '{"a": [1, "]"]}'), ("get_time", "{}")]
        assert exchange.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_named_tool_without_a_parser() -> None:
    choice = {"type": "function", "function": {"name": "search"}}
    exchange = ask('[{"name": "search", "parameters": {"a": 1}}]', NONE, tool_choice=choice)
    assert calls(exchange) == [("search", '{"a": 1}')]
    assert "get_time" not in grammars[0].text
    assert ask('[{"name": "sea', NONE, tool_choice=choice).json()["choices"][0]["message"]["content"] == '{"name": "sea'


def test_a_choice_of_the_model_needs_a_parser() -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        error = ask("x", NONE, **fields).json()["error"]
        assert "need a tool parser" in error["message"]
    assert json.loads(ask("x", NONE, tool_choice="none").body)["choices"][0]["message"]["content"] == "x"
