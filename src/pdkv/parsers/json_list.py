"""Calls as a grammar makes any model write them: a JSON list of {"name": …, "parameters": …}, as in vLLM."""

from collections.abc import Sequence

from pdkv.grammar.formats import separated, sequence, tag
from pdkv.parsers.call_object import quoted_name
from pdkv.parsers.json_value import skip_spaces
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser


class JsonListParser(ToolParser):
    """For answers that must be calls, without a parser for the model's own format: the whole answer is the list."""

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return False

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax:
        calls = [tag(f'{{"name": {quoted_name(tool.name)}, "parameters": ', tool.arguments, "}") for tool in tools]
        return CallSyntax([tag("[", sequence(separated(calls, ", ", several=several)), "]")], tag_holds_all=True)

    def _read_text(self, text: str, at: int) -> int:
        """Read before a call: the list's bracket, or a comma; anything else is text."""
        place = skip_spaces(text, at)
        if text[place : place + 1] in ("[", ",", "]"):
            place += 1
        elif text[place : place + 1] == "{":
            self._begin_object("")
            self._state = self._read_object
        elif place < len(text):
            self._text(text[at:])
            return len(text)
        return place

    def _read_object(self, text: str, at: int) -> int:
        return self._read_call(text, at, self._read_text, self._read_spoilt)
