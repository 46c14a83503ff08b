"""From what a client asks for to what engines are told: on the text side, before anything is sent."""

import json
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.grammar.patterns import check_pattern
from pdkv.grammar.schema import normalize
from pdkv.grammar.spec import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, Grammar, StructuredOutputs
from pdkv.grammar.tags import normalize_tag
from pdkv.sampling_params import SamplingParams

_ANY_OBJECT = '{"type":"object"}'


def with_grammar(params: SamplingParams) -> SamplingParams:
    """The same with a grammar in the place of `structured_outputs`, as an engine needs it.

    Raises:
        InvalidRequest: what is asked for is wrong, or cannot be enforced; the text names the place.
    """
    if params.structured_outputs is None:
        return params
    try:
        grammar = make_grammar(params.structured_outputs)
    except InvalidRequest as error:
        raise InvalidRequest(f"structured_outputs: {error}", param="structured_outputs") from None
    return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)


def make_grammar(asked: StructuredOutputs) -> Grammar:
    """Raises InvalidRequest as `with_grammar`."""
    try:
        grammar = _make(asked, asked.asked_as)
    except RecursionError:
        raise InvalidRequest(f"{asked.asked_as} is nested too deeply") from None
    grammar.validate()
    return grammar


def _make(asked: StructuredOutputs, asked_as: str) -> Grammar:
    value: Any = getattr(asked, asked_as)
    if isinstance(value, str):
        _check_text(value, asked_as)
    match asked_as:
        case "json":
            return Grammar("json_schema", normalize(_parsed(value)))
        case "json_object":
            return Grammar("json_schema", _ANY_OBJECT)
        case "regex":
            check_pattern(value, "regex")
            return Grammar("regex", value)
        case "choice":
            return Grammar("ebnf", _one_of(value))
        case "grammar":
            return Grammar("ebnf", value)
        case _:
            return Grammar("structural_tag", normalize_tag(value))


def _check_text(text: str, name: str) -> None:
    if not text.strip():
        raise InvalidRequest(f"{name} must not be empty")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{name} must have at most {MAX_GRAMMAR_BYTES} bytes, got {len(text)} characters")


def _parsed(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        schema = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("json must be a schema, an object")
    return schema


def _one_of(texts: tuple[str, ...]) -> str:
    """EBNF for one of the texts."""
    if not texts or not all(texts):
        raise InvalidRequest("choice must hold at least one text, and no empty one")
    if len(texts) > MAX_CHOICE_TEXTS:
        raise InvalidRequest(f"choice must hold at most {MAX_CHOICE_TEXTS} texts, got {len(texts)}")
    return "root ::= " + " | ".join(f'"{_quoted(text)}"' for text in dict.fromkeys(texts))


def _quoted(text: str) -> str:
    return "".join(_quoted_char(char) for char in text)


def _quoted_char(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
