"""Splits one answer's text: reasoning first, then calls and text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdkv.parsers.parts import CallEnd, Content, Part, Reasoning, joined
from pdkv.parsers.reasoning import ReasoningParser, Split, Thinking
from pdkv.parsers.tool_parser import ToolParser


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How the answers of one request are parsed."""

    reasoning_parser: type[ReasoningParser] | None = None
    prompt: Thinking = "unsaid"
    shows_reasoning: bool = True  # otherwise reasoning is dropped
    tool_parser: type[ToolParser] | None = None
    tools: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)  # schemas of arguments, by name
    several_calls: bool = True  # otherwise the answer ends after its first call
    named_tool: bool = False  # the client chose the tool: OpenAI's finish reason is "stop" then
    stops_in_thoughts: bool = False  # otherwise stop strings only end the answer after reasoning

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parsers need to see, whether special tokens or not."""
        found: set[str] = set()
        if self.reasoning_parser is not None:
            found |= {self.reasoning_parser.opens, self.reasoning_parser.closes}
        if self.tool_parser is not None:
            found.update(self.tool_parser.markers)
        return frozenset(found)


class Stops(Protocol):
    """Stop strings in a text that arrives in pieces."""

    def push(self, text: str, *, accept: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ends it. `accept` False: stop strings that end here
        are ignored.
        """

    def flush(self) -> str:
        """The text held back, at the end of the text."""


class AnswerStream:
    """The parts of one answer as its text arrives. `ended`: the answer must not continue, as after a `stop`."""

    def __init__(self, format: AnswerFormat, stops: Stops | None = None) -> None:
        """`stops`: stop strings of the text after reasoning."""
        self.stop: str | None = None
        """The stop string that ended the text: nothing after it is read."""
        self._stops = stops
        self._reasoning = format.reasoning_parser(format.prompt) if format.reasoning_parser is not None else None
        self._tools = format.tool_parser(format.tools) if format.tool_parser is not None else None
        self._shows_reasoning = format.shows_reasoning
        self._several_calls = format.several_calls
        self.ended = False

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str, *, accept_stop: bool = True) -> list[Part]:
        """The new parts. `accept_stop` False: a stop string that ends in this piece is ignored."""
        if self.ended or self.stop is not None or not text:
            return []
        split = Split("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._cut(self._parts_of(split, accept_stop=accept_stop))

    def finish(self) -> list[Part]:
        """End the text and return what was held back. Nothing may be pushed afterwards."""
        if self.ended:
            return []
        parts = [] if self._reasoning is None else self._parts_of(self._reasoning.finish())
        if self._stops is not None and self.stop is None:
            parts += self._parts_of_content(self._stops.flush())
        if self._tools is not None:
            parts += self._tools.finish()
        return self._cut(parts)

    def _parts_of(self, split: Split, *, accept_stop: bool = True) -> list[Part]:
        parts: list[Part] = []
        if split.reasoning and self._shows_reasoning:
            parts.append(Reasoning(split.reasoning))
        content = split.content
        if content and self._stops is not None and self.stop is None:
            content, self.stop = self._stops.push(content, accept=accept_stop)
        return parts + self._parts_of_content(content)

    def _parts_of_content(self, content: str) -> list[Part]:
        if not content:
            return []
        return [Content(content)] if self._tools is None else self._tools.push(content)

    def _cut(self, parts: list[Part]) -> list[Part]:
        if not self._several_calls:
            for index, part in enumerate(parts):
                if isinstance(part, CallEnd):
                    self.ended = True
                    parts = parts[: index + 1]
                    break
        return joined(parts)
