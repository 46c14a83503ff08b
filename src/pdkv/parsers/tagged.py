"""Calls with one pair of tags per argument, as Qwen3-Coder and GLM-4.5 write them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import (
    Format,
    Part,
    either,
    json_of,
    one_of,
    optional,
    pattern,
    repeated,
    sequence,
    tag,
    until,
)
from pdkv.grammar.normal_forms import normalize
from pdkv.parsers.call_object import MAX_NAME
from pdkv.parsers.json_value import SPACES, JsonValue, is_object, skip_spaces
from pdkv.parsers.members import is_free_text, json_of_written, kinds_of, member_schema, read_members, values_of
from pdkv.parsers.prose import begun, find_marker
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser, check_names

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_S = rf"[{SPACES}]{{0,{MAX_NAME}}}"
_ANY_KEY = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _between(opens: str, closes: str, value_opens: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A key with its tags, and what opens its value; and what that may have come to in pieces."""
    key = rf"{opens}((?:(?!{closes}).){{0,{MAX_NAME}}})"
    gap = _S if value_opens else ""
    so_far = rf"{begun(opens)}|{key}(?:{begun(closes)}|{closes}{gap}{begun(value_opens)})"
    return re.compile(f"{key}{closes}{gap}{value_opens}", re.DOTALL), re.compile(so_far, re.DOTALL)


class TaggedParser(ToolParser):
    """A value's type is given by the tool's schema, or else by its form; it is shown when it is complete."""

    closing_tag = _CLOSE
    opens: ClassVar[tuple[str, ...]] = (_OPEN,)  # a call
    head: ClassVar[tuple[re.Pattern[str], re.Pattern[str]]]  # a call's name behind that, and what may come to it
    name: ClassVar[tuple[str, str]]  # a pattern of names that can be written, and how one is
    key_opens: ClassVar[str]
    key_closes: ClassVar[str]
    value_opens: ClassVar[str] = ""  # after the key, and spaces
    value_closes: ClassVar[str]
    key: ClassVar[tuple[re.Pattern[str], re.Pattern[str]]]  # as `_between` has it
    call_closes: ClassVar[str]
    gap: ClassVar[str] = ""  # characters that separate a value from its tags

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._schema: Mapping[str, Any] | None = None
        self._key = ""
        self._kinds: frozenset[str] | None = None
        self._value: list[str] = []
        self._json = JsonValue()  # of a value that is not text
        self._num_values = 0

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return all(text in chat_template for text in (cls.opens[-1], cls.key_opens, cls.value_opens))

    def _read_text(self, text: str, at: int) -> int:
        place, found = min(find_marker(text, marker, at) for marker in self.opens)
        self._text(text[at:place])
        if not found:
            return place
        self._raw = [_OPEN] if text.startswith(_OPEN, place) else []
        self._state = self._read_head
        return place + len("".join(self._raw))

    def _read_head(self, text: str, at: int) -> int:
        """Read a call's name, after its opening."""
        whole, so_far = self.head
        if (found := whole.match(text, at)) is not None:
            self._begin_call(found[1])
            self._schema, self._num_values = self.tools.get(found[1]), 0
            self._state = self._read_between
            return found.end()
        if so_far.fullmatch(text, at):
            return at
        behind = at if self._raw else at + 1  # otherwise it would be found again
        self._text("".join(self._raw) + text[at:behind])
        self._state = self._read_text
        return behind

    def _read_between(self, text: str, at: int) -> int:
        """Read an argument, or the call's end."""
        at = skip_spaces(text, at)
        whole, so_far = self.key
        if text.startswith(self.call_closes, at):
            self._arguments("}" if self._num_values else "{}")
            return self._end_tagged(at)
        if (found := whole.match(text, at)) is not None:
            self._begin_value(found[1].strip())
            return found.end()
        if not so_far.fullmatch(text, at) and not self.call_closes.startswith(text[at:]):
            self._arguments(", " if self._num_values else "")
            self._value = []
            self._state = self._read_spoilt
        return at

    def _end_tagged(self, at: int) -> int:
        self._end_call()
        self._state = self._read_text if self.call_closes == _CLOSE else self._read_close
        return at + len(self.call_closes)

    def _begin_value(self, key: str) -> None:
        self._key, self._kinds = key, kinds_of(member_schema(self._schema, key))
        self._value, self._json = [], JsonValue()
        self._state = self._read_value

    def _read_value(self, text: str, at: int) -> int:
        """Read up to the closing tag; one within a string of a non-text value does not count."""
        place, found = find_marker(text, self.value_closes, at)
        self._value.append(text[at:place])
        if self._kinds is not None and "string" not in self._kinds and not (self._json.done or self._json.failed):
            self._json.push(text[at:place])
        if not found:
            return place
        if self._kinds is not None and "string" not in self._kinds and self._json.in_string:
            self._value.append(text[place])
            self._json.push(text[place])
            return place + 1
        written = "".join(self._value)
        if self.gap:
            written = written.removeprefix(self.gap).removesuffix(self.gap)
        key = json.dumps(self._key, ensure_ascii=False)
        self._arguments(f"{', ' if self._num_values else '{'}{key}: {json_of_written(written, self._kinds)}")
        self._num_values += 1
        self._state = self._read_between
        return place + len(self.value_closes)

    def _read_spoilt(self, text: str, at: int) -> int:
        """Read invalid arguments: up to the call's end they are passed on unchanged."""
        place, found = find_marker(text, self.call_closes, at)
        self._arguments(text[at:place])
        self._value.append(text[at:place])
        return self._end_tagged(place) if found else place

    def _flush(self, rest: str) -> None:
        if self._state == self._read_head:
            self._text("".join(self._raw) + rest)
        elif self._state not in (self._read_between, self._read_value):
            super()._flush(rest)
            is_bare = self._state == self._read_spoilt and not self._num_values
            if is_bare and is_object("".join(self._value).strip(SPACES) + rest):
                self._end_call()

    # --- the grammar ---

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        check_names([tool.name for tool in tools], cls.name[0])
        calls = [sequence(cls.name[1].format(tool.name), *cls._written(tool), cls.call_closes) for tool in tools]
        closes = "" if cls.call_closes == _CLOSE else f"\n{_CLOSE}"
        return CallSyntax([tag(_OPEN, either(calls), closes)], "\n")

    @classmethod
    def _written(cls, tool: CallFormat) -> list[Part]:
        """A tool's arguments, in the order of its schema."""
        members = read_members(tool.schema) if tool.is_enforced else None
        opens = cls.key_closes + ("\n" if cls.value_opens else "") + cls.value_opens + cls.gap
        behind = f"{cls.value_closes}\n"
        if members is None:
            return [repeated(sequence(cls.key_opens, _ANY_KEY, opens, until(cls.value_closes), "\n"), 0, None)]
        parts: list[Part] = []
        for member in members:
            if cls.key_closes in member.name or len(member.name) > MAX_NAME or member.name != member.name.strip():
                raise InvalidRequest(f"the argument {clip(member.name)!r} cannot be written by this model")
            value = cls._value_format(tool, member.name, member.schema)
            part = sequence(
                cls.key_opens + member.name + opens, value, behind if not is_free_text(member.schema) else "\n"
            )
            parts.append(part if member.required else optional(part))
        return parts

    @classmethod
    def _value_format(cls, tool: CallFormat, name: str, schema: Mapping[str, Any]) -> Format:
        if is_free_text(schema):
            return until(cls.value_closes)
        values, kinds = values_of(schema), kinds_of(schema)
        if values:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            read = [json.loads(json_of_written(text, kinds)) for text in texts]
            if read == values and not any(cls.value_closes in text for text in texts) and "" not in texts:
                return sequence(one_of(texts), cls.gap)
        elif kinds is not None and "string" not in kinds:
            return sequence(json_of(normalize(schema, time=tool.time)), cls.gap)
        raise InvalidRequest(
            f"the argument {clip(name)!r} of {clip(tool.name)!r} cannot be enforced, since this model writes texts "
            "without quotes: use any text, an enum, or a type other than text"
        )


