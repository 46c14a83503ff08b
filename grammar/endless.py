"""Detects schemas for which no answer ever ends, since each object in them must contain another one."""

from collections.abc import Iterator, Mapping
from typing import Any

from pdkv.errors import InvalidRequest
from pdkv.grammar.schema_time import SchemaTime


def check_ends(root: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]], time: SchemaTime) -> None:
    """Check schemas in the normal form.

    Raises:
        InvalidRequest: values of `root` have no end, or the time limit has passed.
        RequestAborted: the request was cancelled.
    """
    users: dict[str, list[str]] = {}  # by definition: those that refer to it
    for name, schema in definitions.items():
        time.check()
        for used in dict.fromkeys(_references(schema)):
            users.setdefault(used, []).append(name)
    ending: set[str] = set()
    pending = list(definitions)
    while pending:
        time.check()
        name = pending.pop()
        if name not in ending and _ends(definitions[name], ending):
            ending.add(name)
            pending += users.get(name, ())
    if not _ends(root, ending):
        raise InvalidRequest(
            "the schema refers to itself such that no answer could end: use an optional part or another type"
        )


def _references(schema: Any) -> Iterator[str]:
    """The definitions that a schema, or a part of one, refers to."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield _name(schema["$ref"])
    parts = [part for name in ("anyOf", "allOf", "prefixItems") for part in schema.get(name, ())]
    for part in (*parts, *schema.get("properties", {}).values(), schema.get("items")):
        yield from _references(part)


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether some value matches it, if the definitions in `ending` can be matched."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and _name(schema["$ref"]) not in ending:
        return False
    if "anyOf" in schema and not any(_ends(branch, ending) for branch in schema["anyOf"]):
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    match schema.get("type"):
        case "object" | ["object"]:
            properties, required = schema.get("properties", {}), schema.get("required", ())
            return all(_ends(properties[name], ending) for name in required if name in properties)
        case "array" | ["array"]:
            prefix, least = schema.get("prefixItems", ()), schema.get("minItems", 0)
            enough = least <= len(prefix) or _ends(schema.get("items", True), ending)
            return enough and all(_ends(item, ending) for item in prefix[:least])
    return True
