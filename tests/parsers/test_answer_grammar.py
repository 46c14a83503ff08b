"""Grammars of answers, compiled: what a model can write under them is what the parsers read, and nothing else."""

import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import small_tokenizers
import tokenizers
from answer_parts import gather, read
from grammar_walks import allowed_by
from recorded_answers import ANSWERS, TOOLS

from pdkv.errors import InvalidRequest
from pdkv.grammar.matching.matcher import Matcher
from pdkv.grammar.matching.vocabulary import Vocabulary
from pdkv.grammar.schema_time import SchemaTime
from pdkv.parsers.answer import AnswerFormat
from pdkv.parsers.answer_grammar import AnswerRules, AskedShape, Calls
from pdkv.parsers.members import kinds_of, member_schema
from pdkv.parsers.reasoning import Thinking
from pdkv.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from pdkv.parsers.tools import Tool, read_tools
from pdkv.sampling.shape import StructuredOutputs
from pdkv.text import Tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {"city": {"enum": ["Paris", 'a "b" </tool_call>']}, "days": {"type": "integer", "maximum": 9,
                                                                                  "minimum": 0}},
        "required": ["city"],
    },
    "search": {
        "type": ["object", "null"],
        "properties": {"query": {"type": "string", "pattern": "^[a-zü{]{1,3}$"}, "next": {"$ref": "#/$defs/n"}},
        "required": ["query", "next"],
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"enum": [";", "{"]}]}},
    },
}  # fmt: skip
TAGGED_SCHEMAS: dict[str, dict[str, Any]] = {  # a text that has no quotes can be one of some, or any
    "get_weather": SCHEMAS["get_weather"],
    "search": {
        **SCHEMAS["search"],
        "properties": {**SCHEMAS["search"]["properties"], "query": {"enum": ["a", "ü{", "\n"]}},
    },
}
SHAPE = {"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}},
         "required": ["answer"]}  # fmt: skip