class Qwen3CoderParser(TaggedParser):
    """<tool_call><function=f><parameter=key>value</parameter></function></tool_call>; the outer tags may be missing."""

    markers = (_OPEN, _CLOSE)
    opens = (_OPEN, _FUNCTION)
    head = (
        re.compile(rf"{_S}{_FUNCTION}([^<>\n]{{1,{MAX_NAME}}})>"),
        re.compile(rf"{_S}(?:{begun(_FUNCTION)}|{_FUNCTION}[^<>\n]{{0,{MAX_NAME}}})"),
    )
    name = (r"[^<>\n]+", f"\n{_FUNCTION}{{}}>\n")
    key_opens, key_closes, value_closes, call_closes, gap = "<parameter=", ">", "</parameter>", "</function>", "\n"
    key = _between(key_opens, key_closes, "")


class Glm45Parser(TaggedParser):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, of GLM-4.5 and later."""

    key_opens, key_closes, call_closes = "<arg_key>", "</arg_key>", _CLOSE
    value_opens, value_closes = "<arg_value>", "</arg_value>"
    markers = (_OPEN, _CLOSE, key_opens, key_closes, value_opens, value_closes)
    head = (
        re.compile(rf"{_S}([\w.:/-]{{1,{MAX_NAME}}}){_S}(?={key_opens}|{_CLOSE})"),
        re.compile(rf"{_S}(?:[\w.:/-]{{1,{MAX_NAME}}}{_S}(?:{begun(key_opens)}|{begun(_CLOSE)}))?"),
    )
    name = (r"[\w.:/-]+", "{}\n")
    key = _between(key_opens, key_closes, value_opens)
