"""A model's reasoning, between tags before its answer."""

from typing import ClassVar, Literal, NamedTuple

from pdkv.grammar.formats import Format, marker, optional, pattern, sequence, until
from pdkv.parsers.prose import Prose, find_marker

Thinking = Literal["open", "closed", "unsaid"]
"""What a prompt's end implies: the answer begins within reasoning, after it, or the model chooses."""


_BEHIND_THOUGHTS = pattern(r"\n{0,2}")


class Split(NamedTuple):
    """The kinds of text in a piece."""

    reasoning: str
    content: str


class ReasoningParser:
    """Separates the reasoning of one answer from the rest; each answer has its own parser.

    Spaces and newlines around reasoning are dropped. The result depends on the text alone, not on its pieces. A
    subclass defines the tags, and whether an answer begins with reasoning by default.
    """

    opens: ClassVar[str] = "<think>"
    closes: ClassVar[str] = "</think>"
    begins_thinking: ClassVar[bool] = False

    def __init__(self, prompt: Thinking = "unsaid") -> None:
        self.is_thinking = False
        """Whether the text so far ends within reasoning."""
        self._thinks_first = prompt == "open" or (prompt == "unsaid" and self.begins_thinking)
        self._state = self._read_content if prompt == "closed" else self._read_begin
        self._rest = ""  # not read yet
        self._spaces: list[str] = []  # at the beginning
        self._thoughts = Prose()
        self._thoughts.call()

    @classmethod
    def thinking_of(cls, text: str) -> Thinking:
        """What the end of a prompt says about the answer's beginning: "open": within reasoning; "closed": after it."""
        end = text.rstrip()
        return "open" if end.endswith(cls.opens) else "closed" if end.endswith(cls.closes) else "unsaid"

    @classmethod
    def thinking_within(cls, text: str) -> Thinking:
        """What the text of an answer so far says about its continuation, as in `thinking_of`."""
        opened, closed = text.rfind(cls.opens), text.rfind(cls.closes)
        return "unsaid" if opened == closed else "open" if opened > closed else "closed"

    @classmethod
    def with_thoughts(cls, prompt: Thinking, shape: Format) -> Format:
        """A grammar of optional reasoning, as the model writes it, followed by `shape`."""
        if prompt == "closed":
            return shape
        thinks_first = prompt == "open" or cls.begins_thinking
        thoughts = sequence(until(cls.closes), _BEHIND_THOUGHTS)
        return sequence(thoughts if thinks_first else optional(sequence(marker(cls.opens), thoughts)), shape)

    def push(self, text: str) -> Split:
        """The new, complete parts."""
        text = self._rest + text
        self._rest = ""
        split = Split("", "")
        while text:
            state = self._state
            part, text = state(text)
            split = Split(split.reasoning + part.reasoning, split.content + part.content)
            if self._state == state:
                self._rest = text
                break
        return split

    def finish(self) -> Split:
        """End the answer and return what was held back."""
        rest, self._rest = self._rest, ""
        if self._state == self._read_begin:
            rest = "".join(self._spaces) + rest
            return Split("" if rest.isspace() else rest, "") if self._thinks_first else Split("", rest)
        if self.is_thinking:
            return Split(self._thoughts.text(rest), "")
        return Split("", rest)

    def _read_begin(self, text: str) -> tuple[Split, str]:
        """Read the beginning: spaces, and possibly the opening tag."""
        begun = text.lstrip()
        self._spaces.append(text[: len(text) - len(begun)])
        if begun.startswith(self.opens):
            self._think()
            return Split("", ""), begun[len(self.opens) :]
        if self.opens.startswith(begun):
            return Split("", ""), begun
        if self._thinks_first:
            self._think()
        else:
            self._state = self._read_content
            begun = "".join(self._spaces) + begun
        return Split("", ""), begun

    def _think(self) -> None:
        self.is_thinking = True
        self._state = self._read_thoughts

    def _read_thoughts(self, text: str) -> tuple[Split, str]:
        place, found = find_marker(text, self.closes)
        thoughts = self._thoughts.text(text[:place])
        if found:
            self.is_thinking = False
            self._state = self._read_behind
            place += len(self.closes)
        return Split(thoughts, ""), text[place:]

    def _read_behind(self, text: str) -> tuple[Split, str]:
        """Read spaces after the closing tag."""
        content = text.lstrip()
        if content:
            self._state = self._read_content
        return Split("", ""), content

    def _read_content(self, text: str) -> tuple[Split, str]:
        return Split("", text), ""


class Qwen3Parser(ReasoningParser):
    """Qwen 3: it thinks where the prompt or the model opens the tag."""


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and V3.1: it thinks unless the prompt closes the tag; R1 often leaves the opening tag out."""

    begins_thinking = True


class MistralThinkParser(ReasoningParser):
    """Magistral."""

    opens = "[THINK]"
    closes = "[/THINK]"
