"""Structural tags put together here: formats in xgrammar's notation, of parts that are in their normal form already.

Markers such as [TOOL_CALLS] are texts in them, whether a tokenizer has a special token for them or not: within
structural tags a special token matches its own text.
"""

import json
from collections.abc import Sequence
from typing import Any

from pdkv.errors import InvalidRequest
from pdkv.grammar.spec import Grammar

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}

_MAX_SPACES = 1
"""White space in a row, of JSON: a model that is in doubt writes it without end."""


def text(value: str) -> Format:
    """This text."""
    return {"type": "const_string", "value": value}


def json_of(schema: Any) -> Format:
    """JSON of a schema, which is in its normal form."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_SPACES}


def sequence(*parts: str | Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": [text(part) if isinstance(part, str) else part for part in parts]}


def either(formats: Sequence[Format]) -> Format:
    """One of them."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def optional(format: Format) -> Format:
    """It, or nothing."""
    return {"type": "optional", "content": format}


def tag(begin: str, content: Format, end: str) -> Format:
    """Content between two texts. Any text in it goes on to the first `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Format], separator: str, *, several: bool) -> Format:
    """One of the tags or more, and nothing else; `several` may be left out where one is to be all."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def triggered(tags: Sequence[Format], *, several: bool) -> Format:
    """Any text, in which what begins as one of the tags does goes on as that tag does."""
    return {
        "type": "triggered_tags",
        "triggers": list(dict.fromkeys(part["begin"] for part in tags)),
        "tags": list(tags),
        "stop_after_first": not several,
    }


def structural_tag(format: Format) -> Grammar:
    """What engines are told of it.

    Raises:
        InvalidRequest: it is too large, or nested too deeply.
    """
    made = {"type": "structural_tag", "format": format}
    try:
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest("the schemas of the answer are nested too deeply") from None
    grammar = Grammar("structural_tag", text)
    grammar.validate()
    return grammar
