"""Schemas of one type, of given values: what a grammar enforces of them, in the form in which it does."""

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor
from typing import Any

from pdkv.grammar.disjoint import type_of
from pdkv.grammar.keywords import Contradiction, is_integer, pointer, refuse
from pdkv.grammar.merge import identity, type_names
from pdkv.grammar.patterns import FORMATS, FREE_FORMATS, other_names, pattern_of, pattern_of_length
from pdkv.grammar.regex import MAX_POSITIONS
from pdkv.grammar.regex_writer import literal
from pdkv.limits import clip

Schema = dict[str, Any]
Make = Callable[[Mapping[str, Any] | bool, str], Schema]

_DECIMALS = 6
"""Of numbers between two bounds, in the library's grammars."""

_MAX_MULTIPLE = 1024
_MAX_MULTIPLES_RANGE = 10_000
_MAX_NAMES_CHARS = 8192
"""Characters of all names of an object that may have others, too."""


def values(schema: Schema, at: str) -> Schema:
    """`const` or `enum`, with `type` beside them at most."""
    keyword = "enum" if "enum" in schema else "const"
    given = list(schema["enum"]) if "enum" in schema else [schema["const"]]
    if "const" in schema:
        given = [value for value in given if identity(value) == identity(schema["const"])]
    beside = [name for name in schema if name not in ("enum", "const", "type")]
    if beside:
        raise refuse(beside[0], at, f"cannot be enforced beside {keyword}: leave out the values that it forbids")
    if "type" in schema:
        types = type_names(schema["type"])
        given = [value for value in given if _is_of(value, types)]
    if not given:
        raise Contradiction(f"no value of {keyword} at {pointer(at, keyword)} fulfils what stands beside it")
    for value in given:
        _check_numbers(value, keyword, at)
    return {"enum": given}


def _is_of(value: object, types: Iterable[str]) -> bool:
    name = type_of(value)
    return name in types or (name == "number" and "integer" in types and is_integer(value))


def _check_numbers(value: object, keyword: str, at: str) -> None:
    """Numbers are kept as a double or 64 bits."""
    if isinstance(value, dict):
        for item in value.values():
            _check_numbers(item, keyword, at)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, keyword, at)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise refuse(keyword, at, f"has a number of more than 64 bits: {clip(str(value))}")


def string(schema: Schema, at: str) -> Schema:
    """A string with a pattern, which a format and a length become: the library's own let control characters pass."""
    own = {name: value for name, value in schema.items() if name != "format" or value not in FREE_FORMATS}
    least, most = own.get("minLength", 0), own.get("maxLength")
    if least == 0 and most is None:
        own.pop("minLength", None)
    given = [name for name in ("pattern", "format", "minLength", "maxLength") if name in own]
    if given in (["minLength", "maxLength"], ["minLength"], ["maxLength"]):
        if most is not None and least > most:
            raise Contradiction(f"minLength at {pointer(at, 'minLength')} is more than maxLength: {least} > {most}")
        for name in given:
            if own[name] > MAX_POSITIONS:
                raise refuse(name, at, f"can be enforced up to {MAX_POSITIONS}, got {own[name]}")
        return {"type": "string", "pattern": pattern_of_length(least, most)}
    if len(given) > 1:
        raise refuse(given[-1], at, f"cannot be enforced beside {given[0]}: say it in one pattern")
    if given == ["format"]:
        if own["format"] not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise refuse("format", at, f"is {clip(own['format'])!r}, which cannot be enforced; what can: {known}")
        return {"type": "string", "pattern": pattern_of(FORMATS[own["format"]], at)}
    if given:
        made = pattern_of(own["pattern"], f"the keyword 'pattern' at {pointer(at, 'pattern')}")
        return {"type": "string", "pattern": made}
    return {"type": "string"}


