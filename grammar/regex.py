"""Regular expressions read into nodes: what JSON Schema's dialect (ECMA 262) and Python's agree on, to the letter.

Where the two differ, a class holds what both allow: `\\d` the ASCII digits, `\\D` nothing that either calls a digit. An
expression is about the whole text: what precedes and follows an unanchored one is nothing.
"""

import re
from typing import NamedTuple, NoReturn

from pdkv.errors import InvalidRequest
from pdkv.limits import clip

MAX_PATTERN_CHARS = 16_384
"""Of one regular expression."""

MAX_DEPTH = 64
"""Of groups in each other."""

MAX_REPEAT = 10_000
"""The largest count of a repetition."""

MAX_POSITIONS = 1024
"""Characters in a pattern, repetitions written out; each takes up to 30 ms to compile with 128k tokens."""

_COUNTS = re.compile(r"\{([0-9]*,?[0-9]*)\}")

LAST = 0x10FFFF
"""The last code point."""

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range; in order, apart from each other."""

ANY: Ranges = ((0, LAST),)


class Chars(NamedTuple):
    """One character."""

    ranges: Ranges


class Sequence(NamedTuple):
    """One after the other."""

    parts: "tuple[Node, ...]"


class Either(NamedTuple):
    """One of them."""

    branches: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """So many of one."""

    part: "Node"
    least: int
    most: int | None


Node = Chars | Sequence | Either | Repeat


def positions(node: Node) -> int:
    """Characters in it, repetitions written out."""
    match node:
        case Chars():
            return 1
        case Sequence(parts):
            return sum(map(positions, parts))
        case Either(branches):
            return sum(map(positions, branches))
        case Repeat(part, least, most):
            return positions(part) * max(least if most is None else most, 1)


def check_size(node: Node, at: str) -> None:
    """Raises InvalidRequest for more than MAX_POSITIONS."""
    if (count := positions(node)) > MAX_POSITIONS:
        raise InvalidRequest(f"{at}: a pattern must come to at most {MAX_POSITIONS} characters, got {count}")


def ranges_of(*pairs: tuple[int, int]) -> Ranges:
    """In order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """All other code points."""
    others, at = [], 0
    for first, last in ranges:
        if at < first:
            others.append((at, first - 1))
        at = last + 1
    return (*others, (at, LAST)) if at <= LAST else tuple(others)


def _codes(text: str) -> Ranges:
    return ranges_of(*((ord(char), ord(char)) for char in text))


_BEYOND_ASCII = (0x80, LAST)
_DIGITS = ((ord("0"), ord("9")),)
_WORD = ranges_of((ord("0"), ord("9")), (ord("A"), ord("Z")), (ord("a"), ord("z")), (ord("_"), ord("_")))
_SPACES = ranges_of((0x09, 0x0D), (0x20, 0x20))
_ANY_SPACES = ranges_of(
    *_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_SHORT: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGITS, ranges_of(*_DIGITS, _BEYOND_ASCII)),
    "w": (_WORD, ranges_of(*_WORD, _BEYOND_ASCII)),
    "s": (_SPACES, _ANY_SPACES),
}
"""What both dialects have in a class, and what one of them has."""
_SHORT |= {name.upper(): (complement(any_), complement(all_)) for name, (all_, any_) in _SHORT.items()}

_DOT = Chars(complement(_codes("\n\r\u2028\u2029")))
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4}