MARKERS = {  # special tokens of the families' tokenizers
    "hermes": (),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    "mistral, before Tekken": ("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    "mistral, from v11 on": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "qwen3_coder": (),
    "glm45": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ADDED = (*TAGS, *dict.fromkeys(marker for group in MARKERS.values() for marker in group))


class Family:
    """A parser with a tokenizer as its models have."""

    def __init__(self, name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.name = name
        self.parser = TOOL_PARSERS.load(name.partition(",")[0])
        self.schemas = TAGGED_SCHEMAS if name in ("qwen3_coder", "glm45") else SCHEMAS
        self.format = AnswerFormat(tool_parser=self.parser, tools={**dict.fromkeys(TOOLS), **self.schemas})
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary

    def matcher(self, rules: AnswerRules) -> Matcher:
        grammar = rules.grammar(self.tokenizer.knows, SchemaTime())
        assert grammar is not None
        return Matcher(grammar, self.vocabulary)

    @functools.cached_property
    def _bytes(self) -> dict[bytes, int]:
        """Ids of the tokens that are one byte, or an added text."""
        known = {self.tokenizer.token_bytes(i): i for i in range(self.tokenizer.vocab_size)}
        return {data: i for data, i in known.items() if len(data) == 1 or data.decode(errors="replace") in ADDED}

    def encode(self, text: str) -> list[int]:
        """As a model writes a text within an answer: added tokens, else bytes."""
        pieces = re.split("(" + "|".join(map(re.escape, ADDED)) + ")", text)
        parts = [[piece.encode()] if piece.encode() in self._bytes else [bytes([b]) for b in piece.encode()]
                 for piece in pieces if piece]  # fmt: skip
        return [self._bytes[data] for part in parts for data in part]

    def calls(self, choice: str, *, several: bool = True, strict: bool = True) -> Calls:
        return Calls(parser=self.parser, tools=self.tools(strict), required=choice == "required", several=several)

    def tools(self, strict: bool) -> list[Tool]:
        functions = [{"name": name, "parameters": schema, "strict": strict} for name, schema in self.schemas.items()]
        return read_tools([{"type": "function", "function": function} for function in functions])

    def show(self, token_ids: Iterable[int]) -> str:
        """As the router shows it to parsers."""
        detokenizer = self.tokenizer.detokenizer(keep=frozenset(ADDED))
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


@pytest.fixture(scope="module", params=MARKERS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    old = request.param == "mistral, before Tekken"
    backend = small_tokenizers.byte_fallback_backend() if old else small_tokenizers.byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    backend.add_special_tokens(list(MARKERS[request.param]))
    path: Path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(path)
    vocabulary = Vocabulary.load(path, tokenizer.vocab_size, [backend.token_to_id("</s>")])
    return Family(request.param, tokenizer, vocabulary)


def walk(matcher: Matcher, family: Family, rng: random.Random, prefix: str = "", limit: int = 20_000) -> str:
    """An answer that begins with `prefix` and goes on by random tokens up to its end."""
    token_ids = family.encode(prefix)
    assert all(map(matcher.accept, token_ids)), prefix
    while len(token_ids) < limit:
        token = rng.choice(allowed_by(matcher, family.vocabulary.size).tolist())
        assert matcher.accept(token)
        if token in family.vocabulary.stop_token_ids:
            return family.show(token_ids)
        token_ids.append(token)
    raise AssertionError(f"no end: {family.show(token_ids)}")


def accepts(matcher: Matcher, family: Family, text: str) -> bool:
    """Whether a model may write the text and end there."""
    [eos] = family.vocabulary.stop_token_ids
    return all(map(matcher.accept, [*family.encode(text), eos]))


def check_calls(family: Family, calls: tuple[tuple[str, str], ...], text: str) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict), text
        jsonschema.validate(value, family.schemas[name])


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 40), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("several", [True, False])
def test_required_calls_are_read_as_they_are_written(family: Family, several: bool, seeds: range) -> None:
    rules = AnswerRules(calls=family.calls("required", several=several, strict=False))
    names, most = set(), 0
    for seed in seeds:
        text = walk(family.matcher(rules), family, random.Random(seed))
        reasoning, content, calls = gather(read(family.format, list(text)))
        assert (reasoning, content) == ("", ""), text
        assert calls
        check_calls(family, calls, text)
        names |= {name for name, _ in calls}
        most = max(most, len(calls))
    assert names == SCHEMAS.keys()
    assert (most > 1) is several


def beginning(family: Family) -> str:
    """Of a call."""
    known = {"llama3_json": '{"name": "search", "parameters": ', "pythonic": "[search("}
    known |= dict.fromkeys(("hermes", "qwen3_coder", "glm45"), "<tool_call>")
    return known.get(family.name, "[TOOL_CALLS]")


def test_a_call_that_the_model_begins_is_one(family: Family) -> None:
    rules = AnswerRules(calls=family.calls("auto", several=False))
    assert accepts(family.matcher(rules), family, 'Just text, with a { and a < and "name".')
    for seed in range(10):
        text = walk(family.matcher(rules), family, random.Random(seed), "Let me see.\n" + beginning(family))
        _, content, calls = gather(read(family.format, [text]))
        assert (content, len(calls)) == ("Let me see.", 1), text
        check_calls(family, calls, text)
    assert not accepts(family.matcher(rules), family, beginning(family) + "x")


ANYTHING = {
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=anything>\n[1]\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>NAME\n<arg_key>anything</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
    "pythonic": "[NAME(anything=[1])]",
}
"""A call with other arguments, where these are no JSON object."""


def test_calls_that_the_model_chooses_are_free_unless_a_tool_is_strict(family: Family) -> None:
    rules = AnswerRules(calls=family.calls("auto", strict=False))
    assert rules.grammar(family.tokenizer.knows, SchemaTime()) is None
    weather, search = family.tools(strict=True)
    mixed = AnswerRules(calls=dataclasses.replace(family.calls("auto"), tools=[weather, search._replace(strict=False)]))
    required = AnswerRules(calls=family.calls("required", several=False))
    called = set()
    for seed in range(20):
        text = walk(family.matcher(required), family, random.Random(seed))
        [(name, arguments)] = gather(read(family.format, [text]))[2]
        called.add(name)
        assert accepts(family.matcher(mixed), family, text)
        others = ANYTHING.get(family.name, text.replace(arguments, '{"anything": [1]}')).replace("NAME", name)
        assert accepts(family.matcher(mixed), family, others) is (name == "search")
    assert called == SCHEMAS.keys()


def test_text_has_the_shape_where_no_call_is_made(family: Family) -> None:
    asked = AskedShape(StructuredOutputs(json=SHAPE), "response_format")
    strict = family.schemas is TAGGED_SCHEMAS  # any text would never end by chance
    rules = AnswerRules(shape=asked, calls=family.calls("auto", strict=strict))
    assert accepts(family.matcher(rules), family, '{"answer": 42}')
    assert not accepts(family.matcher(rules), family, "42")
    text = walk(family.matcher(rules), family, random.Random(0), beginning(family))
    assert len(gather(read(family.format, [text]))[2]) > 0


@pytest.mark.parametrize(
    ("reasoning", "prompt", "thoughts"),
    [
        ("qwen3", "open", "Let <tool_call>me { see.\n</think>\n\n"),
        ("qwen3", "closed", ""),
        ("qwen3", "unsaid", ""),
        ("qwen3", "unsaid", "<think>\nHm.</think>"),
        ("deepseek_r1", "unsaid", "Hm.\n</think>\n\n"),
        ("deepseek_r1", "unsaid", "<think>\nHm.\n</think>\n\n"),
        ("deepseek_r1", "closed", ""),
        ("mistral", "unsaid", "[THINK]Hm.[/THINK]"),
    ],
)
def test_the_shape_begins_behind_the_thoughts(family: Family, reasoning: str, prompt: Thinking, thoughts: str) -> None:
    parser = REASONING_PARSERS.load(reasoning)
    asked = AskedShape(StructuredOutputs(json=SHAPE), "response_format")
    rules = AnswerRules(shape=asked, reasoning_parser=parser, prompt=prompt)
    text = walk(family.matcher(rules), family, random.Random(0), thoughts)
    format = AnswerFormat(reasoning_parser=parser, prompt=prompt)
    thought, content, _ = gather(read(format, [text]))
    jsonschema.validate(json.loads(content), SHAPE)
    assert ("Hm." in thought or "see." in thought) is bool(thoughts)
    assert not accepts(family.matcher(rules), family, thoughts + "so")


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_stand_behind_the_thoughts(family: Family, choice: str) -> None:
    parser = REASONING_PARSERS.load("qwen3")
    rules = AnswerRules(calls=family.calls(choice, several=False), reasoning_parser=parser, prompt="unsaid")
    format = dataclasses.replace(family.format, reasoning_parser=parser, prompt="unsaid")
    thoughts = f"<think>Shall I write {beginning(family)}x?</think>\n\n"
    text = walk(family.matcher(rules), family, random.Random(0), thoughts + beginning(family))
    thought, content, calls = gather(read(format, [text]))
    assert (thought, content, len(calls)) == (f"Shall I write {beginning(family)}x?", "", 1)
    check_calls(family, calls, text)
    assert accepts(family.matcher(rules), family, thoughts + "so") is (choice == "auto")


WRITTEN = {
    "hermes": {"one call, as Qwen writes it", "text in front, and two calls", "all kinds of values"},
    "llama3_json": {"one call", "two with a semicolon between them", "two lines behind a text", "two tags",
                    "all kinds of values"},
    "mistral": {"a list of one", "all kinds of values"},
    "mistral, before Tekken": {"a list of one", "all kinds of values"},
    "mistral, from v11 on": {"one call of tokenizer v11"},
    "qwen3_coder": {"one call"},
    "glm45": {"one call"},
    "pythonic": {"one call"},
}  # fmt: skip
"""Of the recorded answers with calls those that a model may write under a grammar, too."""


def test_answers_of_the_family_are_possible(family: Family) -> None:
    functions = [{"type": "function", "function": {"name": name, "strict": True}} for name in sorted(TOOLS)]
    rules = AnswerRules(calls=dataclasses.replace(family.calls("auto"), tools=read_tools(functions)))
    own = [recorded for recorded in ANSWERS if TOOL_PARSERS.load(recorded.parser) is family.parser]
    possible = {recorded.name for recorded in own if accepts(family.matcher(rules), family, recorded.text)}
    assert possible >= {"text", *WRITTEN[family.name]}


REFUSED: dict[str, dict[str, Any]] = {
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "^x"}}},
    "a text or an object": {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}},
    "a value with the closing tag": {"properties": {"a": {"enum": ["b", "</parameter>", "</arg_value>"]}}},
    "what is read back as another value": {"properties": {"a": {"enum": ["1", 1]}}},
    "a great many arguments": {"properties": {f"p{i}": {} for i in range(201)}},
    "arguments that depend on each other": {"properties": {"a": {}}, "minProperties": 1},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_enforced_without_quotes_is_refused(name: str, schema: dict[str, Any]) -> None:
    parser = TOOL_PARSERS.load(name)
    function = {"name": "f", "parameters": {"type": "object", **schema}}
    rules = AnswerRules(calls=Calls(parser=parser, tools=read_tools([{"type": "function", "function": function}]),
                                    required=True, several=True))  # fmt: skip
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        rules.grammar(lambda text: False, SchemaTime())


