"""Turns a client's request for a shape into the grammar for engines, in the process that handles text, before anything
is sent to engines.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.grammar.ebnf import ebnf
from pdkv.grammar.formats import Format, grammar, json_of, one_of, pattern
from pdkv.grammar.json_text import read_json
from pdkv.grammar.normal_forms import normalize
from pdkv.grammar.patterns import pattern_of
from pdkv.grammar.schema_time import SchemaTime
from pdkv.grammar.tags import read_tag
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, Grammar, StructuredOutputs


def with_grammar(params: SamplingParams) -> SamplingParams:
    """The same parameters with a grammar in place of `structured_outputs`, as an engine needs it.

    Raises:
        InvalidRequest: the request is wrong, or cannot be enforced; the text names the place.
    """
    if params.structured_outputs is None:
        return params
    with naming("structured_outputs"):
        grammar = make_grammar(params.structured_outputs)
    return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """A context in which errors are attributed to this field."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def make_grammar(asked: StructuredOutputs, time: SchemaTime | None = None) -> Grammar:
    """The grammar for engines if the answer has no other requirements; `time`: the time limit of schemas.

    Raises:
        InvalidRequest: as in `with_grammar`.
        RequestAborted: the request was cancelled.
    """
    return grammar("tags" if asked.asked_as == "structural_tag" else "text", make_format(asked, time))


def make_format(asked: StructuredOutputs, time: SchemaTime | None = None) -> Format:
    """The requested shape as a part of an answer; raises as `make_grammar`."""
    asked_as = asked.asked_as
    value = getattr(asked, asked_as)
    if isinstance(value, str):
        _check_text(value, asked_as)
    with _refusing_depth(asked_as):
        match asked_as:
            case "json":
                return json_of(normalize(_parsed(value), time=time))
            case "json_object":
                return json_of(normalize({"type": "object"}))
            case "regex":
                return pattern(pattern_of(value, "regex"))
            case "choice":
                return _one_of(value)
            case "grammar":
                return ebnf(value, time)
            case _:
                return read_tag(value, time)


@contextlib.contextmanager
def _refusing_depth(asked_as: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise InvalidRequest(f"{asked_as} is nested too deeply") from None


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
        raise InvalidRequest("json must be a schema, which is an object")
    return schema


def _one_of(texts: tuple[str, ...]) -> Format:
    if not texts or not all(texts):
        raise InvalidRequest("choice must contain at least one text, and no empty one")
    if len(texts) > MAX_CHOICE_TEXTS:
        raise InvalidRequest(f"choice must contain at most {MAX_CHOICE_TEXTS} texts, got {len(texts)}")
    return one_of(texts)
