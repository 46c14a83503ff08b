"""Schemas of which no answer ever ends: each object in them has to hold another one."""

from collections.abc import Mapping
from typing import Any

from pdkv.errors import InvalidRequest


def check_ends(root: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes schemas in the normal form.

    Raises:
        InvalidRequest: what fulfils `root` has no end.
    """
    ending: set[str] = set()
    while True:
        more = {name for name, schema in definitions.items() if name not in ending and _ends(schema, ending)}
        if not more:
            break
        ending |= more
    if not _ends(root, ending):
        raise InvalidRequest(
            "the schema refers to itself so that no answer could end: an optional part or another type"
        )


def _ends(schema: Mapping[str, Any], ending: set[str]) -> bool:
    """Whether something fulfils it, if the definitions in `ending` can be fulfilled."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_ends(branch, ending) for branch in schema["anyOf"])
    match schema.get("type"):
        case "object":
            properties, required = schema.get("properties", {}), schema.get("required", ())
            return all(_ends(properties[name], ending) for name in required if name in properties)
        case "array":
            prefix, least = schema.get("prefixItems", ()), schema.get("minItems", 0)
            items = schema.get("items", True)
            enough = least <= len(prefix) or isinstance(items, bool) or _ends(items, ending)
            return enough and all(_ends(item, ending) for item in prefix[:least])
    return True
