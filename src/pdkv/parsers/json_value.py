"""One JSON value in a text that arrives in pieces: finds where it ends, or stops being JSON (RFC 8259)."""

import re
from enum import Enum, auto

SPACES = " \t\n\r"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_NUMBER = 1024
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY_OR_END = auto()  # after {
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """Feed text with `push` until it is `done` or `failed`, which happens at the same character however the text is cut
    into pieces.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # the closing brackets to come
        self._expects = _Expects.VALUE
        self._in_string = False
        self._escape = 0  # within a string: 1 after a backslash, 5 to 2 while hexadecimal digits are expected
        self._word = ""  # the rest of a literal
        self._number = ""

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string of an incomplete value."""
        return self._in_string and not self.failed

    def push(self, text: str, at: int = 0) -> int:
        """Read on from text[at]; returns the position after the value, of the error, or the text's length."""
        end = len(text)
        while at < end and not self.done:
            if self._in_string and not self._escape:
                found = _PLAIN.match(text, at)
                assert found is not None
                at = found.end()
                if at == end:
                    return end
            if self._number and text[at] not in _NUMBER_CHARS:
                if not _NUMBER.fullmatch(self._number):
                    self.failed = True
                    return at
                self._number = ""
                self._ended()
                continue
            if not self._take(text[at]):
                self.failed = True
                return at
            at += 1
        return at

    def _take(self, char: str) -> bool:
        """Read one character; returns whether it is allowed here."""
        if self._in_string:
            return self._take_in_string(char)
        if self._word:
            good, self._word = char == self._word[0], self._word[1:]
            if good and not self._word:
                self._ended()
            return good
        if self._number:
            self._number += char
            return len(self._number) <= _MAX_NUMBER
        if char in SPACES:
            return True
        return self._take_between(char)

    def _take_in_string(self, char: str) -> bool:
        if self._escape == 1:
            self._escape = 5 if char == "u" else 0
            return char in '"\\/bfnrtu'
        if self._escape:
            self._escape = 0 if self._escape == 2 else self._escape - 1
            return char in _HEX
        if char == '"':
            self._in_string = False
            if self._expects is not _Expects.COLON:
                self._ended()
            return True
        self._escape = 1
        return char == "\\"

    def _take_between(self, char: str) -> bool:
        """Read a character outside of strings, numbers and literals."""
        expects = self._expects
        if expects is _Expects.COLON:
            self._expects = _Expects.VALUE
            return char == ":"
        if char in "}]" and expects is not _Expects.VALUE and expects is not _Expects.KEY:
            if self._open.pop() != char:
                return False
            self._ended()
            return True
        if expects is _Expects.COMMA_OR_END:
            self._expects = _Expects.KEY if self._open[-1] == "}" else _Expects.VALUE
            return char == ","
        if expects is _Expects.KEY or expects is _Expects.KEY_OR_END:
            self._expects = _Expects.COLON
            self._in_string = True
            return char == '"'
        return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._in_string = True
            self._expects = _Expects.COMMA_OR_END
        elif char == "{":
            self._open.append("}")
            self._expects = _Expects.KEY_OR_END
        elif char == "[":
            self._open.append("]")
            self._expects = _Expects.VALUE_OR_END
        elif char in _LITERALS:
            self._word = _LITERALS[char][1:]
        elif char in "-0123456789":
            self._number = char
        else:
            return False
        return True

    def _ended(self) -> None:
        """Note that a value within the value, or the whole value, has ended."""
        self.done = not self._open
        self._expects = _Expects.COMMA_OR_END


def is_object(text: str) -> bool:
    """Whether a text is one JSON object, and nothing else."""
    value = JsonValue()
    return text.startswith("{") and value.push(text) == len(text) and value.done


def skip_spaces(text: str, at: int) -> int:
    """The position of the next character that is not JSON whitespace, or the text's length."""
    while at < len(text) and text[at] in SPACES:
        at += 1
    return at
