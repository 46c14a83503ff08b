"""A JSON schema in the form that a grammar enforces to the letter, or a refusal that names the keyword and its place.

xgrammar reads a schema by the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type` that it finds, and
leaves out what stands beside it, as it leaves out `not`, `uniqueItems` and others. So every schema is brought here into
one where nothing stands beside: what it accepts may be less than the client's schema does, and is never more.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from pdkv.errors import InvalidRequest
from pdkv.grammar.disjoint import are_disjoint
from pdkv.grammar.endless import check_ends
from pdkv.grammar.keywords import (
    COMBINING,
    KEYWORDS_OF,
    OF_VALUES,
    TYPES,
    Contradiction,
    check_keywords,
    pointer,
    refuse,
)
from pdkv.grammar.leaves import array, number, objects, string, values
from pdkv.grammar.merge import merge, part
from pdkv.grammar.schema_time import SchemaTime
from pdkv.limits import clip

MAX_SCHEMAS = 20_000
"""Schemas in one, those counted again that are merged into several."""

MAX_DEPTH = 64
"""Of schemas in each other, in the client's own and where they are merged."""

Schema = dict[str, Any]


def normalize(schema: Mapping[str, Any] | bool, *, time: SchemaTime | None = None) -> str:
    """The JSON text of a schema that a grammar enforces as it stands.

    Args:
        time: what it may take; None: as much as all schemas of one request.

    Raises:
        InvalidRequest: a keyword cannot be enforced, is wrong, or contradicts another; its place is a JSON pointer.
        RequestAborted: nobody waits for it any more.
    """
    made = _Normalizer(schema, time or SchemaTime()).run()
    return json.dumps(made, ensure_ascii=False, separators=(",", ":"))


