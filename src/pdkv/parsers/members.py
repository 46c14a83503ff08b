"""A tool's arguments one by one, for families that do not write JSON objects: their schemas, and their values
as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.disjoint import types_in, values_in
from pdkv.parsers.json_value import JsonValue

Schema = Mapping[str, Any]

_ABOUT = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "strict"}
)
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECT = _ABOUT | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KIND_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""By a JSON value's first character; else it is a number."""
_MAX_REFERENCES = 32
_MAX_WAYS = 64
_MAX_MEMBERS = 200


class Member(NamedTuple):
    """One argument in a schema."""

    name: str
    required: bool
    schema: Schema  # with the definitions that it may refer to


def read_members(schema: Schema | None) -> list[Member] | None:
    """The arguments of a tool, in order; None: any are allowed.

    Raises:
        InvalidRequest: the schema constrains them together in a way that cannot be enforced one by one.
    """
    if schema is None or ("properties" not in schema and schema.get("additionalProperties") is not False):
        return None
    for keyword in schema:
        if keyword not in _OF_OBJECT:
            raise InvalidRequest(f"{clip(keyword)!r} of the arguments cannot be enforced in the format of this model")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidRequest("properties must be an object, and required a list")
    needed = dict.fromkeys(name for name in required if isinstance(name, str))
    names = [*properties, *(name for name in needed if name not in properties)]
    if len(names) > _MAX_MEMBERS:
        raise InvalidRequest(f"more than {_MAX_MEMBERS} arguments cannot be enforced in the format of this model")
    return [Member(name, name in needed, _resolved(properties.get(name, {}), schema)) for name in names]


def member_schema(schema: Schema | None, name: str) -> Schema:
    """The part of a tool's schema about one argument, for parsing it: empty if nothing is known."""
    properties = schema.get("properties") if schema is not None else None
    given = properties.get(name, {}) if isinstance(properties, Mapping) else {}
    return _resolved(given, schema or {})


def _ways(schema: Schema) -> list[Schema]:
    """The alternatives for a value; for too many, or a recursive schema, the schema itself."""
    found: list[Schema] = []
    todo = [schema]
    for _ in range(_MAX_WAYS):
        if not todo:
            return found
        one = todo.pop(0)
        nested = one.get("anyOf")
        if isinstance(nested, list) and len(nested) <= _MAX_WAYS and one.keys() <= {*_ABOUT, *_DEFINITIONS, "anyOf"}:
            todo += [_resolved(way, schema) for way in nested]
        else:
            found.append(one)
    return [schema]


def kinds_of(schema: Schema) -> frozenset[str] | None:
    """The JSON types that values may have, with integers counted as numbers; None: unknown."""
    try:
        kinds = [types_in(way, values_in(way)) for way in _ways(schema)]
    except TypeError:  # a type or an enum that is none
        return None
    return frozenset().union(*kinds) if all(kinds) else None


def is_free_text(schema: Schema) -> bool:
    """Whether any text may be written for such a value: read back, it is a valid value."""
    if schema.keys() <= {*_ABOUT, *_DEFINITIONS}:
        return True
    ways, kinds = _ways(schema), kinds_of(schema) or frozenset()
    is_plain = all(way.keys() <= {*_ABOUT, *_DEFINITIONS, "type"} and "integer" not in way["type"] for way in ways)
    return is_plain and "string" in kinds and kinds <= {"string", "null", "boolean", "number"}


def values_of(schema: Schema) -> list[Any] | None:
    """All possible values; None: they cannot be listed."""
    of_types: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
    found: list[Any] = []
    for way in _ways(schema):
        values = [way["const"]] if "const" in way else way.get("enum", of_types.get(str(way.get("type"))))
        if not isinstance(values, list) or way.keys() - {*_ABOUT, *_DEFINITIONS, "type", "enum", "const"}:
            return None
        found += values
    return found


def json_of_written(text: str, kinds: frozenset[str] | None) -> str:
    """The JSON of a value that was written without quotes: of a type that it may have, otherwise a string."""
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    if bare and kinds != frozenset({"string"}):
        value = JsonValue()
        is_json = value.push(bare + " ") >= len(bare) and value.done
        if is_json and (kinds is None or _KIND_OF.get(bare[0], "number") in kinds - {"string"}):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _resolved(schema: Any, root: Schema) -> Schema:
    """A part of `root` with its definitions, with references resolved."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    for _ in range(_MAX_REFERENCES):
        alone = isinstance(schema, Mapping) and len(schema.keys() - _ABOUT) <= 1
        if not alone or not isinstance(schema.get("$ref"), str):
            break
        reference, schema = schema["$ref"], root
        for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",):
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step, {}) if isinstance(schema, Mapping) else {}
    return {**schema, **definitions} if isinstance(schema, Mapping) else definitions