def test_texts_and_optional_arguments(family: Family) -> None:
    if family.name not in ANYTHING:
        pytest.skip("its arguments are JSON objects")
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "b": {"type": "array", "items": {"enum": ["</parameter>", "</arg_value>"]}},
            "c": {"$ref": "#/$defs/c", "description": "d"},
        },
        "required": ["c"],
        "$defs": {"c": {"type": "integer", "minimum": 3, "maximum": 5}},
    }
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    rules = AnswerRules(calls=Calls(parser=family.parser, tools=tools, required=True, several=False))
    format = AnswerFormat(tool_parser=family.parser, tools={"f": schema})
    texts = {
        "qwen3_coder": '<tool_call>\n<function=f>\n<parameter=a>\n<b> "x"\n\n</parameter>\n<parameter=b>\n'
        '["</parameter>"]\n</parameter>\n<parameter=c>\n4\n</parameter>\n</function>\n</tool_call>',
        "glm45": '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value><b> "x"\n</arg_value>\n<arg_key>b</arg_key>\n'
        '<arg_value>["</parameter>"]</arg_value>\n<arg_key>c</arg_key>\n<arg_value>4</arg_value>\n</tool_call>',
        "pythonic": '[f(c=4, a="<b> \\"x\\"\\n", b=["</parameter>"])]',
    }
    text = texts[family.name]
    assert accepts(family.matcher(rules), family, text)
    [(_, arguments)] = gather(read(format, list(text)))[2]
    assert json.loads(arguments) == {"a": '<b> "x"\n', "b": ["</parameter>"], "c": 4}
    assert not accepts(family.matcher(rules), family, text.replace("4", "6"))


