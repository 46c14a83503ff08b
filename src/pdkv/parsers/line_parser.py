"""Base of parsers for calls without a marker, which begin at the start of a line or after a tag."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pdkv.parsers.prose import find_marker
from pdkv.parsers.tool_parser import ToolParser


class LineParser(ToolParser):
    """Finds where calls may begin."""

    tag: ClassVar[str]
    bracket: ClassVar[str]

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(tools)
        self._line_is_blank = True  # the text's last line so far
        self._line_begins = re.compile(rf"^[ \t]*\{self.bracket}", re.MULTILINE)

    def _read_text(self, text: str, at: int) -> int:
        place, found = find_marker(text, self.tag, at)
        line = self._line_begins.search(text, at, place)
        if line is not None and line.start() == 0 and not self._line_is_blank:
            line = self._line_begins.search(text, line.end(), place)
        if line is not None:
            place = line.end() - 1
        self._show(text[at:place])
        if line is None and not found:
            return place
        return self._begin(text, place, "")

    @abstractmethod
    def _begin(self, text: str, place: int, before: str) -> int:
        """Begin with a bracket at `place`, or the tag before one; `before` is text between it and a call."""

    def _show(self, text: str) -> None:
        """Text for the user."""
        line = text[text.rfind("\n") + 1 :]
        self._line_is_blank = ("\n" in text or self._line_is_blank) and not line.strip(" \t")
        self._text(text)
