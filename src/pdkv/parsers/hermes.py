"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name": …, "arguments": …}</tool_call>."""

from collections.abc import Sequence

from pdkv.grammar.formats import either, sequence, tag
from pdkv.parsers.call_object import quoted_name
from pdkv.parsers.prose import find_marker
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Each call has its own tags; its keys may be in any order."""

    markers, closing_tag = (_OPEN, _CLOSE), _CLOSE

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        others = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM have other things in the same tags
        return _OPEN in chat_template and "arguments" in chat_template and not any(x in chat_template for x in others)

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        calls = [
            sequence(f'\n{{"name": {quoted_name(tool.name)}, "arguments": ', tool.arguments, "}\n") for tool in tools
        ]
        return CallSyntax([tag(_OPEN, either(calls), _CLOSE)], "\n")

    def _read_text(self, text: str, at: int) -> int:
        place, found = find_marker(text, _OPEN, at)
        self._text(text[at:place])
        if not found:
            return place
        self._begin_object(_OPEN)
        self._state = self._read_object
        return place + len(_OPEN)

    def _read_object(self, text: str, at: int) -> int:
        return self._read_call(text, at, self._read_close, self._read_spoilt)

    def _read_spoilt(self, text: str, at: int) -> int:
        """Read arguments that are not valid JSON any more: up to the closing tag they are passed on unchanged."""
        place, found = find_marker(text, _CLOSE, at)
        self._arguments(text[at:place])
        if not found:
            return place
        self._end_call()
        self._state = self._read_text
        return place + len(_CLOSE)
