"""Stop strings: find the first one in a growing text, and hold back what may still become one.

Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977): one automaton per stop string, so that the result
does not depend on how the text was cut into deltas and costs O(1) per character.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """What a piece of text came to."""

    text: str  # may be shown now
    stop: str | None  # the stop string that ended the text; everything from its start on is cut


def _failure_table(pattern: str) -> list[int]:
    """Entry i: length of the longest proper prefix of pattern[:i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class StopStrings:
    """The match that ends first wins; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how many of its characters the text ends with
        self._held = ""

    def push(self, text: str, *, accept: bool = True) -> StopResult:
        """The next piece of text. `accept` False: a stop string that ends in this piece is no stop."""
        if not self._stops:
            return StopResult(text, None)
        buffer = self._held + text
        for i in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[i])
            if stop is not None and accept:
                self._held = ""
                return StopResult(buffer[: i + 1 - len(stop)], stop)
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return StopResult(buffer[:shown], None)

    def flush(self) -> str:
        """What was held back, where the text ends without a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Feed one character to every automaton; the longest stop string that is now complete, if any."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            table, length = self._tables[index], self._matched[index]
            while length and stop[length] != character:
                length = table[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                length = table[length - 1]
            self._matched[index] = length
        return complete
