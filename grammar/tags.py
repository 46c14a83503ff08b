"""Structural tags of clients, in xgrammar's notation: free text with tagged parts that have a shape."""

from collections.abc import Callable, Mapping
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.ebnf import ebnf
from pdkv.grammar.formats import (
    ANY_TEXT,
    Format,
    Part,
    Tag,
    either,
    json_of,
    pattern,
    repeated,
    separated,
    sequence,
    tag,
    text,
    triggered,
    until,
)
from pdkv.grammar.json_text import read_json
from pdkv.grammar.keywords import pointer
from pdkv.grammar.normal_forms import normalize
from pdkv.grammar.patterns import pattern_of
from pdkv.grammar.schema_time import SchemaTime

MAX_DEPTH = 32
"""The deepest nesting of formats."""

Fields = Mapping[str, Any]


def read_tag(given: Mapping[str, Any] | str, time: SchemaTime | None = None) -> Format:
    """The format of a structural tag.

    Args:
        given: `{"type": "structural_tag", "format": …}`, or vLLM's older `{"structures": […], "triggers": […]}`.
        time: the time limit of its schemas together; None: the limit for one request.

    Raises:
        InvalidRequest: it is not valid, or cannot be enforced; names the place as a JSON pointer.
        RequestAborted: the request was cancelled.
    """
    if isinstance(given, str):
        given = read_json(given, "the structural tag")
    if not isinstance(given, Mapping):
        raise InvalidRequest("a structural tag must be an object with a format")
    if "structures" in given:
        given = {"type": "structural_tag", "format": _from_structures(given)}
    if not isinstance(given.get("format"), Mapping):
        raise InvalidRequest("a structural tag must have a format, an object with a type")
    part = _Reader(time or SchemaTime()).read(given["format"], "/format")
    return sequence(part)


