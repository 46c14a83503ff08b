"""A JSON schema as the library enforces it to the letter, or a refusal that names the keyword and its place.

The library merges combined schemas, and refuses what it does not know. This module adds checks for what the library
would ignore, and what clients implicitly mean: an object or a list contains what its schema names, and nothing else.
"""

import json
import math
from collections.abc import Mapping
from itertools import takewhile
from typing import Any
from urllib.parse import unquote

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.disjoint import are_disjoint
from pdkv.grammar.keywords import COMBINING, KEYWORDS_OF, OF_VALUES, check_keywords, pointer, refuse
from pdkv.grammar.patterns import FORMATS, pattern_of, whole
from pdkv.grammar.schema_time import SchemaTime

MAX_SCHEMAS = 20_000
"""The most schemas in one; those made in two ways are counted twice."""

MAX_DEPTH = 64
"""The deepest nesting of schemas."""

_LAYOUT = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""At most one space after commas and colons: a model in doubt writes spaces and line ends endlessly."""

MAX_WAYS = 2000
"""The most ways in which an answer may continue at one place: the library gives up at more of its items."""

Schema = dict[str, Any]
AnySchema = Mapping[str, Any] | bool


def normalize(schema: AnySchema, *, time: SchemaTime | None = None) -> str:
    """The JSON text of a schema that a grammar enforces as it stands.

    Args:
        time: its time limit; None: the limit for all schemas of one request.

    Raises:
        InvalidRequest: a keyword cannot be enforced, or is wrong; its place is a JSON pointer.
        RequestAborted: the request was cancelled.
    """
    made = _Normalizer(schema, time or SchemaTime()).run()
    return json.dumps(made, ensure_ascii=False, separators=(",", ":"))


class _Normalizer:
    """One schema. What `$ref` points to becomes an entry of `$defs`.

    A schema that holds alone, with no other beside it, may be closed: properties that it does not name are not there.
    """

    def __init__(self, root: AnySchema, time: SchemaTime) -> None:
        self._root = root
        self._time = time
        self._definitions: dict[str, Any] = {}  # by the name that they get
        self._names: dict[tuple[str, bool], str] = {}  # of what a reference means, alone or not
        self._pending: list[tuple[str, AnySchema, str, bool]] = []
        self._count = self._depth = 0
        self._decimals = 0  # of any `multipleOf`
        self._multiple = 1  # of all of them, in units of the last decimal
        self._has_open_names = False  # beside names that have schemas of their own

    def run(self) -> Any:
        made = self._schema(self._root, "", alone=True)
        while self._pending:
            name, target, at, alone = self._pending.pop()
            self._definitions[name] = self._schema(target, at, alone=alone)
        escapes = 'nrbtf\\"' + "u" * (not self._has_open_names)
        options = {"json_allowed_escapes": escapes, "json_allow_general_unicode_escapes": not self._has_open_names}
        return {
            "x-guidance": {**_LAYOUT, **options},
            **({} if made is True else made),
            **({"$defs": self._definitions} if self._definitions else {}),
        }

    def _schema(self, schema: AnySchema, at: str, *, alone: bool) -> Any:
        """One schema and those in it; `alone`: see above."""
        self._count += 1
        self._depth += 1
        if self._count > MAX_SCHEMAS:
            raise InvalidRequest(f"the schema contains more than {MAX_SCHEMAS} schemas, seen at {at or 'its root'}")
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(f"the schema is more than {MAX_DEPTH} deep at {at}")
        self._time.check()
        try:
            if isinstance(schema, bool):
                if not schema and not at:
                    raise InvalidRequest("the schema at the root is false: no answer could match it")
                return schema
            return self._object(check_keywords(schema, at), at, alone)
        finally:
            self._depth -= 1

    def _object(self, schema: Schema, at: str, alone: bool) -> Schema:
        _name_by_pattern(schema, at)
        combining = [name for name in COMBINING if name in schema]
        # Where it says no more than that its branches may hold, they are alone as it is.
        passes_on = schema.keys() - {"type"} == set(combining[:1]) and len(schema.get("allOf", (1,))) == 1
        beside = self._close(schema, at, alone and not passes_on)
        _check_counts(schema, at)
        if alone and "type" not in schema and not any(name in schema for name in OF_VALUES):
            types = [name for name, keywords in KEYWORDS_OF.items() if not schema.keys().isdisjoint(keywords)]
            if types and (not combining or types == ["object"]):
                schema["type"] = types
        is_open = schema.get("additionalProperties") is not False
        if is_open and not schema.keys().isdisjoint(("properties", "patternProperties")):
            self._has_open_names = True  # by an escape one would pass for another
        made: Schema = {}
        for keyword, value in schema.items():
            place = pointer(at, keyword)
            if keyword == "$ref":
                made[keyword] = self._reference(value, at, alone=alone and passes_on)
            elif keyword in COMBINING:
                if keyword == "oneOf" and not are_disjoint(value, lambda part: self._resolved(part, at)):
                    raise refuse("oneOf", at, _NOT_DISJOINT)
                parts = self._schemas(value, place, alone=alone and passes_on)
                beside += parts if keyword == "allOf" else [{"anyOf": parts}]
            else:
                made[keyword] = self._own(keyword, value, place, alone)
        if made.get("format") in FORMATS:
            beside.append({"pattern": whole(FORMATS[made.pop("format")])})
        if beside:
            made["allOf"] = beside
        if _num_ways(made) > MAX_WAYS:
            where = (
                f"the schema at {at or 'its root'} has too many branches that are no scalars, or optional properties"
            )
            raise InvalidRequest(f"{where}: an answer may continue in at most {MAX_WAYS} ways")
        return made

    def _own(self, keyword: str, value: Any, at: str, alone: bool) -> Any:
        """The value of a keyword that does not combine schemas."""
        match keyword:
            case "items" | "additionalProperties":
                return self._schema(value, at, alone=alone)
            case "prefixItems":
                return self._schemas(value, at, alone=alone)
            case "properties":
                return {name: self._schema(part, pointer(at, name), alone=alone) for name, part in value.items()}
            case "patternProperties":
                places = {name: pointer(at, name) for name in value}
                return {
                    pattern_of(name, f"the pattern at {place}", in_json=True): self._schema(
                        value[name], place, alone=alone
                    )
                    for name, place in places.items()
                }
            case "pattern":
                return whole(pattern_of(value, f"the keyword 'pattern' at {at}", in_json=True))
            case "multipleOf":
                self._check_multiple(value, at)
            case "exclusiveMinimum":
                return _beyond(value, math.inf)
            case "exclusiveMaximum":
                return _beyond(value, -math.inf)
        return value

    def _check_multiple(self, value: float, at: str) -> None:
        """Where several hold together, the library multiplies them in 32 bits, with the decimals of the longest."""
        decimals = 0
        while value % 1:  # as the library counts them: many in 0.07
            value *= 10
            decimals += 1
        self._multiple *= 10 ** max(0, decimals - self._decimals)
        value *= 10 ** max(0, self._decimals - decimals)
        self._decimals = max(decimals, self._decimals)
        if self._multiple * value >= 1 << 32:
            raise InvalidRequest(f"the keyword 'multipleOf' at {at} has too many digits, with those before together")
        self._multiple = math.lcm(self._multiple, int(value))

    def _schemas(self, schemas: list[AnySchema], at: str, *, alone: bool) -> list[Any]:
        return [self._schema(part, pointer(at, i), alone=alone) for i, part in enumerate(schemas)]

    # --- what is not named --------------------------------------------------------------------------------------------

    def _close(self, schema: Schema, at: str, alone: bool) -> list[Schema]:
        """Enforce `unevaluated…` or, without it, that a schema that holds alone names everything.

        Changes the schema, and returns an additional condition if it combines others.
        """
        beside = []
        for keyword, others, named in _CLOSING:
            asked = schema.pop(keyword, None)
            rest = not alone if asked is None else asked
            if rest in (True, {}):
                continue
            names = self._named(schema, keyword, others, named, at, is_asked=asked is not None)
            if names is None or (asked is None and len(names) <= schema.get("minItems", 0) * (named != "properties")):
                continue
            listed: Any = dict.fromkeys(names, True) if named == "properties" else [True] * len(names)
            if schema.keys().isdisjoint(COMBINING):
                schema.update(
                    {named: listed | schema.get(named, {}), others: rest} if named == "properties" else {others: rest}
                )
            else:
                beside.append({named: listed, others: self._schema(rest, pointer(at, keyword), alone=False)})
        return beside

    def _named(
        self, schema: Schema, keyword: str, others: str, named: str, at: str, *, is_asked: bool, depth: int = 0
    ) -> dict[Any, None] | None:
        """The properties, or the numbers of items, named by a schema and those that it combines; None: no limit.

        Raises:
            InvalidRequest: that depends on the value, and `is_asked`.
        """
        if others in schema or keyword in schema or depth > MAX_DEPTH:
            return None
        own = schema.get(named, ())
        names = dict.fromkeys(own if named == "properties" else range(len(own)))
        if not is_asked and named == "properties":
            names |= dict.fromkeys(schema.get("required", ()) if names or depth else ())
        by_pattern = named == "properties" and ("patternProperties" in schema or "propertyNames" in schema)
        parts = [part for name in COMBINING if name in schema for part in _parts(schema, name)]
        if is_asked and (
            (by_pattern and (parts or depth)) or (parts and not schema.keys().isdisjoint(("anyOf", "oneOf")))
        ):
            raise refuse(keyword, at, "cannot be enforced: what is evaluated depends on the value")
        if by_pattern and (parts or depth):
            return None
        for part in parts:
            within = self._named(
                self._resolved(part, at), keyword, others, named, at, is_asked=is_asked, depth=depth + 1
            )
            if within is None:
                return None
            names |= within
        return names

    # --- references -----------------------------------------------------------------------------------------------

    def _reference(self, uri: str, at: str, *, alone: bool) -> str:
        """A reference to a definition, which will be made if this is the first to it."""
        name = self._names.get((uri, alone))
        if name is None:
            name = self._names[uri, alone] = f"d{len(self._names)}"
            self._pending.append((name, self._target(uri, at), uri[1:], alone))
        return f"#/$defs/{name}"

    def _target(self, uri: str, at: str) -> AnySchema:
        """What a reference points to, as the client wrote it."""
        if uri != "#" and not uri.startswith("#/"):
            raise refuse(
                "$ref", at, f"must be '#' or begin with '#/', since other documents are not read: got {clip(uri)!r}"
            )
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
            raise refuse("$ref", at, f"does not point to a schema: {clip(uri)!r}")
        return target

    def _resolved(self, schema: AnySchema, at: str) -> Schema:
        """A schema with its reference resolved; if it has more besides the reference, only that."""
        for _ in range(MAX_DEPTH):
            self._time.check()
            kept = check_keywords({} if schema is True else {"enum": []} if schema is False else schema, at)
            if kept.keys() != {"$ref"}:
                return kept
            schema = self._target(kept["$ref"], at)
        raise refuse("$ref", at, "is a loop that never reaches a schema")


_CLOSING = (
    ("unevaluatedProperties", "additionalProperties", "properties"),
    ("unevaluatedItems", "items", "prefixItems"),
)

_NOT_DISJOINT = (
    "cannot be enforced: an answer may fulfil two of its branches, as far as can be seen from their types, values, or "
    "a required property with values of its own in each; use anyOf"
)


def _beyond(bound: float, end: float) -> float:
    """A bound that excludes as much: the library lets an integer pass beside a bound that lies less than 1 away."""
    return bound + math.copysign(max(4 * math.ulp(bound), 1e-15), end) if float(bound).is_integer() else bound


def _num_ways(schema: Any) -> int:
    """A lower bound on the library's items at the beginning of an answer."""
    if not isinstance(schema, dict):
        return 0
    required = set(schema.get("required", ()))
    num_optional = len(list(takewhile(lambda name: name not in required, schema.get("properties", ()))))
    inner = [sum(map(_num_ways, schema.get("anyOf", ()))), *map(_num_ways, schema.get("allOf", ()))]
    is_any = "$ref" in schema or any(name in schema.get("type", ()) for name in ("object", "array"))
    return max(int(is_any), (3 if required else 4) * num_optional - 1, *inner)


