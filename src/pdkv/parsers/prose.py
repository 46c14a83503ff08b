"""The text around calls: spaces and newlines that only separate a call are dropped."""

import re


class Prose:
    """Spaces at the text's end are held until it is known whether a call or more text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._has_text = False
        self._behind_call = False

    def text(self, text: str) -> str:
        """The part of it that may be shown, including earlier held text."""
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
    """(position of `marker`, True), or (position where one may begin, False): the text's length if there is none."""
    found = text.find(marker, at)
    if found >= 0:
        return found, True
    end = len(text)
    for size in range(min(len(marker) - 1, end - at), 0, -1):
        if text.startswith(marker[:size], end - size):
            return end - size, False
    return end, False


def begun(text: str) -> str:
    """A pattern of all that `text` may have come to in pieces, nothing and itself included."""
    return "".join(f"(?:{re.escape(char)}" for char in text) + ")?" * len(text)
