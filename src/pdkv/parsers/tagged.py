"""Calls whose arguments stand between tags of their own, one by one, as Qwen3-Coder and GLM-4.5 write them."""

import json
import re
from abc import abstractmethod
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
from pdkv.parsers.prose import find_marker
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_HEAD = re.compile(rf"{_FUNCTION}([^<>\n]{{1,{MAX_NAME}}})>")
_HEAD_SO_FAR = re.compile(rf"{_FUNCTION}[^<>\n]{{0,{MAX_NAME}}}")
_GLM_HEAD = re.compile(rf"\s*([\w.:/-]{{1,{MAX_NAME}}})\s*(?=<)")
_GLM_HEAD_SO_FAR = re.compile(r"\s*[\w.:/-]*\s*")
_ANY_KEY = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class TaggedParser(ToolParser):
    """A value's type is what the tool's schema says, else what it looks like; it is shown when it is complete."""

    key_opens: ClassVar[str]
    key_closes: ClassVar[str]
    value_opens: ClassVar[str] = ""  # behind the key, and spaces
    value_closes: ClassVar[str]
    call_closes: ClassVar[str]
    gap: ClassVar[str] = ""  # what sets a value off from its tags

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._schema: Mapping[str, Any] | None = None
        self._key = ""
        self._kinds: frozenset[str] | None = None
        self._value: list[str] = []
        self._json = JsonValue()  # of a value that is no text
        self._num_values = 0

    @abstractmethod
    def _read_head(self, text: str, at: int) -> int:
        """Behind what opens a call: its name."""

    def _read_text(self, text: str, at: int) -> int:
        place, found = find_marker(text, _OPEN, at)
        self._text(text[at:place])
        if not found:
            return place
        self._raw = [_OPEN]
        self._state = self._read_head
        return place + len(_OPEN)

    def _begin_named(self, name: str) -> None:
        self._begin_call(name)
        self._schema, self._num_values = self.tools.get(name), 0
        self._state = self._read_between

    def _read_between(self, text: str, at: int) -> int:
        """An argument, or the call's end."""
        at = skip_spaces(text, at)
        if text.startswith(self.key_opens, at):
            self._state = self._read_key
            return at
        if text.startswith(self.call_closes, at):
            self._arguments("}" if self._num_values else "{}")
            self._end_call()
            self._state = self._read_close
            return at + len(self.call_closes)
        rest = text[at:]
        if not (self.key_opens.startswith(rest) or self.call_closes.startswith(rest)):
            self._spoil()
        return at

    def _read_key(self, text: str, at: int) -> int:
        """A key with its tags, and what opens its value."""
        begin = at + len(self.key_opens)
        place, found = find_marker(text, self.key_closes, begin)
        if found and place - begin <= MAX_NAME:
            behind = place + len(self.key_closes)
            opened = skip_spaces(text, behind) if self.value_opens else behind
            if opened - behind > MAX_NAME:
                self._spoil()
                return at
            if text.startswith(self.value_opens, opened):
                self._begin_value(text[begin:place].strip())
                return opened + len(self.value_opens)
            if self.value_opens.startswith(text[opened:]):
                return at
        elif not found and len(text) - begin <= MAX_NAME + len(self.key_closes):
            return at
        self._spoil()
        return at

    def _begin_value(self, key: str) -> None:
        self._key, self._kinds = key, kinds_of(member_schema(self._schema, key))
        self._value, self._json = [], JsonValue()
        self._state = self._read_value

    def _read_value(self, text: str, at: int) -> int:
        """Up to its closing tag; of a value that is no text, one within a string of it is none."""
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

    def _read_close(self, text: str, at: int) -> int:
        """Behind a call."""
        self._state = self._read_text
        return at

    def _spoil(self) -> None:
        self._arguments(", " if self._num_values else "")
        self._value = []
        self._state = self._read_spoilt

    def _read_spoilt(self, text: str, at: int) -> int:
        """What is no argument: up to the call's end it stays as it is written."""
        place, found = find_marker(text, self.call_closes, at)
        self._arguments(text[at:place])
        self._value.append(text[at:place])
        if not found:
            return place
        self._end_call()
        self._state = self._read_close
        return place + len(self.call_closes)

    def _is_no_call(self) -> None:
        self._text("".join(self._raw))
        self._state = self._read_text

    def _flush(self, rest: str) -> None:
        if self._state == self._read_head:
            self._text("".join(self._raw) + rest)
        elif self._state == self._read_spoilt:
            self._arguments(rest)
            if not self._num_values and is_object("".join(self._value).strip(SPACES) + rest):
                self._end_call()
        elif self._state == self._read_text or (self._state == self._read_close and not _CLOSE.startswith(rest)):
            self._text(rest)

    # --- the grammar ---

    @classmethod
    def _call(cls, name: str) -> str:
        """What opens a call of that tool behind the first tag."""
        raise NotImplementedError

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        calls = [sequence(cls._call(tool.name), *cls._written(tool), cls.call_closes) for tool in tools]
        closes = "" if cls.call_closes == _CLOSE else f"\n{_CLOSE}"
        return CallSyntax([tag(_OPEN, either(calls), closes)], "\n")

    @classmethod
    def _written(cls, tool: CallFormat) -> list[Part]:
        """A tool's arguments, in the order of its schema."""
        members = read_members(tool.schema) if tool.is_enforced else None
        opens, behind = f"{cls.key_closes}{cls._between}{cls.value_opens}{cls.gap}", f"{cls.value_closes}\n"
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
            f"the argument {clip(name)!r} of {clip(tool.name)!r} cannot be enforced, since this model writes its texts "
            "without quotes: any text, an enum, and what is no text can be"
        )

    _between: ClassVar[str] = ""


