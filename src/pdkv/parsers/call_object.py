"""A call that is written as one JSON object, such as {"name": "f", "arguments": {"x": 1}}, parsed as it is written."""

import json
from collections.abc import Collection
from enum import Enum, auto

import msgspec

from pdkv.parsers.json_value import SPACES, JsonValue, is_object

MAX_NAME = 256
"""The most characters of a tool's name."""

_MAX_ESCAPED_NAME = 6 * MAX_NAME + 2

_ARGUMENTS = ("arguments", "parameters")
_LABELS = ("id", "type", "function")
"""Keys that some models add; "function" only as a label: {"type": "function"}."""


class _At(Enum):
    BEGIN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    DONE = auto()


class CallObject:
    """Feed text with `push` until it is `done` or `failed`; `take` returns new arguments.

    The call `has_begun` once the name is known and the arguments are an object: from then on they are shown as they
    arrive. If it fails before that, the text is not a call. If it fails later, it is a call with arguments that are not
    valid JSON, unless they are already complete.
    """

    def __init__(self, names: Collection[str] | None = None, *, needs_arguments: bool = False) -> None:
        """`names`: an object with another name is not a call. `needs_arguments`: an object without arguments is not a
        call.
        """
        self.name: str | None = None
        self.has_begun = False
        self.done = False
        self.failed = False
        self.has_all_arguments = False
        self._names = names
        self._needs_arguments = needs_arguments
        self._at = _At.BEGIN
        self._value = JsonValue()
        self._held: list[str] = []  # of the current key or value, unless it is streamed
        self._num_held = 0
        self._key = ""
        self._seen: set[str] = set()
        self._new: list[str] = []  # arguments not taken yet
        self._streams = False  # within arguments that are an object

    def push(self, text: str, at: int = 0) -> int:
        """Read on from text[at]; returns the position after the object, of the error, or the text's length."""
        end = len(text)
        while at < end and not (self.done or self.failed):
            if self._is_in_value:
                at = self._read_value(text, at)
            elif text[at] in SPACES:
                at += 1
            elif not self._take(text[at]):
                self.failed = True
            elif not self._is_in_value:  # else the character is the value's first one
                at += 1
        return at

    @property
    def _is_in_value(self) -> bool:
        return self._at is _At.IN_KEY or self._at is _At.IN_VALUE

    def take(self) -> str:
        """The new arguments; empty until the call has begun."""
        if not self.has_begun or not self._new:
            return ""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _take(self, char: str) -> bool:
        """Read one character between values; the first one of a key or a value is left to its reader."""
        match self._at:
            case _At.BEGIN:
                self._at = _At.FIRST_KEY
                return char == "{"
            case _At.FIRST_KEY | _At.COMMA if char == "}":
                return self._close()
            case _At.COMMA:
                self._at = _At.KEY
                return char == ","
            case _At.FIRST_KEY | _At.KEY:
                self._begin(_At.IN_KEY)
                return char == '"'
            case _At.COLON:
                self._at = _At.VALUE
                return char == ":"
        self._begin(_At.IN_VALUE)
        if self._key in _ARGUMENTS:
            self._streams = char == "{"
            self._note_begun()
            return char in '{"n'
        return char == '"'

    def _begin(self, at: _At) -> None:
        self._at, self._value, self._num_held = at, JsonValue(), 0
        self._held.clear()

    def _read_value(self, text: str, at: int) -> int:
        behind = self._value.push(text, at)
        piece = text[at:behind]
        if self._streams:
            self._new.append(piece)
        else:
            self._held.append(piece)
            self._num_held += len(piece)
        if self._value.failed or (self._num_held > _MAX_ESCAPED_NAME and self._key not in _ARGUMENTS):
            self.failed = True
        elif self._value.done:
            try:
                self.failed = not (self._end_key() if self._at is _At.IN_KEY else self._end_value())
            except msgspec.DecodeError:  # half of a surrogate pair: valid JSON by the grammar, but not a text
                self.failed = True
        return behind

    def _end_key(self) -> bool:
        self._key = msgspec.json.decode("".join(self._held))
        kind = "arguments" if self._key in _ARGUMENTS else self._key
        self._at = _At.COLON
        new = kind not in self._seen
        self._seen.add(kind)
        return new and (kind in ("name", "arguments") or kind in _LABELS)

    def _end_value(self) -> bool:
        self._at = _At.COMMA
        if self._streams:
            self._streams = False
            self.has_all_arguments = True
        elif self._key in _ARGUMENTS:
            given = _decode_arguments("".join(self._held))
            if given is None:
                return False
            self._new.append(given)
            self.has_all_arguments = True
        elif self._key == "name":
            self.name = msgspec.json.decode("".join(self._held), type=str)
            if not 0 < len(self.name) <= MAX_NAME or (self._names is not None and self.name not in self._names):
                return False
        self._note_begun()
        return True

    def _note_begun(self) -> None:
        self.has_begun = self.has_begun or (self.name is not None and (self._streams or self.has_all_arguments))

    def _close(self) -> bool:
        self.done = True
        self._at = _At.DONE
        if not self.has_all_arguments and not self._needs_arguments and self.name is not None:
            self._new.append("{}")
            self.has_all_arguments = True
        self._note_begun()
        return self.has_begun


def quoted_name(name: str) -> str:
    """A tool's name in the form that models write in such an object."""
    return json.dumps(name, ensure_ascii=False)


def _decode_arguments(text: str) -> str | None:
    """Arguments that are null, or an object written as JSON within a string; None: they are neither."""
    value = msgspec.json.decode(text)
    if value is None:
        return "{}"
    return value if is_object(value) else None