def _parts(schema: Schema, keyword: str) -> list[AnySchema]:
    return [{"$ref": schema[keyword]}] if keyword == "$ref" else schema[keyword]


def _check_counts(schema: Schema, at: str) -> None:
    """Names that are not listed may come twice, and count once then."""
    least = schema.get("minProperties", 0)
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if least > max(1, len(schema.get("required", ()))) and not is_closed:
        raise refuse("minProperties", at, "can be enforced up to 1, or for listed properties alone")
    if schema.get("uniqueItems"):
        raise refuse("uniqueItems", at, "cannot be enforced: a grammar does not compare items")
    schema.pop("uniqueItems", None)


def _name_by_pattern(schema: Schema, at: str) -> None:
    """Properties in place of `propertyNames`: listed, or with a pattern."""
    names = schema.pop("propertyNames", True)
    if names in (True, {}):
        return
    if beside := next((name for name in ("properties", "patternProperties", "required") if name in schema), None):
        raise refuse("propertyNames", at, f"cannot be enforced together with {beside}: a name may be in both")
    others = schema.get("additionalProperties", schema.pop("unevaluatedProperties", True))
    own = check_keywords({"enum": []} if names is False else names, pointer(at, "propertyNames"))
    kind, given = own.pop("type", "string"), own.keys()
    listed = [own["const"]] if "const" in own else own.get("enum", ())
    if kind == "string" and len(given) == 1 and listed:
        schema["properties"] = {name: others for name in listed if isinstance(name, str)}
    elif kind == "string" and given and (given <= {"minLength", "maxLength"} or given == {"pattern"}):
        counts = f"{own.get('minLength', 0)},{own.get('maxLength', '')}"
        schema["patternProperties"] = {
            f"^(?:{own['pattern']})$" if "pattern" in own else rf"^[\s\S]{{{counts}}}$": others
        }
    else:
        raise refuse("propertyNames", at, "can only be enforced with a pattern, an enum, or a length")
    schema["additionalProperties"] = False