def parse(pattern: str, at: str) -> Node:
    """What a pattern says.

    Args:
        at: its place, for errors.

    Raises:
        InvalidRequest: it is wrong, or cannot be enforced.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"{at}: a pattern must have at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    node = _Parser(pattern, at).run()
    check_size(node, at)
    return node


class _Parser:
    """Recursive descent."""

    def __init__(self, pattern: str, at: str) -> None:
        self._text = pattern
        self._at = at
        self._i = 0
        self._depth = 0

    def run(self) -> Node:
        node = self._either()
        if self._i < len(self._text):
            self._fail("the parentheses of", "do not match")
        return node

    def _fail(self, what: str, why: str = "cannot be enforced", index: int | None = None) -> NoReturn:
        where = "" if index is None else f" at {index} of"
        raise InvalidRequest(f"{self._at}: {what}{where} the pattern {clip(self._text)!r} {why}")

    def _peek(self, length: int = 1) -> str:
        return self._text[self._i : self._i + length]

    def _either(self) -> Node:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._i += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        if self._peek() == "^" and self._depth == 0:
            self._i += 1
        while (char := self._peek()) not in ("", "|", ")"):
            if char == "^":
                self._fail("'^'", "stands not at its beginning", self._i)
            if char == "$":
                if self._depth or self._text[self._i + 1 : self._i + 2] not in ("", "|"):
                    self._fail("'$'", "stands not at its end", self._i)
                self._i += 1
            else:
                parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node:
        char = self._peek()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char in "*+?" or (char == "{" and self._counts() is not None):
            self._fail(f"{char!r}", "has nothing to repeat", self._i)
        if char == "\\":
            return Chars(self._escape(in_class=False)[0])
        self._i += 1
        return _DOT if char == "." else Chars(self._code(ord(char)))

    def _group(self) -> Node:
        opening = self._peek(3)
        if opening[1:2] == "?" and opening != "(?:":
            self._fail(f"'{opening}'", "cannot be enforced (of groups only (…) and (?:…) can)", self._i)
        self._i += 3 if opening == "(?:" else 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail("the groups of", f"are more than {MAX_DEPTH} deep")
        node = self._either()
        if self._peek() != ")":
            self._fail("the parentheses of", "do not match")
        self._i += 1
        self._depth -= 1
        return node

    # --- repetitions ----------------------------------------------------------------------------------------------

    def _repeated(self, part: Node) -> Node:
        start, char = self._i, self._peek()
        if char and char in "*+?":
            self._i += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{" and (counts := self._counts()) is not None:
            self._i = self._text.index("}", self._i) + 1
            least, most = counts
        else:
            return part
        if self._peek() == "?":  # lazy: the same texts
            self._i += 1
        following = self._peek()
        if following and (following in "*+?" or (following == "{" and self._counts() is not None)):
            self._fail("the repetition", "is repeated: put it in parentheses", start)
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        """Those in braces; None where the brace is a character."""
        found = _COUNTS.match(self._text, self._i)
        if found is None:
            return None
        parts = found[1].split(",")
        if not parts[0]:
            if len(parts) == 1:
                return None
            self._fail("the repetition", "must say how many there are at least", self._i)
        if any(len(part) > 9 or int(part or 0) > MAX_REPEAT for part in parts):
            self._fail("the repetition", f"is more than {MAX_REPEAT}", self._i)
        least, most = int(parts[0]), int(parts[-1]) if parts[-1] else None
        if most is not None and least > most:
            self._fail("the repetition", "says more at least than at most", self._i)
        return least, most

    # --- characters -----------------------------------------------------------------------------------------------

    def _code(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF:
            self._fail("half a surrogate pair in")
        return ((code, code),)

    def _escape(self, *, in_class: bool) -> tuple[Ranges, int | None]:
        """What it stands for, and the code point where it is one character."""
        start, name = self._i, self._text[self._i + 1 : self._i + 2]
        self._i += 2
        if name in _SHORT:
            return _SHORT[name][0], None
        if name in _HEX_DIGITS:
            digits = self._peek(_HEX_DIGITS[name])
            if len(digits) < _HEX_DIGITS[name] or not all(char in "0123456789abcdefABCDEF" for char in digits):
                self._fail(f"'\\{name}'", f"must be followed by {_HEX_DIGITS[name]} hexadecimal digits", start)
            self._i += len(digits)
            code = int(digits, 16)
        elif name == "c" and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._peek()) & 31
            self._i += 1
        elif name == "0" and not self._peek().isdecimal():
            code = 0
        elif name in _CONTROLS or (name == "b" and in_class):
            code = ord(_CONTROLS.get(name, "\b"))
        elif name and not (name.isalnum() or name == "_"):
            code = ord(name)
        else:
            why = "cannot be enforced (no word boundaries, back-references, Unicode properties)"
            self._fail(f"'\\{name}'", why if name else "ends in an escape", start)
        return self._code(code), code

    def _class(self) -> Chars:
        start = self._i
        self._i += 1
        negated = self._peek() == "^"
        self._i += negated
        if self._peek() == "]":
            self._fail("the bracket", "is empty, or begins with a bracket that must be escaped", start)
        pairs: list[tuple[int, int]] = []
        while self._peek() != "]":
            if not self._peek():
                self._fail("the bracket", "is not closed", start)
            pairs += self._class_item(negated=negated)
        self._i += 1
        ranges = ranges_of(*pairs)
        return Chars(complement(ranges) if negated else ranges)

    def _class_item(self, *, negated: bool) -> Ranges:
        start = self._i
        ranges, first = self._class_char(negated=negated)
        if self._peek() != "-" or self._peek(2) in ("-", "-]"):
            return ranges
        self._i += 1
        _, last = self._class_char(negated=negated)
        if first is None or last is None or first > last:
            self._fail("the range", "does not go from a character to a later one", start)
        return ranges_of((first, last))

    def _class_char(self, *, negated: bool) -> tuple[Ranges, int | None]:
        char = self._peek()
        if char != "\\":
            if not char:
                self._fail("a bracket of", "is not closed")
            self._i += 1
            return self._code(ord(char)), ord(char)
        name = self._text[self._i + 1 : self._i + 2]
        if name in _SHORT and negated:  # what is left out must be all that either dialect would
            self._i += 2
            return _SHORT[name][1], None
        return self._escape(in_class=True)