NESTED = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(40)}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"$ref": "#/$defs/d0", "$defs": {**NESTED, "d40": {"type": "string"}}}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, None),
        ({"anyOf": [{"type": "string"}] * 100_000}, None),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}], "$defs": {"a": {"enum": ["x", None]}}},
         {"string", "null", "number"}),
    ],
    ids=["many ways", "itself", "a reference to itself", "a great many", "references"],
)  # fmt: skip
def test_what_a_schema_says_of_a_value_is_soon_known(schema: dict[str, Any], kinds: set[str] | None) -> None:
    tool = {
        "properties": {"a": {key: schema[key] for key in schema if key != "$defs"}},
        "$defs": schema.get("$defs", {}),
    }
    assert kinds_of(member_schema(tool, "a")) == kinds


@pytest.mark.parametrize(
    ("family", "name", "argument", "wrong"),
    [
        ("glm45", "a b", "x", "the tool 'a b'"),
        ("qwen3_coder", "a>b", "x", "the tool 'a>b'"),
        ("mistral", "a b", "x", "the tool 'a b'"),
        ("pythonic", "a-b", "x", "the tool 'a-b'"),
        ("pythonic", "a", "x-y", "the argument 'x-y'"),
        ("qwen3_coder", "a", "x>", "the argument 'x>'"),
    ],
)
def test_names_that_a_format_has_no_place_for_are_refused(family: str, name: str, argument: str, wrong: str) -> None:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    tools = read_tools([{"type": "function", "function": {"name": name, "parameters": parameters}}])
    calls = Calls(parser=TOOL_PARSERS.load(family), tools=tools, required=True, several=False)
    with pytest.raises(InvalidRequest, match=f"{re.escape(wrong)} cannot be written by this model"):
        AnswerRules(calls=calls).grammar(lambda text: True, SchemaTime())
