"""Whether no value fulfils two of several schemas, in which case `oneOf` is the same as `anyOf`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]
Resolve = Callable[[Mapping[str, Any] | bool], Schema]

MAX_BRANCHES = 256
"""The most branches of one `oneOf`, since each pair is compared."""


def are_disjoint(branches: Sequence[Mapping[str, Any] | bool], resolve: Resolve) -> bool:
    """Whether it is certain that no two branches have a value in common.

    Args:
        resolve: returns a schema with its `$ref` resolved.
    """
    if len(branches) > MAX_BRANCHES:
        return False
    return all(_apart(one, other, resolve, depth=2) for one, other in combinations(map(resolve, branches), 2))


def _apart(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    ones, others = values_in(one), values_in(other)
    if ones is not None and others is not None:
        return {identity(value) for value in ones}.isdisjoint(map(identity, others))
    types, other_types = types_in(one, ones), types_in(other, others)
    if types and other_types and not types & other_types:
        return True
    if types == other_types == {"object"} and depth:
        return _objects_apart(one, other, resolve, depth)
    return False


def _objects_apart(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    """By a property that both have to have, with values that differ; or that one has to have and the other may not."""
    here, there = set(one.get("required", ())), set(other.get("required", ()))
    properties, others = one.get("properties", {}), other.get("properties", {})
    for name in here & there & properties.keys() & others.keys():
        if _apart(resolve(properties[name]), resolve(others[name]), resolve, depth - 1):
            return True
    return bool(
        (other.get("additionalProperties") is False and "patternProperties" not in other and here - others.keys())
        or (one.get("additionalProperties") is False and "patternProperties" not in one and there - properties.keys())
    )


def values_in(schema: Schema) -> list[Any] | None:
    """All values that `const` or `enum` allow; None: the schema has neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def types_in(schema: Schema, values: Sequence[Any] | None) -> set[str]:
    """The types of values that fulfil the schema, with number for integer; empty: any type."""
    if values is not None:
        return {type_of(value) for value in values}
    given = schema.get("type", [])
    return {"number" if name == "integer" else name for name in ([given] if isinstance(given, str) else given)}


def type_of(value: object) -> str:
    """The type of a JSON value."""
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def identity(value: Any) -> Hashable:
    """A key that is the same for equal JSON values only: true differs from 1, but 1.0 does not."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(item)) for name, item in value.items()))
    return value  # type: ignore[no-any-return]