def _from_structures(given: Fields) -> dict[str, Any]:
    structures, triggers = given["structures"], given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest("structures and triggers of a structural tag must be lists")
    tags = []
    for i, part in enumerate(structures):
        if not isinstance(part, Mapping) or not {"begin", "schema", "end"} <= part.keys():
            raise InvalidRequest(f"the structure at /structures/{i} must have begin, schema and end")
        schema = part["schema"]
        if isinstance(schema, str):
            schema = read_json(schema, f"the schema at /structures/{i}/schema")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": part["begin"], "content": content, "end": part["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Reader:
    """Reads one structural tag."""

    def __init__(self, time: SchemaTime) -> None:
        self._time = time
        self._depth = 0

    def read(self, given: object, at: str) -> Part:
        """Read one format."""
        self._time.check()
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            raise InvalidRequest(f"the format at {at} must be an object with a type")
        reader = _READERS.get(given["type"])
        if reader is None:
            known = ", ".join(sorted(_READERS))
            raise InvalidRequest(f"the format at {at} has the type {clip(given['type'])!r}; known: {known}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(f"the structural tag is more than {MAX_DEPTH} deep at {at}")
        made = reader(self, given, at)
        self._depth -= 1
        return made

    def _json(self, given: Fields, at: str) -> Part:
        schema = _field(given, "json_schema", (Mapping, bool), at, "a schema")
        if given.get("style", "json") != "json":
            raise InvalidRequest(
                f"the style at {at} cannot be enforced: got {clip(repr(given['style']))}, expected 'json'"
            )
        try:
            return json_of(normalize(schema, time=self._time))
        except InvalidRequest as error:
            raise InvalidRequest(f"in the schema at {pointer(at, 'json_schema')}: {error}") from None

    def _regex(self, given: Fields, at: str) -> Part:
        return pattern(pattern_of(_text(given, "pattern", at), f"the pattern at {pointer(at, 'pattern')}"))

    def _sequence(self, given: Fields, at: str) -> Part:
        parts = self._parts(given, "elements", at)
        for i in range(len(parts) - 1, 0, -1):
            if parts[i - 1] == ANY_TEXT:
                if not isinstance(end := parts[i], str) or not end:
                    raise InvalidRequest(
                        f"the format at {pointer(at, 'elements', i - 1)} must be last, or before a text"
                    )
                parts[i - 1 : i + 1] = [until(end)]
        return sequence(*parts)

    def _tag(self, given: Fields, at: str) -> Tag:
        content = self.read(given.get("content"), pointer(at, "content"))
        return tag(_text(given, "begin", at), content, _text(given, "end", at))

    def _tags(self, given: Fields, at: str) -> list[Tag]:
        tags = self._parts(given, "tags", at)
        for i, part in enumerate(tags):
            if not isinstance(part, Tag):
                raise InvalidRequest(f"the format at {pointer(at, 'tags', i)} must be a tag")
        return tags

    def _triggered(self, given: Fields, at: str) -> Part:
        tags, triggers = self._tags(given, at), _field(given, "triggers", list, at, "a list of texts")
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise InvalidRequest(f"the format at {at} must have triggers, texts that are not empty")
        begins = [one.begin for one in tags]
        if not all(any(begin.startswith(trigger) for begin in begins) for trigger in triggers):
            raise InvalidRequest(f"the format at {at} has a trigger without a tag that begins with it")
        if not all(begin.startswith(tuple(triggers)) for begin in begins):
            raise InvalidRequest(f"the format at {at} has a tag that begins with none of the triggers")
        required, several = _flag(given, "at_least_one", at), not _flag(given, "stop_after_first", at)
        return triggered(tags, triggers, several=several, required=required)

    def _separated(self, given: Fields, at: str) -> Part:
        tags, separator = self._tags(given, at), _text(given, "separator", at)
        made = separated(tags, separator, several=not _flag(given, "stop_after_first", at))
        return made if _flag(given, "at_least_one", at) else repeated(made, 0, 1)

    def _repeat(self, given: Fields, at: str) -> Part:
        least, most = given.get("min", 0), given.get("max", -1)
        if not (type(least) is type(most) is int and 0 <= least <= (most if most >= 0 else least) <= 10_000):
            raise InvalidRequest(
                f"the format at {at} must have min and max, integers of at most 10000; max -1 means no limit"
            )
        return self._repeated(given, at, least, most if most >= 0 else None)

    def _repeated(self, given: Fields, at: str, least: int, most: int | None) -> Part:
        return repeated(self.read(given.get("content"), pointer(at, "content")), least, most)

    def _parts(self, given: Fields, field: str, at: str) -> list[Any]:
        parts = _field(given, field, list, at, "a list, not empty")
        if not parts:
            raise InvalidRequest(f"the format at {at} must have {field}, a list, not empty")
        return [self.read(part, pointer(at, field, i)) for i, part in enumerate(parts)]


def _field(given: Fields, field: str, kind: Any, at: str, what: str) -> Any:
    if not isinstance(given.get(field), kind):
        raise InvalidRequest(f"the format at {at} must have {field}, {what}")
    return given[field]


def _text(given: Fields, field: str, at: str) -> str:
    value: str = _field(given, field, str, at, "a text")
    text(value)
    return value


def _flag(given: Fields, field: str, at: str) -> bool:
    value: bool = _field({field: False, **given}, field, bool, at, "true or false")
    return value


_READERS: dict[str, Callable[[_Reader, Fields, str], Part]] = {
    "const_string": lambda reader, given, at: _text(given, "value", at),
    "any_text": lambda reader, given, at: ANY_TEXT,
    "grammar": lambda reader, given, at: ebnf(_text(given, "grammar", at), reader._time),
    "json_schema": _Reader._json,
    "regex": _Reader._regex,
    "sequence": _Reader._sequence,
    "or": lambda reader, given, at: either(reader._parts(given, "elements", at)),
    "tag": _Reader._tag,
    "triggered_tags": _Reader._triggered,
    "tags_with_separator": _Reader._separated,
    "optional": lambda reader, given, at: reader._repeated(given, at, 0, 1),
    "star": lambda reader, given, at: reader._repeated(given, at, 0, None),
    "plus": lambda reader, given, at: reader._repeated(given, at, 1, None),
    "repeat": _Reader._repeat,
}
