"""A tool's arguments one by one, for families that write no JSON object: their schemas, and their values as JSON."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.parsers.json_value import JsonValue

Schema = Mapping[str, Any]

_ABOUT = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "strict"}
)
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECT = _ABOUT | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", list: "array"}
_MAX_REFERENCES = 32


class Member(NamedTuple):
    """One argument that a schema names."""

    name: str
    required: bool
    schema: Schema  # with the definitions that it may refer to


def read_members(schema: Schema | None) -> list[Member] | None:
    """The arguments of a tool, in their order; None: it takes any.

    Raises:
        InvalidRequest: the schema says of them together what cannot be enforced one by one.
    """
    if schema is None or ("properties" not in schema and schema.get("additionalProperties") is not False):
        return None
    for keyword in schema:
        if keyword not in _OF_OBJECT:
            raise InvalidRequest(f"{clip(keyword)!r} of the arguments cannot be enforced in the format of this model")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidRequest("properties must be an object, and required a list")
    names = [*properties, *(name for name in required if isinstance(name, str) and name not in properties)]
    return [Member(name, name in required, _resolved(properties.get(name, {}), schema)) for name in names]


def member_schema(schema: Schema | None, name: str) -> Schema:
    """What a tool's schema says of one argument, for reading it: nothing where it says nothing that can be told."""
    properties = schema.get("properties") if schema is not None else None
    given = properties.get(name, {}) if isinstance(properties, Mapping) else {}
    return _resolved(given, schema or {})


def kinds_of(schema: Schema) -> frozenset[str] | None:
    """The JSON types that values may have, integers being numbers; None: it does not say."""
    given = schema.get("type")
    if given is not None:
        kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        return frozenset("number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(_KINDS.get(type(value), "object") for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(keyword), list):
            found = [kinds_of(_resolved(way, schema)) for way in ways]
            return None if None in found else frozenset().union(*filter(None, found))
    return None


def is_free_text(schema: Schema) -> bool:
    """Whether any text may be written where such a value stands: read back, it is one of those."""
    if schema.keys() <= {*_ABOUT, *_DEFINITIONS}:
        return True
    ways = schema.get("anyOf", [schema])
    if not isinstance(ways, list) or any(key not in {*_ABOUT, *_DEFINITIONS, "type", "anyOf"} for key in schema):
        return False
    if ways != [schema] and not all(isinstance(w, Mapping) and w.keys() <= _ABOUT | {"type"} for w in ways):
        return False
    kinds = kinds_of(schema)
    integers = "integer" in json.dumps(schema.get("type", ways))
    return kinds is not None and "string" in kinds and kinds <= {"string", "null", "boolean", "number"} and not integers


def values_of(schema: Schema) -> list[Any] | None:
    """All that such a value may be; None: that is no list."""
    if schema.keys() - {*_ABOUT, *_DEFINITIONS, "type", "enum", "const", "anyOf"}:
        return None
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("anyOf"), list):
        found = [values_of(_resolved(way, schema)) for way in schema["anyOf"]]
        return None if None in found else [value for values in found for value in values or ()]
    return {"null": [None], "boolean": [True, False]}.get(str(schema.get("type")))


def json_of_written(text: str, kinds: frozenset[str] | None) -> str:
    """A value that was written without quotes as JSON: of a type that it may have, else a string."""
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    if bare and kinds != {"string"}:
        value = JsonValue()
        if value.push(bare + " ") >= len(bare) and value.done and (kinds is None or _kind(bare) in kinds - {"string"}):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _kind(written: str) -> str:
    return {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(
        written[0], "number"
    )


def _resolved(schema: object, root: Schema) -> Schema:
    """A part of `root` with its definitions, what it refers to in its place."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    for _ in range(_MAX_REFERENCES):
        if (
            not isinstance(schema, Mapping)
            or not isinstance(schema.get("$ref"), str)
            or len(schema.keys() - _ABOUT) > 1
        ):
            break
        schema = _at(root, schema["$ref"])
    return {**schema, **definitions} if isinstance(schema, Mapping) else definitions


def _at(root: Schema, reference: str) -> object:
    found: object = root if reference.startswith("#/") else {}
    for step in _steps(reference):
        found = found.get(step, {}) if isinstance(found, Mapping) else {}
    return found


def _steps(reference: str) -> Iterator[str]:
    return (step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:])
