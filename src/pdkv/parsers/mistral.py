"""Calls as Mistral's models write them, in two forms after [TOOL_CALLS].

Up to tokenizer v7 a list: [TOOL_CALLS] [{"name": …, "arguments": …}, …]. From v11 on call by call:
[TOOL_CALLS]name[ARGS]{…}, with or without [CALL_ID]id before [ARGS], or with neither.
"""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.grammar.formats import either, separated, sequence, tag
from pdkv.parsers.call_object import quoted_name
from pdkv.parsers.json_value import JsonValue, skip_spaces
from pdkv.parsers.prose import find_marker
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser, check_names

_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]+")
_MAX_HEAD = 512
_LETTERS = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """A name or a list follows the marker."""

    markers = (_OPEN, _CALL_ID, _ARGS)

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._value = JsonValue()  # the arguments of a call that is not an object

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return _OPEN in chat_template and "[AVAILABLE_TOOLS]" in chat_template

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        """The syntax depends on the tokenizer: from v11 on there is a token for [ARGS]."""
        if knows(_ARGS):
            check_names([tool.name for tool in tools], _NAME.pattern)
            marked = [sequence(tool.name + _ARGS, tool.arguments) for tool in tools]
            return CallSyntax([tag(_OPEN, either(marked), "")])
        calls = [tag(f'{{"name": {quoted_name(tool.name)}, "arguments": ', tool.arguments, "}") for tool in tools]
        block = sequence(" [", separated(calls, ", ", several=several))
        return CallSyntax([tag(_OPEN, block, "]")], tag_holds_all=True)

    @classmethod
    def new_call_id(cls) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))  # the templates refuse others

    def _read_text(self, text: str, at: int) -> int:
        place, found = find_marker(text, _OPEN, at)
        self._text(text[at:place])
        if not found:
            return place
        self._state = self._read_head
        return place + len(_OPEN)

    def _read_head(self, text: str, at: int) -> int:
        """Read between the marker and the first object; if it has neither form, all of it is text."""
        place = skip_spaces(text, at)
        name, is_list = "", False
        if text.startswith("[", place):
            is_list = True
            place = skip_spaces(text, place + 1)
        elif place < len(text) and text[place] != "{":
            name, place = _read_name(text, place)
        fits = 0 <= place - at < _MAX_HEAD
        if place == len(text) and fits:
            return at
        if not fits or text[place : place + 1] != "{":
            self._text(_OPEN)
            self._state = self._read_text
        elif name:
            self._begin_call(name)
            self._value = JsonValue()
            self._state = self._read_arguments
            return place
        else:
            self._begin_object(_OPEN + text[at:place])
            self._state = self._read_element if is_list else self._read_object
            return place
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        behind = self._value.push(text, at)
        self._arguments(text[at:behind])
        if self._value.failed:
            self._state = self._read_spoilt
        elif self._value.done:
            self._end_call()
            self._state = self._read_text
        return behind

    def _read_object(self, text: str, at: int) -> int:
        """Read a single call."""
        return self._read_call(text, at, self._read_text, self._read_spoilt)

    def _read_element(self, text: str, at: int) -> int:
        """A call in a list."""
        return self._read_call(text, at, self._read_comma, self._read_spoilt)

    def _read_comma(self, text: str, at: int) -> int:
        """Read after a call in a list."""
        place = skip_spaces(text, at)
        self._text(text[at:place])
        if place == len(text):
            return place
        if text[place] == ",":
            self._begin_object(",")
            self._state = self._read_element
            return place + 1
        self._state = self._read_text
        return place + 1 if text[place] == "]" else place

    def _read_spoilt(self, text: str, at: int) -> int:
        """Read arguments that are not valid JSON any more: up to the next call they are passed on unchanged."""
        place, found = find_marker(text, _OPEN, at)
        self._arguments(text[at:place])
        if found:
            self._end_call()
            self._state = self._read_text
        return place

    def _flush(self, rest: str) -> None:
        if self._state == self._read_head:
            self._text(_OPEN + rest)
        elif not self._reads_object or "".join(self._raw).strip() != ",":  # one that nothing follows sets nothing off
            super()._flush(rest)


def _read_name(text: str, at: int) -> tuple[str, int]:
    """(name, position of the arguments). The position is the text's length if more must come, -1 if it is not a
    name.
    """
    found = _NAME.match(text, at)
    if found is None:
        return "", -1
    place = skip_spaces(text, found.end())
    for marker, value in ((_CALL_ID, _NAME), (_ARGS, None)):
        if text.startswith(marker, place):
            place = skip_spaces(text, place + len(marker))
            if value is not None and (call_id := value.match(text, place)) is not None:
                place = skip_spaces(text, call_id.end())
        elif place < len(text) and marker.startswith(text[place:]):
            return found[0], len(text)
    if place < len(text) and text[place] != "{":
        return "", -1
    return found[0], place
