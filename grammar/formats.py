"""Shapes of answers composed of parts, as llguidance reads them: expressions and rules in its dialect of Lark.

The library reads a text or a pattern in one piece, for as long as it matches ("lexemes" are greedy); only a free text
up to a marker ends where the marker first ends. So a free text must be the last part of a sequence, or end with a
marker.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from pdkv.errors import InvalidRequest
from pdkv.sampling.shape import Grammar, GrammarKind

_HEADER = '%llguidance {"no_forcing": true}\n'
"""Where one text alone may follow, each way to cut it into tokens is allowed, as everywhere else."""

_FREE = "/(?s:.*)/"

_JSON_TOKEN = re.compile(r'"[^"]*"|\s|[^"\s{}\[\]:,]+|.')


class Format(NamedTuple):
    """A part of an answer."""

    expression: str
    rules: Mapping[str, str] = MappingProxyType({})  # that it refers to: name, perhaps with an attribute, and body


class Tag(NamedTuple):
    """A part that begins with a text."""

    begin: str
    rest: Format


Part = str | Format | Tag

ANY_TEXT = Format(_FREE)


def text(value: str) -> Format:
    """A part that is exactly this text."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{value[:32]!r} is not a valid text: {error.reason}") from None
    return Format(json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f"))


def pattern(written: str) -> Format:
    """A regular expression in the form of `patterns.py`."""
    return Format(f"/{written}/" if written else '""')


def json_of(schema: str) -> Format:
    """JSON of a schema, given as the text of its normal form."""
    return Format(f"%json {schema}")


def _joined(parts: Sequence[Part], between: str) -> Format:
    formats = [_format(part) for part in parts]
    rules = {name: body for format in formats for name, body in format.rules.items()}
    return Format(f"({between.join(format.expression for format in formats)})", rules)


def _format(part: Part) -> Format:
    if isinstance(part, Tag):  # token by token, as far as it is JSON: what else may stand there may be JSON, too
        return sequence(*_JSON_TOKEN.findall(part.begin), part.rest)
    return text(part) if isinstance(part, str) else part


def sequence(*parts: Part) -> Format:
    """The parts one after the other."""
    return _joined([part for part in parts if part != ""] or [""], " ")


def either(parts: Sequence[Part]) -> Format:
    """One of the parts."""
    return _joined(parts, " | ")


def repeated(part: Part, least: int, most: int | None) -> Format:
    """A part repeated within limits."""
    format = _joined([part], "")
    return Format(f"{format.expression}{{{least},{'' if most is None else most}}}", format.rules)


def optional(part: Part) -> Format:
    """A part that may be absent."""
    return repeated(part, 0, 1)


def named(body: str, *, terminal: bool = False, lazy: bool = False) -> Format:
    """A rule for `body`; a terminal is read in one piece, and a lazy terminal ends as soon as it can."""
    digest = blake2b(f"{terminal}{lazy}{body}".encode(), digest_size=8).hexdigest()
    name = f"T_{digest}".upper() if terminal else f"r_{digest}"
    return Format(name, {f"{name}[lazy]" if lazy else name: body})


def one_of(texts: Sequence[str]) -> Format:
    """One of these texts, which may begin alike."""
    return named(" | ".join(text(value).expression for value in texts), terminal=True)


def marker(value: str) -> Format:
    """A text that is never read as the beginning of a free text."""
    return named(text(value).expression, lazy=True)


def until(end: str) -> Format:
    """Any text up to and including the first `end`."""
    return named(f"{_FREE} {text(end).expression}", lazy=True)


def tag(begin: str, content: Part, end: str) -> Tag:
    """Content between two texts. Any text in it continues up to the first `end`."""
    return Tag(begin, until(end) if content == ANY_TEXT and end else sequence(content, end))


def separated(tags: Sequence[Part], separator: str, *, several: bool) -> Format:
    """One of the tags or more, and nothing else; `several`: more than one is allowed."""
    one = either(tags)
    return sequence(one, repeated(sequence(separator, one), 0, None)) if several else one


def triggered(
    tags: Sequence[Tag], triggers: Sequence[str] | None = None, *, several: bool, required: bool = False
) -> Format:
    """Any text, in which a trigger must be followed by the rest of one of the tags that begin with it.

    Args:
        triggers: None: the beginnings of the tags.
        several: text may continue after a tag, and more tags may follow.
        required: at least one tag must come.
    """
    ways = []
    for trigger in dict.fromkeys(tag.begin for tag in tags) if triggers is None else triggers:
        goes_on = [sequence(tag.begin.removeprefix(trigger), tag.rest) for tag in tags if tag.begin.startswith(trigger)]
        ways.append(sequence(until(trigger), either(goes_on)))
    if not several:
        return either([*ways, *([] if required else [ANY_TEXT])])
    return sequence(repeated(either(ways), int(required), None), ANY_TEXT)


def grammar(kind: GrammarKind, format: Format) -> Grammar:
    """The grammar for engines.

    Raises:
        InvalidRequest: it is too large.
    """
    rules = "".join(f"{name}: {body}\n" for name, body in format.rules.items())
    made = Grammar(kind, f"{_HEADER}start: {format.expression}\n{rules}")
    made.validate()
    return made


def structural_tag(format: Format) -> Grammar:
    """As `grammar`, with markers such as [TOOL_CALLS] as single tokens if the vocabulary has them."""
    return grammar("tags", format)
