"""Calls as Llama 4, ToolACE and others write them: a list of Python calls, [f(a=1), g(b="x")]."""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.grammar.formats import Part, either, json_of, optional, pattern, repeated, sequence, tag
from pdkv.grammar.normal_forms import normalize
from pdkv.parsers.call_object import MAX_NAME
from pdkv.parsers.json_value import SPACES, JsonValue, skip_spaces
from pdkv.parsers.line_parser import LineParser
from pdkv.parsers.members import read_members
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, check_names

_START, _END = "<|python_start|>", "<|python_end|>"
_S = rf"[{SPACES}]{{0,{MAX_NAME}}}"
_NAME = rf"[A-Za-z_][\w.]{{0,{MAX_NAME - 1}}}"
_CALL, _CALL_BEGUN = rf"{_S}({_NAME}){_S}\(", rf"{_S}(?:{_NAME}{_S})?"
_FIRST = re.compile(rf"{_S}\[{_CALL}"), re.compile(rf"{_S}(?:\[{_CALL_BEGUN})?")
_FURTHER = re.compile(_CALL), re.compile(_CALL_BEGUN)
_KEY, _KEY_BEGUN = re.compile(rf"({_NAME}){_S}="), re.compile(rf"(?:{_NAME}{_S})?")
_STRING = re.compile(r"[^\\'\"]+|\\.?|['\"]", re.DOTALL)
_PLAIN = re.compile(r"[^\[\](){}'\",]+")


