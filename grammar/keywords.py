"""How a grammar treats the keywords of JSON Schema."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest

ANNOTATIONS = frozenset(
    {"$comment", "$schema", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml", "discriminator",
     "enumNames", "propertyOrdering", "minContains", "maxContains", "then", "else", "$defs", "definitions",
     "$vocabulary"}
)  # fmt: skip
"""Keywords that forbid nothing: `then` and `else` without `if`, bounds of `contains` without it."""

COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
OF_VALUES = ("const", "enum")
OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems")
OF_OBJECTS = (
    "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties",
)  # fmt: skip
ENFORCED = frozenset((*COMBINING, *OF_VALUES, "type", *OF_STRINGS, *OF_NUMBERS, *OF_ARRAYS, *OF_OBJECTS))
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path", "textarea", "markdown"})
"""Formats that say how to show a string, and forbid none."""

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

KEYWORDS_OF = {"object": OF_OBJECTS, "array": OF_ARRAYS, "number": OF_NUMBERS, "string": OF_STRINGS}

WHY_NOT = {
    "not": "a grammar can say what may come, but not what may not",
    "if": "a grammar has no conditions: use anyOf with a branch for each case",
    "contains": "a grammar does not look for an item: use items or prefixItems",
    "dependentRequired": "use anyOf with a branch for each case",
    "dependentSchemas": "use anyOf with a branch for each case",
    "dependencies": "use anyOf with a branch for each case",
    "additionalItems": "it belongs to older drafts: use items with prefixItems",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "$anchor": "use $ref with a JSON pointer",
    "$dynamicAnchor": "use $ref with a JSON pointer",
    "$recursiveAnchor": "use $ref with a JSON pointer",
}
"""Keywords that no grammar here enforces, and what to do instead."""

_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_SCHEMAS = frozenset(("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"))
_SCHEMA_MAPS = frozenset(("properties", "patternProperties"))
_SCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_TEXTS = frozenset(("pattern", "format", "$ref"))
_MAX_COUNT = 1_000_000
_CONTROLS = re.compile(r"[^\x08-\x0A\x0C\x0D\x20-\x7E\x80-\U0010FFFF]")


def refuse(keyword: str, at: str, why: str) -> InvalidRequest:
    """The error for a keyword in the schema at the JSON pointer `at`."""
    return InvalidRequest(f"the keyword {clip(keyword)!r} at {pointer(at, keyword)} {why}")


def pointer(at: str, *names: str | int) -> str:
    """The JSON pointer of this name within the value at `at`."""
    return at + "".join("/" + clip(str(name)).replace("~", "~0").replace("/", "~1") for name in names)


def check_keywords(schema: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The keywords of one schema that a grammar must enforce.

    Raises:
        InvalidRequest: one cannot be enforced, is unknown, or has an invalid value.
    """
    enforced = {}
    for keyword, value in schema.items():
        if keyword in ENFORCED:
            _check_value(keyword, value, at)
            if keyword != "format" or value not in FREE_FORMATS:
                enforced[keyword] = int(value) if keyword in _COUNTS else value
        elif keyword == "$id" and not at:
            continue
        elif keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            known = keyword in WHY_NOT or keyword == "$id"
            why = WHY_NOT.get(keyword, "remove it" if known else "it is not known; a note must begin with 'x-'")
            raise refuse(keyword, at, f"cannot be enforced: {why}")
    return enforced


def _check_value(keyword: str, value: object, at: str) -> None:
    """Raise InvalidRequest for a keyword with a value of a wrong kind."""
    if keyword in _COUNTS:
        if not _is_integer(value) or not 0 <= value <= _MAX_COUNT:  # type: ignore[operator]
            raise refuse(keyword, at, f"must be an integer from 0 to {_MAX_COUNT}, got {clip(repr(value))}")
    elif keyword in OF_NUMBERS:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < 1e15
            or not _is_exact(value)
        ):
            raise refuse(keyword, at, f"must be a number below 1e15, of up to 15 digits, got {clip(repr(value))}")
        _check(keyword != "multipleOf" or value > 0, keyword, at, "more than 0", value)
    elif keyword in _TEXTS:
        _check(isinstance(value, str), keyword, at, "a string", value)
        if keyword == "format" and value not in FORMATS | FREE_FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise refuse(keyword, at, f"is {clip(str(value))!r}, which cannot be enforced; what can: {known}")
    elif keyword in _SCHEMAS:
        _check(isinstance(value, dict | bool), keyword, at, "a schema", value)
    elif keyword in _SCHEMA_MAPS:
        good = isinstance(value, dict) and all(isinstance(schema, dict | bool) for schema in value.values())
        _check(good, keyword, at, "an object of schemas", value)
    elif keyword in _SCHEMA_LISTS:
        good = isinstance(value, list) and bool(value) and all(isinstance(schema, dict | bool) for schema in value)
        _check(good, keyword, at, "a list of schemas, not empty", value)
    elif keyword == "required":
        good = isinstance(value, list) and all(isinstance(name, str) for name in value)
        _check(good, keyword, at, "a list of strings", value)
    elif keyword == "enum":
        _check(isinstance(value, list) and bool(value), keyword, at, "a list, not empty", value)
        _check_values(value, keyword, at)
    elif keyword == "const":
        _check_values(value, keyword, at)
    elif keyword == "type":
        types = [value] if isinstance(value, str) else value
        good = isinstance(types, list) and bool(types) and all(name in TYPES for name in types)
        _check(good, keyword, at, f"one or several of {', '.join(TYPES)}", value)
    elif keyword == "uniqueItems":
        _check(isinstance(value, bool), keyword, at, "true or false", value)


def _is_integer(value: object) -> bool:
    """Whether a JSON number is one without a fraction."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _check(good: bool, keyword: str, at: str, expected: str, value: object) -> None:
    if not good:
        raise refuse(keyword, at, f"must be {expected}, got {clip(repr(value))}")


def _is_exact(value: float) -> bool:
    """Whether the library reads exactly this double: for the longest ones it misses the last bit."""
    _, digits, exponent = Decimal(str(value)).as_tuple() if isinstance(value, float) else (0, (0,), 0)
    return int("".join(map(str, digits))) <= 2**53 and abs(int(exponent)) <= 22


def _check_values(value: object, keyword: str, at: str) -> None:
    """Check values: the library keeps numbers as doubles, and writes control characters in strings only as short
    escapes.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_values(item, keyword, at)
    elif isinstance(value, int | float) and not (abs(value) <= 2**53 and _is_exact(value)):
        raise refuse(keyword, at, f"has a number beyond 2**53, or of more than 15 digits: {clip(str(value))}")
    elif isinstance(value, str) and _CONTROLS.search(value):
        raise refuse(keyword, at, f"has a control character that cannot be enforced: {clip(repr(value))}")
