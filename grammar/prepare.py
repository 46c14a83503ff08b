"""From what a client asks for to what engines are told: on the text side, before anything is sent."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import Format, json_of, structural_tag
from pdkv.grammar.json_text import read_json
from pdkv.grammar.normal_forms import normalize
from pdkv.grammar.patterns import text_pattern_of
from pdkv.grammar.schema_time import SchemaTime
from pdkv.grammar.spec import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, Grammar, StructuredOutputs
from pdkv.grammar.tags import normalize_tag
from pdkv.sampling_params import SamplingParams

_JSON = ("json", "json_object")
_ANY_OBJECT = {"type": "object"}


def with_grammar(params: SamplingParams) -> SamplingParams:
    """The same with a grammar in the place of `structured_outputs`, as an engine needs it.

    Raises:
        InvalidRequest: what is asked for is wrong, or cannot be enforced; the text names the place.
    """
    if params.structured_outputs is None:
        return params
    with naming("structured_outputs"):
        grammar = make_grammar(params.structured_outputs)
    return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """What is refused within is the fault of this field."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def make_grammar(asked: StructuredOutputs, time: SchemaTime | None = None) -> Grammar:
    """What engines are told where nothing else is asked of the answer; `time`: what schemas may take.

    Raises:
        InvalidRequest: as `with_grammar`.
        RequestAborted: nobody waits for it any more.
    """
    asked_as = asked.asked_as
    with _refusing_depth(asked_as):
        if asked_as in _JSON:
            grammar = Grammar("json_schema", normalize(_schema_of(asked), time=time))
        else:
            part = _format_of(getattr(asked, asked_as), asked_as, time)
            grammar = structural_tag(part) if asked_as == "structural_tag" else _plain(part)
    grammar.validate()
    return grammar


def make_format(asked: StructuredOutputs, time: SchemaTime | None = None) -> Format:
    """The same as a part of a structural tag; raises as `make_grammar`."""
    asked_as = asked.asked_as
    with _refusing_depth(asked_as):
        if asked_as in _JSON:
            return json_of(json.loads(normalize(_schema_of(asked), time=time)))
        return _format_of(getattr(asked, asked_as), asked_as, time)


def _format_of(value: Any, asked_as: str, time: SchemaTime | None) -> Format:
    """Of what is no schema."""
    if isinstance(value, str):
        _check_text(value, asked_as)
    match asked_as:
        case "regex":
            return {"type": "regex", "pattern": text_pattern_of(value, "regex")}
        case "choice":
            return {"type": "grammar", "grammar": _one_of(value)}
        case "grammar":
            return {"type": "grammar", "grammar": value}
        case _:
            return normalize_tag(value, time)


def _plain(part: Format) -> Grammar:
    """A regular expression or EBNF that is all there is."""
    return Grammar("regex", part["pattern"]) if part["type"] == "regex" else Grammar("ebnf", part["grammar"])


@contextlib.contextmanager
def _refusing_depth(asked_as: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise InvalidRequest(f"{asked_as} is nested too deeply") from None


def _schema_of(asked: StructuredOutputs) -> Any:
    """The schema, parsed."""
    if asked.json is None:
        return _ANY_OBJECT
    if isinstance(asked.json, str):
        _check_text(asked.json, "json")
    return _parsed(asked.json)


def _check_text(text: str, name: str) -> None:
    if not text.strip():
        raise InvalidRequest(f"{name} must not be empty")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{name} must have at most {MAX_GRAMMAR_BYTES} bytes, got {len(text)} characters")


def _parsed(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    schema = read_json(schema, "json")
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
