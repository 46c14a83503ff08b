"""The text around calls: spaces and newlines that only separate a call are dropped."""

import re


class Prose:
    """Text around calls. Spaces at its end are held back until it is known whether a call or more text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._has_text = False
        self._behind_call = False

    def text(self, text: str) -> str:
        """The part of the text that may be shown, including text held back earlier."""
        if not text or text.isspace():
            self._held.append(text)
            return ""
        text = "".join(self._held) + text
        shown = text.rstrip()
        self._held = [text[len(shown) :]]
        if self._behind_call and not self._has_text:
            shown = shown.lstrip()
        self._has_text, self._behind_call = True, False
        return shown

    def call(self) -> None:
        """Note that a call begins here."""
        self._held.clear()
        self._behind_call = True

    def finish(self) -> str:
        """End the answer; returns the rest of the text."""
        held = "".join(self._held)
        self._held.clear()
        return "" if self._behind_call else held


def find_marker(text: str, marker: str, at: int = 0) -> tuple[int, bool]:
    """(position of `marker`, True), or (position where a marker may begin, False), which is the text's length if there
    is none.
    """
    found = text.find(marker, at)
    if found >= 0:
        return found, True
    end = len(text)
    for size in range(min(len(marker) - 1, end - at), 0, -1):
        if text.startswith(marker[:size], end - size):
            return end - size, False
    return end, False


def begun(text: str) -> str:
    """A pattern that matches every prefix of `text`, including the empty one and `text` itself."""
    return "".join(f"(?:{re.escape(char)}" for char in text) + ")?" * len(text)