class Qwen3CoderParser(TaggedParser):
    """<tool_call><function=f><parameter=key>value</parameter></function></tool_call>; the outer tags may be missing."""

    markers = (_OPEN, _CLOSE)
    key_opens, key_closes, value_closes, call_closes, gap = "<parameter=", ">", "</parameter>", "</function>", "\n"

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return _FUNCTION in chat_template and cls.key_opens in chat_template

    @classmethod
    def _call(cls, name: str) -> str:
        if not re.fullmatch(r"[^<>\n]+", name):
            raise InvalidRequest(f"the tool's name {clip(name)!r} cannot be written by this model")
        return f"\n{_FUNCTION}{name}>\n"

    def _read_text(self, text: str, at: int) -> int:
        place, found = min(find_marker(text, marker, at) for marker in (_OPEN, _FUNCTION))
        self._text(text[at:place])
        if not found:
            return place
        self._raw = [_OPEN] if text.startswith(_OPEN, place) else []
        self._state = self._read_head
        return place + len("".join(self._raw))

    def _read_head(self, text: str, at: int) -> int:
        place = skip_spaces(text, at)
        name = _HEAD.match(text, place)
        if name is not None and place - at <= MAX_NAME:
            self._begin_named(name[1])
            return name.end()
        rest = text[place:]
        may_be = _FUNCTION.startswith(rest) or _HEAD_SO_FAR.fullmatch(rest)
        if not may_be or place - at > MAX_NAME:
            self._is_no_call()
            if not self._raw:  # else it would be found again
                self._text(text[at : at + 1])
                return at + 1
        return at

    def _read_close(self, text: str, at: int) -> int:
        """The outer tag, which may be missing."""
        return self._read_closing_tag(text, at, _CLOSE)


class Glm45Parser(TaggedParser):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, of GLM-4.5 and later."""

    key_opens, key_closes, call_closes = "<arg_key>", "</arg_key>", _CLOSE
    value_opens, value_closes, _between = "<arg_value>", "</arg_value>", "\n"
    markers = (_OPEN, _CLOSE, key_opens, key_closes, value_opens, value_closes)

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.key_opens in chat_template and cls.value_opens in chat_template

    @classmethod
    def _call(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.:/-]+", name):
            raise InvalidRequest(
                f"the tool's name {clip(name)!r} cannot be written by this model: letters, digits and . : / - _ can"
            )
        return name + "\n"

    def _read_head(self, text: str, at: int) -> int:
        head = _GLM_HEAD.match(text, at)
        if head is not None:
            rest = text[head.end() :]
            may_be = self.key_opens.startswith(rest) or _CLOSE.startswith(rest)
            if rest.startswith((self.key_opens, _CLOSE)) and head.end() - at <= 2 * MAX_NAME - len(_CLOSE):
                self._begin_named(head[1])
                return head.end()
        else:
            may_be = _GLM_HEAD_SO_FAR.fullmatch(text, at) is not None
        if not may_be or len(text) - at > 2 * MAX_NAME:
            self._is_no_call()
        return at