def number(schema: Schema, at: str) -> Schema:
    """A number within bounds, or a multiple of an integer."""
    multiple = schema.get("multipleOf")
    if multiple is None:
        return _bounded(schema, at)
    if not is_integer(multiple) or not 1 <= multiple <= _MAX_MULTIPLE:
        text = f"can be enforced for an integer from 1 to {_MAX_MULTIPLE}, got {clip(repr(multiple))}"
        raise refuse("multipleOf", at, text)
    bounded = _bounded({**schema, "type": "integer"}, at)
    low, high = bounded.get("minimum"), bounded.get("maximum")
    if (low is None) != (high is None) or (low is not None and high - low > _MAX_MULTIPLES_RANGE):
        raise refuse("multipleOf", at, f"needs minimum and maximum, at most {_MAX_MULTIPLES_RANGE} apart, or neither")
    if low is not None and high // multiple * multiple < low:
        raise Contradiction(f"no multiple at {pointer(at, 'multipleOf')} lies between minimum and maximum")
    return {**bounded, "multipleOf": int(multiple)}


def _bounded(schema: Schema, at: str) -> Schema:
    """The tighter ones of the bounds; of integers as `minimum` and `maximum`, whole ones."""
    made: Schema = {"type": schema["type"]}
    whole = schema["type"] == "integer"
    low, low_open = _bound(schema.get("minimum"), schema.get("exclusiveMinimum"), max)
    high, high_open = _bound(schema.get("maximum"), schema.get("exclusiveMaximum"), min)
    if whole:
        low = None if low is None else int(-(-low // 1)) + (low_open and is_integer(low))
        high = None if high is None else int(high // 1) - (high_open and is_integer(high))
        low_open = high_open = False
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        name = next(name for name in ("maximum", "exclusiveMaximum") if name in schema)
        raise Contradiction(f"{name} at {pointer(at, name)} leaves nothing above the minimum")
    if low is not None and high is not None and not whole and not _has_few_decimals(low, low_open, high, high_open):
        name = next(name for name in ("maximum", "exclusiveMaximum") if name in schema)
        text = f"leaves no number of {_DECIMALS} decimals above the minimum: more cannot be enforced"
        raise refuse(name, at, text)
    if low is not None:
        made["exclusiveMinimum" if low_open else "minimum"] = low
    if high is not None:
        made["exclusiveMaximum" if high_open else "maximum"] = high
    return made


def _has_few_decimals(low: float, low_open: bool, high: float, high_open: bool) -> bool:
    """Whether a number of `_DECIMALS` decimals lies between the bounds; the library's grammars hold no others."""
    first, last = (Fraction(Decimal(repr(bound))) * 10**_DECIMALS for bound in (low, high))
    least: int = floor(first) + 1 if low_open else ceil(first)
    most: int = ceil(last) - 1 if high_open else floor(last)
    return least <= most


def _bound(closed: Any, opened: Any, tighter: Callable[..., Any]) -> tuple[Any, bool]:
    if closed is None or opened is None:
        return (opened, True) if closed is None and opened is not None else (closed, False)
    return (opened, True) if tighter(closed, opened) == opened else (closed, False)


def array(schema: Schema, at: str, make: Make) -> Schema:
    """Items of one kind, behind some of kinds of their own."""
    if schema.get("uniqueItems"):
        raise refuse("uniqueItems", at, "cannot be enforced: a grammar does not compare items")
    prefix, items = list(schema.get("prefixItems", ())), schema.get("items", schema.get("unevaluatedItems"))
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if items is None:
        items = not prefix  # a list of kinds is meant to be the whole
    for i, item in enumerate(prefix):
        if item is False:  # so many, and no more
            prefix, items = prefix[:i], False
            break
    if most is not None:
        prefix = prefix[:most]
        items = items if len(prefix) < most else False
    if (most is not None and least > most) or (items is False and least > len(prefix)):
        raise Contradiction(f"minItems at {pointer(at, 'minItems')} is more than there may be items")
    made: Schema = {"type": "array"}
    if prefix:
        made["prefixItems"] = [make(item, pointer(at, "prefixItems", i)) for i, item in enumerate(prefix)]
    made["items"] = items if isinstance(items, bool) else make(items, pointer(at, "items"))
    if least:
        made["minItems"] = least
    if most is not None and items is not False:
        made["maxItems"] = most
    return made


def objects(schema: Schema, at: str, make: Make) -> Schema:
    """Properties by name, in their order; others only where the schema says so, or names none at all."""
    properties, required = dict(schema.get("properties", {})), list(dict.fromkeys(schema.get("required", ())))
    patterns = dict(schema.get("patternProperties", {}))
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    names = schema.get("propertyNames", True)
    if patterns or names not in (True, {}):
        return _by_pattern(schema, properties, required, patterns, others, at, make)
    if others is None:
        others = not properties
    for name in required:
        if name not in properties:
            if others is False:
                raise Contradiction(
                    f"required at {pointer(at, 'required')} names {clip(name)!r}, which may not be there"
                )
            properties[name] = others
    for name in [name for name, part in properties.items() if part is False]:
        if name in required or others is not False:
            raise refuse(name, pointer(at, "properties"), "is false: a grammar cannot forbid it beside other names")
        del properties[name]
    made: Schema = {"type": "object", "additionalProperties": False}
    if properties:
        made["properties"] = {
            name: make(part, pointer(at, "properties", name) if name in schema.get("properties", {}) else at)
            for name, part in properties.items()
        }
    if required:
        made["required"] = required
    if others is not False:
        rest = {} if others is True else make(others, pointer(at, "additionalProperties"))
        if sum(map(len, properties)) > _MAX_NAMES_CHARS:
            raise refuse(
                "additionalProperties", at, f"cannot be enforced beside names of {_MAX_NAMES_CHARS} characters"
            )
        if properties:
            made["patternProperties"] = {other_names(properties): rest}
        else:
            made["additionalProperties"] = rest if rest else True
    return _counted(made, schema, required, others is False, at)


def _by_pattern(
    schema: Schema,
    properties: Mapping[str, Any],
    required: list[str],
    patterns: Mapping[str, Any],
    others: Any,
    at: str,
    make: Make,
) -> Schema:
    """Properties whose names fulfil a pattern, and no others."""
    keyword = "patternProperties" if patterns else "propertyNames"
    if properties or required:
        beside = "properties" if properties else "required"
        raise refuse(keyword, at, f"cannot be enforced beside {beside}: a name may be in both")
    made: Schema = {"type": "object", "additionalProperties": False}
    if patterns:
        if len(patterns) > 1 or "propertyNames" in schema:
            raise refuse(keyword, at, "can be enforced with one pattern, and alone: a name may fulfil several")
        [(pattern, part)] = patterns.items()
        if part is False:
            raise refuse(keyword, at, "forbids names, which a grammar cannot")
        names_pattern = pattern_of(pattern, f"the pattern at {pointer(at, keyword, pattern)}")
        made[keyword] = {names_pattern: make(part, pointer(at, keyword, pattern))}
    else:
        names = make(schema[keyword], pointer(at, keyword))
        of_names = schema[keyword].get("type", "string") if isinstance(schema[keyword], dict) else "string"
        pattern_of_names = _name_pattern(names, pointer(at, keyword))
        if of_names != "string" or pattern_of_names is None:
            raise refuse(keyword, at, "can be enforced where it has a pattern, an enum, a format or a length")
        rest = {} if others in (None, True) else make(others, pointer(at, "additionalProperties"))
        made["patternProperties"] = {pattern_of_names: rest}
    return _counted(made, schema, required, False, at)


def _name_pattern(names: Schema, at: str) -> str | None:
    """The pattern of strings of this schema, in the normal form."""
    if "pattern" in names:
        return str(names["pattern"])
    if "enum" in names and all(isinstance(name, str) for name in names["enum"]):
        return pattern_of("|".join("".join(map(literal, name)) for name in names["enum"]), f"the enum at {at}")
    return None


def _counted(made: Schema, schema: Schema, required: list[str], closed: bool, at: str) -> Schema:
    """With bounds of the number of properties. Other names than those listed may come twice, and count once then."""
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if most is not None and (most < len(required) or most < least):
        raise Contradiction(f"maxProperties at {pointer(at, 'maxProperties')} is less than there have to be")
    if least > len(required):
        listed = len(made.get("properties", {}))
        if closed and least > listed:
            raise Contradiction(f"minProperties at {pointer(at, 'minProperties')} is more than there may be: {listed}")
        if not closed and least > 1:
            raise refuse("minProperties", at, "can be enforced up to 1, or for the properties listed alone")
        made["minProperties"] = least
    if most is not None:
        made["maxProperties"] = most
    return made
