"""Structural tags: free text with tagged parts that have a shape, in xgrammar's notation."""

import json
from collections.abc import Mapping
from typing import Any

from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import Format
from pdkv.grammar.json_text import read_json
from pdkv.grammar.keywords import pointer
from pdkv.grammar.normal_forms import normalize
from pdkv.grammar.patterns import text_pattern_of
from pdkv.grammar.schema_time import SchemaTime
from pdkv.limits import clip

MAX_DEPTH = 32
"""Of formats in each other."""

_PLAIN = ("const_string", "any_text", "token", "exclude_token", "any_tokens", "grammar")
_WITH_SCHEMA = ("json_schema", "qwen_xml_parameter")
_PARTS = {
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("content",),
    "triggered_tags": ("tags",),
    "token_triggered_tags": ("tags",),
    "tags_with_separator": ("tags",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content",),
}
"""Formats that hold others, and the fields in which they do."""


def normalize_tag(tag: Mapping[str, Any] | str, time: SchemaTime | None = None) -> Format:
    """The format of a structural tag whose schemas and patterns are enforced as they stand.

    Args:
        tag: `{"type": "structural_tag", "format": …}`, or vLLM's older `{"structures": […], "triggers": […]}`.
        time: what its schemas may take together; None: as much as those of one request.

    Raises:
        InvalidRequest: it is none; names the place as a JSON pointer.
        RequestAborted: nobody waits for it any more.
    """
    if isinstance(tag, str):
        tag = read_json(tag, "the structural tag")
    if not isinstance(tag, Mapping):
        raise InvalidRequest("a structural tag must be an object with a format")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": _from_structures(tag)}
    if not isinstance(tag.get("format"), Mapping):
        raise InvalidRequest("a structural tag must have a format, an object with a type")
    return _format(tag["format"], "/format", 0, time or SchemaTime())


def _from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest("structures and triggers of a structural tag must be lists")
    tags = []
    for i, part in enumerate(structures):
        if not isinstance(part, Mapping) or not {"begin", "schema", "end"} <= part.keys():
            raise InvalidRequest(f"the structure at /structures/{i} must have begin, schema and end")
        schema = part["schema"]
        if isinstance(schema, str):
            schema = read_json(schema, f"the schema at /structures/{i}/schema")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": part["begin"], "content": content, "end": part["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(format_: object, at: str, depth: int, time: SchemaTime) -> Format:
    """One format, with the schemas in it in their normal form."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"the structural tag is more than {MAX_DEPTH} deep at {at}")
    time.check()
    if not isinstance(format_, Mapping) or not isinstance(format_.get("type"), str):
        raise InvalidRequest(f"the format at {at} must be an object with a type")
    kind, made = format_["type"], dict(format_)
    if kind in _WITH_SCHEMA:
        if not isinstance(format_.get("json_schema"), Mapping | bool):
            raise InvalidRequest(f"the format at {at} must have a json_schema, an object")
        made["json_schema"] = _schema(format_["json_schema"], pointer(at, "json_schema"), time)
        if format_.get("any_order"):
            raise InvalidRequest(f"any_order at {at} cannot be enforced: nothing would hold to required properties")
    elif kind == "regex":
        if not isinstance(format_.get("pattern"), str):
            raise InvalidRequest(f"the format at {at} must have a pattern, a string")
        made["pattern"] = text_pattern_of(format_["pattern"], f"the pattern at {pointer(at, 'pattern')}")
    elif kind in _PARTS:
        for field in _PARTS[kind]:
            part = format_.get(field)
            if field == "content":
                made[field] = _format(part, pointer(at, field), depth + 1, time)
            elif isinstance(part, list):
                made[field] = [_format(item, pointer(at, field, i), depth + 1, time) for i, item in enumerate(part)]
            else:
                raise InvalidRequest(f"the format at {at} must have {field}, a list")
    elif kind not in _PLAIN:
        known = ", ".join(sorted((*_PLAIN, *_WITH_SCHEMA, "regex", *_PARTS)))
        raise InvalidRequest(f"the format at {at} has the type {clip(kind)!r}; known: {known}")
    return made


def _schema(schema: Mapping[str, Any] | bool, at: str, time: SchemaTime) -> Any:
    try:
        return json.loads(normalize(schema, time=time))
    except InvalidRequest as error:
        raise InvalidRequest(f"in the schema at {at}: {error}") from None
