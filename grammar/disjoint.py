"""Whether no value fulfils two of several schemas: what `oneOf` needs to be the same as `anyOf`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from pdkv.grammar.merge import identity, type_names

Schema = dict[str, Any]
Resolve = Callable[[Mapping[str, Any] | bool, str], Schema]

MAX_BRANCHES = 256
"""Of one `oneOf`: each pair is looked at."""


def are_disjoint(branches: Sequence[Schema], resolve: Resolve) -> bool:
    """Whether it can be seen that no two branches have a value in common.

    Args:
        resolve: gives a schema with what its `$ref` points to in its place.
    """
    if len(branches) > MAX_BRANCHES:
        return False
    return all(_apart(one, other, resolve, depth=2) for one, other in combinations(branches, 2))


def _apart(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    ones, others = _values(one), _values(other)
    if ones is not None and others is not None:
        return {identity(value) for value in ones}.isdisjoint(map(identity, others))
    types, other_types = _types(one, ones), _types(other, others)
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
        if _apart(resolve(properties[name], ""), resolve(others[name], ""), resolve, depth - 1):
            return True
    return bool(
        (other.get("additionalProperties") is False and "patternProperties" not in other and here - others.keys())
        or (one.get("additionalProperties") is False and "patternProperties" not in one and there - properties.keys())
    )


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _types(schema: Schema, values: Sequence[Any] | None) -> set[str]:
    """The types of what fulfils it, number for integer; empty where any may."""
    if values is not None:
        return {type_of(value) for value in values}
    return {"number" if name == "integer" else name for name in type_names(schema.get("type", []))}


def type_of(value: object) -> str:
    """The type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: tuple[tuple[type, str], ...] = ((int, "number"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")
