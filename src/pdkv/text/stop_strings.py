"""Stop strings: find the first one in a growing text, and hold back what may still become one.

Aho, Corasick, "Efficient string matching" (1975): one automaton for all stop strings of a request, so that the result
does not depend on how the text was cut into deltas, and costs O(1) per character, whatever the number of stop strings.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0
_CHARACTER_BITS = 21  # of a code point


class StopResult(NamedTuple):
    """The result of pushing a piece of text."""

    text: str  # may be shown now
    stop: str | None  # the stop string that ended the text; everything from its start on is cut


class StopAutomaton:
    """The states of all prefixes of the stop strings; immutable, and shared by the choices of a request.

    A state is the longest prefix that the text so far ends with. One dictionary holds the trie's edges, by state and
    character: 4 KiB of stop strings take half a megabyte and some ten milliseconds.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not contain empty strings."""
        self._edges: dict[int, int] = {}
        self._depths = [0]
        self._complete: list[str | None] = [None]
        """By state: the longest stop string that the text then ends with."""
        for stop in stops:
            self._insert(stop)
        self._fallbacks = [_ROOT] * len(self._depths)
        """By state: the state of the longest proper suffix that is also a prefix."""
        self._inner = {edge >> _CHARACTER_BITS for edge in self._edges}
        """States that may still become a stop string."""
        self._link()

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            edge = state << _CHARACTER_BITS | ord(character)
            following = self._edges.get(edge)
            if following is None:
                following = self._edges[edge] = len(self._depths)
                self._depths.append(self._depths[state] + 1)
                self._complete.append(None)
            state = following
        self._complete[state] = stop

    def _link(self) -> None:
        """Set fallbacks breadth first: a state's fallback is shorter than itself."""
        children: dict[int, list[tuple[int, int]]] = {}
        for edge, state in self._edges.items():
            children.setdefault(edge >> _CHARACTER_BITS, []).append((edge & ((1 << _CHARACTER_BITS) - 1), state))
        queue = deque(state for _, state in children.get(_ROOT, ()))
        while queue:
            parent = queue.popleft()
            for character, state in children.get(parent, ()):
                fallback = self._fallbacks[state] = self.step(self._fallbacks[parent], character)
                if self._complete[state] is None:
                    self._complete[state] = self._complete[fallback]
                queue.append(state)

    def step(self, state: int, character: int) -> int:
        """The state after one more character (its code point)."""
        edges = self._edges
        while (following := edges.get(state << _CHARACTER_BITS | character)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallbacks[state]
        return following

    def complete(self, state: int) -> str | None:
        """The longest stop string that the text ends with in this state."""
        return self._complete[state]

    def held(self, state: int) -> int:
        """Number of characters at the text's end that may still become a stop string longer than the complete one."""
        while state not in self._inner:
            state = self._fallbacks[state]
            if state == _ROOT:
                return 0
        return self._depths[state]


class StopStrings:
    """The match that ends first wins; of those that end together, the longest."""

    def __init__(self, stops: StopAutomaton | Sequence[str], *, shown: bool = False) -> None:
        """`stops`: non-empty strings, or their automaton. `shown`: the stop string stays at the end of the text."""
        self._shown = shown
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._state = _ROOT
        self._held = ""

    def push(self, text: str, *, accept: bool = True) -> StopResult:
        """Push the next piece of text. `accept` False: stop strings that end in this piece are ignored."""
        automaton, state = self._automaton, self._state
        buffer = self._held + text
        for i in range(len(self._held), len(buffer)):
            state = automaton.step(state, ord(buffer[i]))
            stop = automaton.complete(state) if accept else None
            if stop is not None:
                self._state, self._held = _ROOT, ""
                return StopResult(buffer[: i + 1 - (0 if self._shown else len(stop))], stop)
        self._state = state
        shown = len(buffer) - automaton.held(state)
        self._held = buffer[shown:]
        return StopResult(buffer[:shown], None)

    def flush(self) -> str:
        """The text held back, if the text ends without a stop string."""
        held, self._held = self._held, ""
        self._state = _ROOT
        return held