class _Normalizer:
    """One schema. What `$ref` points to becomes an entry of `$defs` that is made once."""

    def __init__(self, root: Mapping[str, Any] | bool, time: SchemaTime) -> None:
        self._root = root
        self._time = time
        self._definitions: dict[str, Schema] = {}  # by the name that they get
        self._names: dict[str, str] = {}  # by the pointer as the client wrote it
        self._pending: list[tuple[str, Schema, str]] = []  # definitions to make: name, the client's schema, its place
        self._count = 0
        self._depth = 0
        self._leaves: dict[str, Callable[[Schema, str], Schema]] = {
            "string": string,
            "array": lambda schema, at: array(schema, at, self.schema),
            "object": lambda schema, at: objects(schema, at, self.schema),
        }

    def run(self) -> Schema:
        made = self.schema(self._root, "")
        while self._pending:
            name, target, at = self._pending.pop()
            self._definitions[name] = self.schema(target, at)
        check_ends(made, self._definitions, self._time)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def schema(self, schema: Mapping[str, Any] | bool, at: str) -> Schema:
        """The normal form of one schema and of those in it."""
        self._count += 1
        self._depth += 1
        if self._count > MAX_SCHEMAS:
            raise InvalidRequest(f"the schema holds more than {MAX_SCHEMAS} schemas, seen at {at or 'its root'}")
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(f"the schema is more than {MAX_DEPTH} deep at {at}")
        self._time.check()
        try:
            if schema is False:
                raise InvalidRequest(f"the schema at {at or 'the root'} is false: no answer could fulfil it")
            return self._combined({} if schema is True else check_keywords(dict(schema), at), at)
        finally:
            self._depth -= 1

    def _combined(self, schema: Schema, at: str) -> Schema:
        """Resolve what combines schemas, one keyword at a time."""
        keyword = next((name for name in COMBINING if name in schema), None)
        if keyword is None:
            return self._leaf(schema, at)
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword == "$ref":
            if not rest:
                return self._reference(schema["$ref"], at)
            return self.schema(merge(part(self._target(schema["$ref"], at), at), rest, at), at)
        if keyword == "allOf":
            for i, each in enumerate(schema["allOf"]):
                place = pointer(at, "allOf", i)
                rest = merge(rest, part(self._without_reference(each, place), place), place)
            return self.schema(rest, at)
        if keyword == "oneOf":
            self._check_disjoint(schema["oneOf"], at)
        return self._either(schema[keyword], rest, keyword, at)

    def _either(self, branches: list[Any], rest: Schema, keyword: str, at: str) -> Schema:
        """Each branch with what stands beside all of them; branches that nothing could fulfil are left out."""
        made, errors = [], []
        for i, branch in enumerate(branches):
            place = pointer(at, keyword, i)
            if branch is False:
                continue
            if not rest:
                made.append(self.schema(branch, place))
                continue
            try:
                merged = merge(part(self._without_reference(branch, place), place), rest, place)
            except Contradiction as error:
                errors.append(error)
                continue
            made.append(self.schema(merged, place))
        if not made:
            raise errors[0] if errors else refuse(keyword, at, "has no branch that an answer could fulfil")
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _leaf(self, schema: Schema, at: str) -> Schema:
        if any(name in schema for name in OF_VALUES):
            return values(schema, at)
        given = schema.get("type")
        types = [given] if isinstance(given, str) else list(dict.fromkeys(given or ()))
        if "number" in types and "integer" in types:
            types.remove("integer")
        if not types:
            types = [
                name for name in TYPES if name != "integer" and any(k in schema for k in KEYWORDS_OF.get(name, ()))
            ]
        if not types:
            return {}
        made = [self._typed(schema, name, at) for name in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _typed(self, schema: Schema, name: str, at: str) -> Schema:
        own = {keyword: schema[keyword] for keyword in KEYWORDS_OF.get(name, ()) if keyword in schema}
        if name in ("number", "integer"):
            return number({"type": name, **own}, at)
        make = self._leaves.get(name)
        return {"type": name} if make is None else make({"type": name, **own}, at)

    # --- references -----------------------------------------------------------------------------------------------

    def _reference(self, uri: str, at: str) -> Schema:
        """A reference to a definition, which will be made if this is the first to it."""
        name = self._names.get(uri)
        if name is None:
            target = self._target(uri, at)
            name = self._names[uri] = f"d{len(self._names)}"
            self._pending.append((name, target, uri[1:]))
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, uri: str, at: str) -> Schema:
        """What a reference points to, as the client wrote it."""
        if uri != "#" and not uri.startswith("#/"):
            raise refuse("$ref", at, f"must be '#' or begin with '#/', other documents are not read: got {clip(uri)!r}")
        target: Any = self._root
        for name in unquote(uri).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and len(name) < 7 and int(name) < len(target):
                target = target[int(name)]
            else:
                raise refuse("$ref", at, f"points to nothing: {clip(uri)!r}")
        if not isinstance(target, Mapping | bool):
            raise refuse("$ref", at, f"points to no schema: {clip(uri)!r}")
        return {} if target is True else {"enum": []} if target is False else dict(target)

    def _without_reference(self, schema: Mapping[str, Any] | bool, at: str) -> Schema:
        """A schema that is to be merged with others: what it refers to, in its place."""
        merged: Schema = {} if schema is True else {"enum": []} if schema is False else check_keywords(dict(schema), at)
        for _ in range(MAX_DEPTH):
            self._time.check()
            if "$ref" not in merged:
                return merged
            target = self._target(merged["$ref"], at)
            rest = {name: value for name, value in merged.items() if name != "$ref"}
            merged = merge(part(check_keywords(target, at), at), rest, at)
        raise refuse("$ref", at, "is a loop that comes to no schema")

    def _check_disjoint(self, branches: list[Any], at: str) -> None:
        """`oneOf` can be enforced where no answer fulfils two of its branches."""
        resolved = [self._without_reference(branch, pointer(at, "oneOf", i)) for i, branch in enumerate(branches)]
        if len(resolved) > 1 and not are_disjoint(resolved, self._without_reference):
            raise refuse(
                "oneOf",
                at,
                "cannot be enforced: an answer may fulfil two of its branches, as far as can be seen from their types, "
                "values, or a required property with a value of its own in each; use anyOf",
            )
