"""The grammar that engines are told for what a body asks of its answers, and what is refused with its place."""

import asyncio
import json
from typing import Any

import pytest
from asgi_client import Exchange, call, run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, eos, ids, make_app

from pdkv.config import HttpApi
from pdkv.grammar.spec import Grammar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NORMAL = {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
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


def tag(made: Grammar | None) -> Any:
    assert made is not None
    assert made.kind == "structural_tag"
    return json.loads(made.text)["format"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (openai(SCHEMA, strict=True), "json_schema", NORMAL),
        (openai(SCHEMA, strict=False, description="An A."), "json_schema", NORMAL),
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", NORMAL),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json_schema", NORMAL),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "[ab]+"}, "response_format": {"type": "text"}}, "regex", "[a-b]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "ebnf", 'root ::= "yes" | "no"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json_schema", NORMAL),
        ({"guided_regex": "[ab]+"}, "regex", "[a-b]+"),
        ({"guided_choice": ["yes", "no"]}, "ebnf", 'root ::= "yes" | "no"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_a_shape_becomes_a_grammar(path: str, fields: dict[str, Any], kind: str, text: Any) -> None:
    made = grammar(path, fields)
    assert made is not None
    assert (made.kind, json.loads(made.text) if kind == "json_schema" else made.text) == (kind, text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_structural_tags_in_each_of_their_forms(path: str) -> None:
    structures = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
    old = {"type": "structural_tag", "structures": structures, "triggers": ["<f>"]}
    content = {"type": "json_schema", "json_schema": NORMAL}
    format = {"type": "triggered_tags", "triggers": ["<f>"],
              "tags": [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]}  # fmt: skip
    new = {"type": "structural_tag", "format": format}
    for given in (
        {"response_format": old},
        {"response_format": new},
        {"structured_outputs": {"structural_tag": new}},
        {"structured_outputs": {"structural_tag": json.dumps(new)}},
    ):
        assert tag(grammar(path, given)) == format


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


# --- tools --------------------------------------------------------------------------------------------------------


def test_required_and_named_tools_are_calls_and_nothing_else() -> None:
    tools = [tool("f"), tool("g", {"properties": {"b": {"const": 1}}})]
    required = tag(grammar(CHAT, {"tools": tools, "tool_choice": "required"}, tool_parser="hermes"))
    assert (required["at_least_one"], required["stop_after_first"]) == (True, False)
    assert ['"f"' in json.dumps(required), "g" in json.dumps(required)] == [False, True]
    assert json.dumps(required).count("additionalProperties") == 2
    one = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    assert tag(grammar(CHAT, one, tool_parser="hermes"))["stop_after_first"]
    only = tag(grammar(CHAT, {"tools": tools, "tool_choice": named("g")}, tool_parser="hermes"))
    assert only["stop_after_first"]
    assert json.dumps(only).count("json_schema") == 2  # the format's type and its field, once


def test_calls_that_the_model_may_make_are_free_unless_a_tool_is_strict() -> None:
    for tools in ([tool()], [tool(strict=False)], [tool(parameters=REFUSED)]):
        assert grammar(CHAT, {"tools": tools}, tool_parser="hermes") is None
    made = tag(grammar(CHAT, {"tools": [tool(strict=True), tool("g", REFUSED)]}, tool_parser="hermes"))
    assert (made["type"], made["triggers"]) == ("triggered_tags", ["<tool_call>"])
    strict, free = [call["elements"][1]["json_schema"] for call in made["tags"][0]["content"]["elements"]]
    assert (strict, free) == (NORMAL, ANY_OBJECT)
    assert grammar(CHAT, {"tools": [tool(strict=True)], "tool_choice": "none"}, tool_parser="hermes") is None


def test_a_shape_is_for_the_text_where_no_call_is_made() -> None:
    fields = {"tools": [tool()], **openai({"const": 7})}
    calls, shape = tag(grammar(CHAT, fields, tool_parser="mistral"))["elements"]
    assert (calls["type"], shape["json_schema"]) == ("tags_with_separator", {"enum": [7]})
    alone = grammar(CHAT, {**fields, "tool_choice": "none"}, tool_parser="mistral")
    assert alone == Grammar("json_schema", '{"enum":[7]}')
    required = tag(grammar(CHAT, {**fields, "tool_choice": "required"}, tool_parser="mistral"))
    assert required == calls | {"tags": required["tags"]}


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


# --- thoughts -----------------------------------------------------------------------------------------------------


def test_thoughts_stand_in_front_of_the_shape() -> None:
    made = tag(grammar(CHAT, openai(SCHEMA), reasoning_parser="deepseek_r1"))
    thoughts, shape = made["elements"]
    assert thoughts["elements"][0]["end"] == "</think>"
    assert shape["json_schema"] == NORMAL
    continued = {"messages": [{"role": "assistant", "content": "Hm.</think>"}], "continue_final_message": True}
    assert grammar(CHAT, {**openai(SCHEMA), **continued}, reasoning_parser="deepseek_r1") == Grammar(
        "json_schema", json.dumps(NORMAL, separators=(",", ":"))
    )


# --- time ---------------------------------------------------------------------------------------------------------


def slow_schema(num_names: int, num_merges: int) -> dict[str, Any]:
    large = {"properties": {f"p{i}": True for i in range(num_names)}}
    return {"$defs": {"large": large}, "allOf": [{"$ref": "#/$defs/large"}] * num_merges}


LARGE = {
    "$defs": {"large": {"properties": {f"p{i}": True for i in range(25_000)}}},
    "allOf": [{"$ref": "#/$defs/large"}] * 500,
}
SMALL = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}", "minimum": i}] * 3} for i in range(12)} | {"d12": {}},
    "$ref": "#/$defs/d0",
    "maximum": 99,
}


@pytest.mark.parametrize("schema", [LARGE, SMALL], ids=["large", "small"])
def test_a_schema_that_takes_long_holds_nobody_up(schema: dict[str, Any]) -> None:
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
