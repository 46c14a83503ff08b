"""Two schemas that an answer has to fulfil at once, as one."""

from collections.abc import Callable, Hashable
from typing import Any

from pdkv.grammar.keywords import COMBINING, TYPES, Contradiction, check_value, pointer, refuse

Schema = dict[str, Any]

_OF_OTHERS = (
    ("additionalProperties", ("properties", "patternProperties")),
    ("items", ("prefixItems",)),
)
"""Keywords that are about what others beside them leave over."""

_UNEVALUATED = (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"))


def part(schema: Schema, at: str) -> Schema:
    """A schema within another one, before they are merged: its `unevaluated…` knows nothing of what stands beside it.

    Raises:
        InvalidRequest: it knows what stands in schemas within it, which cannot be enforced once they are merged.
    """
    made = {**schema}
    for keyword, alone in _UNEVALUATED:
        if (value := made.pop(keyword, True)) in (True, {}):
            continue
        if any(name in made for name in COMBINING):
            raise refuse(keyword, at, f"cannot be enforced with schemas within and beside it: use {alone}")
        made.setdefault(alone, value)
    return made


def merge(first: Schema, second: Schema, at: str) -> Schema:
    """The keywords of both; `at` is the place of what they make together.

    Raises:
        Contradiction: nothing fulfils both.
        InvalidRequest: a keyword of both cannot be combined.
    """
    for one, other in ((first, second), (second, first)):
        for keyword, others in _OF_OTHERS:
            if one.get(keyword, True) not in (True, {}) and any(_adds(one, other, name) for name in others):
                raise refuse(keyword, at, f"cannot be enforced together with {others[0]} of a schema beside it")
    merged = {**first}
    for keyword, value in second.items():
        if keyword in ("const", "enum") and any(name in merged for name in ("const", "enum")):
            merged["enum"] = _common(_values(merged), _values({keyword: value}))
            merged.pop("const", None)
        elif keyword not in merged or merged[keyword] == value:
            merged[keyword] = value
        elif keyword in _JOINED:
            check_value(keyword, value, at)
            merged[keyword] = _JOINED[keyword](merged[keyword], value, at)
        else:
            raise refuse(keyword, at, "is given twice by schemas that hold together, and cannot be combined")
    if merged.get("enum") == []:
        raise Contradiction(f"nothing is left of enum at {pointer(at, 'enum')}: no answer could fulfil the schema")
    return merged


def _adds(one: Schema, other: Schema, name: str) -> bool:
    """Whether `other` names properties, or items, that `one` does not."""
    if name == "prefixItems":
        return len(other.get(name, ())) > len(one.get(name, ()))
    return not set(other.get(name, ())) <= set(one.get(name, ()))


def _values(schema: Schema) -> list[Any]:
    if "const" not in schema:
        return list(schema["enum"])
    return _common([schema["const"]], schema.get("enum", [schema["const"]]))


def _common(first: list[Any], second: list[Any]) -> list[Any]:
    others = {identity(value) for value in second}
    return [value for value in first if identity(value) in others]


def identity(value: Any) -> Hashable:
    """The same for two JSON values that are equal, and for no others: true is not 1, and 1.0 is."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(item)) for name, item in value.items()))
    return value  # type: ignore[no-any-return]


def type_names(given: object) -> list[str]:
    """The types that `type` allows."""
    return [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]


def _types(first: object, second: object, at: str) -> list[str]:
    ones, others = type_names(first), type_names(second)
    both = [name for name in ones if name in others or (name == "integer" and "number" in others)]
    both += ["integer"] if "integer" in others and "number" in ones and "integer" not in ones else []
    if not both:
        text = f"the types {ones} and {others} at {pointer(at, 'type')} have none in common: no answer could be of both"
        raise Contradiction(text)
    return [name for name in TYPES if name in both]


def _both(first: object, second: object, at: str) -> object:
    """A schema that stands for two; they are merged when it is looked at."""
    if first is True or first == {}:
        return second
    return first if second is True or second == {} else {"allOf": [first, second]}


def _properties(first: Schema, second: Schema, at: str) -> Schema:
    merged = {**first}
    for name, schema in second.items():
        merged[name] = _both(merged[name], schema, at) if name in merged else schema
    return merged


def _prefix_items(first: list[Any], second: list[Any], at: str) -> list[Any]:
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    return [_both(item, shorter[i], at) if i < len(shorter) else item for i, item in enumerate(longer)]


def _required(first: list[str], second: list[str], at: str) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _larger(first: float, second: float, at: str) -> float:
    return max(first, second)


def _smaller(first: float, second: float, at: str) -> float:
    return min(first, second)


def _all_of(first: list[Any], second: list[Any], at: str) -> list[Any]:
    return [*first, *second]


def _or(first: bool, second: bool, at: str) -> bool:
    return first or second


_JOINED: dict[str, Callable[[Any, Any, str], Any]] = {
    "type": _types,
    "required": _required,
    "properties": _properties,
    "prefixItems": _prefix_items,
    "items": _both,
    "additionalProperties": _both,
    "unevaluatedProperties": _both,
    "unevaluatedItems": _both,
    "propertyNames": _both,
    "allOf": _all_of,
    "uniqueItems": _or,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _larger),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _smaller),
}
