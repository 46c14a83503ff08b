"""Calls as Llama 3.1, 3.2 and 3.3 write them: {"name": …, "parameters": …}, with or without <|python_tag|> before."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.grammar.formats import tag
from pdkv.parsers.call_object import quoted_name
from pdkv.parsers.json_value import skip_spaces
from pdkv.parsers.line_parser import LineParser
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken

_TAG = "<|python_tag|>"


class Llama3JsonParser(LineParser):
    """No marker identifies an object as a call: it must begin a line, and name a tool of the request."""

    markers = (_TAG,)
    tag, bracket = _TAG, "{"

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._between: list[str] = []  # read after a call: spaces, and a semicolon

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return "<|start_header_id|>" in chat_template and "ipython" in chat_template and '"parameters"' in chat_template

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        """In text a call is recognized by its whole beginning, including the tool's name: anything shorter is
        ambiguous.
        """
        tags = [tag(f'{{"name": {quoted_name(tool.name)}, "parameters": ', tool.arguments, "}") for tool in tools]
        return CallSyntax(tags, "; ")

    def _begin(self, text: str, place: int, before: str) -> int:
        tag = _TAG if text[place] != "{" else ""
        self._begin_object(before + tag, needs_known_name=True)
        self._state = self._read_object
        return place + len(tag)

    def _read_object(self, text: str, at: int) -> int:
        at = self._push_object(text, at)
        if self._reads_object:
            return at
        if not self._object.has_begun:
            self._show("".join(self._raw))
            self._state = self._read_text
        else:
            self._between.clear()
            self._state = self._read_separator if self._close_object() else self._read_spoilt
        return at

    def _read_separator(self, text: str, at: int) -> int:
        """Read after a call: another one, with or without a semicolon between them."""
        place = skip_spaces(text, at)
        if text.startswith(";", place) and ";" not in self._between:
            self._between += text[at:place], ";"
            return place + 1
        self._between.append(text[at:place])
        if text.startswith(("{", _TAG), place):
            return self._begin(text, place, "".join(self._between))
        if not _TAG.startswith(text[place:]):
            self._line_is_blank = True
            self._text("".join(self._between))
            self._state = self._read_text
        return place