class PythonicParser(LineParser):
    """A list that begins a line, or follows <|python_start|>, and calls a tool of the request, is a list of calls.

    An argument is shown when it is complete.
    """

    markers = (_START, _END)
    tag, bracket = _START, "["

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._key = ""
        self._value: list[str] = []
        self._depth = 0  # of brackets within the value
        self._quote = ""  # quote of the current string
        self._num_values = 0

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return _START in chat_template or "(params_name1=params_value1" in chat_template

    def _begin(self, text: str, place: int, before: str) -> int:
        self._raw = [_START] if text[place] == "<" else []
        self._state = self._read_head
        return place + len("".join(self._raw))

    def _read_head(self, text: str, at: int) -> int:
        """Read the list's bracket, and its first call."""
        return self._read_name(text, at, *_FIRST)

    def _read_further(self, text: str, at: int) -> int:
        return self._read_name(text, at, *_FURTHER)

    def _read_name(self, text: str, at: int, whole: re.Pattern[str], so_far: re.Pattern[str]) -> int:
        found = whole.match(text, at)
        if found is None and so_far.fullmatch(text, at):
            return at
        if found is None or found[1] not in self.names:
            return self._is_no_call(text, at)
        self._begin_call(found[1])
        self._num_values = 0
        self._state = self._read_between
        return found.end()

    def _is_no_call(self, text: str, at: int) -> int:
        """Treat the part read so far as text, including a bracket that would otherwise be found again."""
        shown = 1 if text[at : at + 1] == "[" and not self._raw else 0
        self._show("".join(self._raw) + text[at : at + shown])
        self._line_is_blank = False
        self._state = self._read_text
        return at + shown

    def _read_between(self, text: str, at: int) -> int:
        """Read an argument's name, or the call's end."""
        at = skip_spaces(text, at)
        if text.startswith(")", at):
            self._arguments("}" if self._num_values else "{}")
            self._end_call()
            self._state = self._read_next
            return at + 1
        if (key := _KEY.match(text, at)) is not None:
            self._key, self._value, self._depth, self._quote = key[1], [], 0, ""
            self._state = self._read_value
            return key.end()
        if not _KEY_BEGUN.fullmatch(text, at):
            self._arguments(", " if self._num_values else "(")
            self._state = self._read_spoilt
        return at

    def _read_value(self, text: str, at: int) -> int:
        """Read up to the comma or bracket after the value."""
        end = len(text)
        while at < end:
            if self._quote:
                found = _STRING.match(text, at)
                assert found is not None
                if found[0] == "\\":  # the escaped character is to come
                    return at
                self._quote = "" if found[0] == self._quote else self._quote
                self._value.append(found[0])
                at = found.end()
                continue
            if (plain := _PLAIN.match(text, at)) is not None:
                self._value.append(plain[0])
                at = plain.end()
                continue
            char = text[at]
            if self._depth == 0 and char in ",)]}":
                return self._end_value(text, at)
            self._quote = char if char in "'\"" else ""
            self._depth += (char in "[({") - (char in "])}")
            self._value.append(char)
            at += 1
        return at

    def _end_value(self, text: str, at: int) -> int:
        written = "".join(self._value)
        value = _json_of(written.strip(SPACES)) if text[at] in ",)" else None
        separator = ", " if self._num_values else "{"
        if value is None:
            self._arguments(f"{separator}{self._key}={written}")
            self._state = self._read_spoilt
            return at
        self._arguments(f"{separator}{json.dumps(self._key)}: {value}")
        self._num_values += 1
        self._state = self._read_between
        return at + (text[at] == ",")

    def _read_next(self, text: str, at: int) -> int:
        """Read after a call: another one, or the list's end."""
        place = skip_spaces(text, at)
        if text.startswith(",", place):
            self._raw = [","]
            self._state = self._read_further
            return place + 1
        if place < len(text):
            closes = text[place] == "]"
            self._state = self._read_end if closes else self._read_text
            return place + closes
        return place

    def _read_end(self, text: str, at: int) -> int:
        """Read after the list: its tag, which may be missing."""
        place = skip_spaces(text, at)
        if text.startswith(_END, place):
            self._state = self._read_text
            return place + len(_END)
        if not _END.startswith(text[place:]):
            self._show(text[at:place])
            self._state = self._read_text
            return place
        return at if place - at < MAX_NAME else place

    def _flush(self, rest: str) -> None:
        if self._state == self._read_head:
            self._text("".join(self._raw) + rest)
        elif self._state == self._read_spoilt:
            self._arguments(rest)
        elif self._state == self._read_text or (self._state == self._read_end and not _END.startswith(rest.strip())):
            self._text(rest)

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        """Values are JSON, which can be read as well; in text, a call is recognized by the name of the first tool."""
        calls = {tool.name: sequence(*_written(tool), ")") for tool in tools}
        check_names(calls, _NAME)
        further = repeated(
            sequence(", ", either([sequence(f"{name}(", call) for name, call in calls.items()])), 0, None
        )
        tags = [tag(f"[{name}(", sequence(call, further) if several else call, "]") for name, call in calls.items()]
        return CallSyntax(tags, tag_holds_all=True)


def _written(tool: CallFormat) -> list[Part]:
    """A tool's arguments, separated by commas, required ones first."""
    members = read_members(tool.schema) if tool.is_enforced else None
    if members is None:
        one = sequence(pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}"), "=", json_of(normalize({}, time=tool.time)))
        return [optional(sequence(one, repeated(sequence(", ", one), 0, None)))]
    check_names([member.name for member in members], _NAME, what="argument")
    given = [(sequence(f"{m.name}=", json_of(normalize(dict(m.schema), time=tool.time))), m.required) for m in members]
    required, others = [value for value, is_required in given if is_required], [v for v, r in given if not r]
    tail: list[Part] = [optional(sequence(", ", value)) for value in others]
    if required:
        return [required[0], *(sequence(", ", value) for value in required[1:]), *tail]
    ways: list[Part] = [sequence(value, *tail[number + 1 :]) for number, value in enumerate(others)]
    return [optional(either(ways))] if ways else []


def _json_of(written: str) -> str | None:
    """A Python or JSON literal as JSON; None: it is neither."""
    value = JsonValue()
    if written and value.push(written + " ") >= len(written) and value.done:
        return written
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape, such as "\d", stays as it is
            made = json.dumps(ast.literal_eval(written), ensure_ascii=False, allow_nan=False)
        made.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return made
