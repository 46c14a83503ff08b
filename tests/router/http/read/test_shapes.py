"""The grammar that engines are told for what a body asks of its answers, and what is refused with its place."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from grammar_walks import ByteGrammars
from small_app import MODEL, eos, ids, make_app

from pdkv.config import HttpApi
from pdkv.grammar import schema_time
from pdkv.sampling.shape import Grammar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REFUSED = {"type": "object", "properties": {"a": {"not": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def openai(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}}


def tool(name: str = "f", parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or SCHEMA, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def ask(path: str, fields: dict[str, Any], answer: str = "{}", **api: Any) -> tuple[Exchange, FakeDispatcher]:
    dispatcher = FakeDispatcher(say([*ids(answer), eos()]))
    body = {"model": MODEL, **({"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"})}
    app = make_app(dispatcher, api=HttpApi(**api), max_model_len=2000)
    return run(call(app, "POST", path, {**body, **fields})), dispatcher


def grammar(path: str, fields: dict[str, Any], **api: Any) -> Grammar | None:
    exchange, dispatcher = ask(path, fields, **api)
    assert exchange.status == 200, exchange.json()
    params = dispatcher.generations[0].request.params
    assert params.structured_outputs is None
    return params.grammar


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> ByteGrammars:
    return ByteGrammars(tmp_path_factory.mktemp("bytes"))


def check(judge: ByteGrammars, made: Grammar | None, allowed: Iterable[str], refused: Iterable[str]) -> None:
    assert made is not None
    for text in allowed:
        assert judge.accepts(made, text), text
    for text in refused:
        assert not judge.accepts(made, text), text


OF_SCHEMA = ('{"a": 1}', '{"a":-20}'), ('{"a": "1"}', '{"b": 1}', "{}", '{"a": 1} ', "1")
ANY = ("{}", '{"b": [1, {"c": null}]}'), ("[]", "1", '{"b"}')
LETTERS = ("a", "bba"), ("", "c", "ac")
CHOICE = ("yes", "no"), ("", "y", "yes ", "yesno")
LETTER = ("a",), ("", "b", "aa")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (openai(SCHEMA, strict=True), OF_SCHEMA),
        (openai(SCHEMA, strict=False, description="An A."), OF_SCHEMA),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, ANY),
        ({"structured_outputs": {"regex": "[ab]+"}, "response_format": {"type": "text"}}, LETTERS),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, LETTER),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "[ab]+"}, LETTERS),
        ({"guided_choice": ["yes", "no"]}, CHOICE),
        ({"guided_grammar": 'root ::= "a"'}, LETTER),
    ],
)
def test_a_shape_becomes_a_grammar(
    judge: ByteGrammars, path: str, fields: dict[str, Any], texts: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    made = grammar(path, fields)
    assert made is not None
    assert made.kind == "text"
    check(judge, made, *texts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_structural_tags_in_each_of_their_forms(judge: ByteGrammars, path: str) -> None:
    structures = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
    old = {"type": "structural_tag", "structures": structures, "triggers": ["<f>"]}
    content = {"type": "json_schema", "json_schema": SCHEMA}
    format = {"type": "triggered_tags", "triggers": ["<f>"],
              "tags": [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]}  # fmt: skip
    new = {"type": "structural_tag", "format": format}
    for given in (
        {"response_format": old},
        {"response_format": new},
        {"structured_outputs": {"structural_tag": new}},
        {"structured_outputs": {"structural_tag": json.dumps(new)}},
    ):
        made = grammar(path, given)
        check(judge, made, ["free", 'so <f>{"a": 1}</f>.'], ["<f>", '<f>{"a": ""}</f>', '<f>{"a": 1}'])
        assert made is not None
        assert made.kind == "tags"


def test_what_asks_for_no_shape_has_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None, "guided_json": None}):
        assert grammar(CHAT, fields) is None
        assert grammar(COMPLETIONS, fields) is None
    assert grammar(COMPLETIONS, {**openai(SCHEMA), "echo": True, "max_tokens": 0}) is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (openai(REFUSED), "response_format.json_schema.schema", ("'not'", "/properties/a/not")),
        (openai(None), "response_format.json_schema.schema", ("required",)),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ("required",)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name", ("required",)),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format.json_schema",
         ("'text'",)),
        ({"response_format": {"type": "structural_tag", "format": {"type": "tagg"}}}, "response_format", ("/format",)),
        ({"response_format": {"type": "structural_tag"}}, "response_format", ("must have a format",)),
        ({"structured_outputs": {"json": REFUSED}}, "structured_outputs.json", ("/properties/a/not",)),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ("not valid JSON",)),
        ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json", ("not valid JSON",)),
        ({"structured_outputs": {"json": '{"enum": [1e400]}'}}, "structured_outputs.json", ("not valid JSON",)),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "const_string", "value": "\\ud800"}}'}},
            "structured_outputs.structural_tag",
            ("not valid JSON",),
        ),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", ("cannot be enforced",)),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ("at least one",)),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", ("array",)),
        ({"structured_outputs": {}}, "structured_outputs", ("one of json",)),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", ("json and regex",)),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         ("not supported",)),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", ("structured_outputs and",)),
        ({**openai(SCHEMA), "structured_outputs": {"regex": "a"}}, "structured_outputs", ("response_format and",)),
        ({"guided_json": REFUSED}, "guided_json", ("/properties/a/not",)),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(
    path: str, fields: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    exchange, dispatcher = ask(path, fields)
    error = exchange.json()["error"]
    assert (exchange.status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert all(word in error["message"] for word in (param, *words)), error
    assert dispatcher.generations == []


def test_grammars_of_all_choices_are_bounded_together() -> None:
    texts = [f"{'x' * 5000}{i}" for i in range(190)]
    exchange, _ = ask(COMPLETIONS, {"guided_choice": texts, "n": 128, "max_tokens": 1})
    assert (exchange.status, exchange.json()["error"]["param"]) == (400, "n")
    assert "* 128" in exchange.json()["error"]["message"]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_required_and_named_tools_are_calls_and_nothing_else(judge: ByteGrammars) -> None:
    tools = [tool("f"), tool("g", {"properties": {"b": {"const": 1}}})]
    f, g = hermes("f", '{"a": 2}'), hermes("g", '{"b": 1}')
    wrong = ["", "Hm.", f"Hm. {f}", f"{f} Hm.", hermes("f", '{"b": 1}'), hermes("g", '{"b": 2}'), hermes("h", "{}")]
    asked = {"tools": tools, "tool_choice": "required"}
    check(judge, grammar(CHAT, asked, tool_parser="hermes"), [f, g, f"{f}\n{g}"], wrong)
    one = grammar(CHAT, {**asked, "parallel_tool_calls": False}, tool_parser="hermes")
    check(judge, one, [f, g], [*wrong, f"{f}\n{g}"])
    only = grammar(CHAT, {"tools": tools, "tool_choice": named("g")}, tool_parser="hermes")
    check(judge, only, [g], [*wrong, f, f"{g}\n{g}"])


def test_calls_that_the_model_may_make_are_free_unless_a_tool_is_strict(judge: ByteGrammars) -> None:
    for tools in ([tool()], [tool(strict=False)], [tool(parameters=REFUSED)]):
        assert grammar(CHAT, {"tools": tools}, tool_parser="hermes") is None
    made = grammar(CHAT, {"tools": [tool(strict=True), tool("g", REFUSED)]}, tool_parser="hermes")
    f, g = hermes("f", '{"a": 2}'), hermes("g", '{"any": [{}]}')
    check(judge, made, ["Hm.", f"Hm. {f}", g], [hermes("f", "{}"), hermes("g", "1"), "<tool_call>"])
    assert grammar(CHAT, {"tools": [tool(strict=True)], "tool_choice": "none"}, tool_parser="hermes") is None


def test_a_shape_is_for_the_text_where_no_call_is_made(judge: ByteGrammars) -> None:
    fields = {"tools": [tool()], **openai({"const": 7})}
    call = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
    other = call.replace("1", "[]")  # which a tool that is not strict allows where it may be called
    wrong = ["", "8", f"7{call}", call.replace('{"a": 1}', "1")]
    check(judge, grammar(CHAT, fields, tool_parser="mistral"), ["7", call, other], wrong)
    alone = grammar(CHAT, {**fields, "tool_choice": "none"}, tool_parser="mistral")
    check(judge, alone, ["7"], [*wrong, call, other])
    required = grammar(CHAT, {**fields, "tool_choice": "required"}, tool_parser="mistral")
    check(judge, required, [call], [*wrong, other, "7"])


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": named("f")}, {"strict": True}])
def test_a_tool_that_cannot_be_enforced_is_refused_with_its_place(fields: dict[str, Any]) -> None:
    for parameters, place in ((REFUSED, "/properties/a/not"), ({"type": "string"}, "'object'")):
        choice = {name: value for name, value in fields.items() if name == "tool_choice"}
        tools = [tool("g"), tool("f", parameters, strict="strict" in fields)]
        exchange, _ = ask(CHAT, {"tools": tools, **choice}, tool_parser="hermes")
        error = exchange.json()["error"]
        assert (exchange.status, error["param"]) == (400, "tools[1].function.parameters"), error
        assert place in error["message"]


def test_a_named_tool_needs_no_schema_of_the_others() -> None:
    fields = {"tools": [tool("g", REFUSED), tool("f")], "tool_choice": named("f")}
    assert grammar(CHAT, fields, tool_parser="hermes") is not None


def test_a_strictness_that_is_none_is_refused() -> None:
    exchange, _ = ask(CHAT, {"tools": [tool(strict=1)]}, tool_parser="hermes")
    assert exchange.json()["error"]["param"] == "tools[0].function.strict"


def test_the_reasons_of_enforced_calls() -> None:
    for choice, reason in (("required", "tool_calls"), (named("f"), "stop")):
        exchange, _ = ask(CHAT, {"tools": [tool()], "tool_choice": choice}, CALL, tool_parser="hermes")
        [answer] = exchange.json()["choices"]
        assert (answer["finish_reason"], answer["message"]["content"]) == (reason, None)
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_thoughts_stand_in_front_of_the_shape(judge: ByteGrammars) -> None:
    made = grammar(CHAT, openai(SCHEMA), reasoning_parser="deepseek_r1")
    shape = '{"a": 1}'
    check(judge, made, [f"Hm, {{.</think>\n\n{shape}"], [shape, f"Hm. {shape}", "Hm.</think>", "Hm.</think>{}"])
    continued = {"messages": [{"role": "assistant", "content": "Hm.</think>"}], "continue_final_message": True}
    behind = grammar(CHAT, {**openai(SCHEMA), **continued}, reasoning_parser="deepseek_r1")
    check(judge, behind, [shape], [f"Hm.</think>{shape}", "{}"])


LARGE = {
    "$defs": {"large": {"properties": {f"p{i}": True for i in range(25_000)}}},
    "allOf": [{"$ref": "#/$defs/large"}] * 500,
}
SMALL = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}", "minimum": i}] * 3} for i in range(12)} | {"d12": {}},
    "$ref": "#/$defs/d0",
    "maximum": 99,
}


@pytest.mark.parametrize("schema", [pytest.param(LARGE, marks=pytest.mark.slow), SMALL], ids=["large", "small"])
def test_a_schema_that_takes_long_holds_nobody_up(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_time, "MAX_SECONDS", 0.5)

    async def count_turns() -> tuple[Exchange, int]:
        """The reply, and how often others had their turn meanwhile."""
        app = make_app(FakeDispatcher(), max_model_len=2000)
        task = asyncio.ensure_future(
            call(app, "POST", COMPLETIONS, {"model": MODEL, "prompt": "Hi", "guided_json": schema})
        )
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return await task, num_turns

    exchange, num_turns = run(count_turns())
    assert exchange.status == 400, exchange.json()
    assert num_turns > 20
