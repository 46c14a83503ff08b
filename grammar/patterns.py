"""Clients' regular expressions in the library's dialect (that of Rust's `regex`), with the meaning they have for
clients.

The clients' dialects are JSON Schema's (ECMA 262) and Python's. Where the two differ, a class holds what both allow:
`\\d` are the ASCII digits, `.` is no line end of either. Anything that neither has, or that the library lacks, is
refused.
"""

import re

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest

MAX_PATTERN_CHARS = 16_384
"""The most characters of one regular expression."""

_ESCAPE = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a character beyond U+FFFF
    r"|\\(?:u\{[0-9a-fA-F]{1,8}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|0[0-9]|.|$)"
)
_TOKEN = re.compile(
    _ESCAPE + r"|\[\^?(?:\\.|[^\]\\])+\]|\{(?:[0-9]+,?|,)[0-9]*\}|\(\?(?:P?<[A-Za-z_]\w*>|:)?|.", re.DOTALL
)
_ODD = re.compile(r"\{,[0-9]*\}|[^(:|^]\^|\$[^$|)]")
_IN_BRACKET = re.compile(_ESCAPE + "|.", re.DOTALL)
_ODD_SPACES = r"\x{1C}-\x{1F}\x{85}\x{FEFF}"
"""Spaces to one of the dialects."""

# By properties: in schemas the library takes \w and \d for the ASCII ones.
_CLASSES = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[0-9A-Za-z_]",
    "W": r"[^\p{L}\p{N}_]",
    "s": r"[\s--\x{85}]",
    "S": rf"[^\s{_ODD_SPACES}]",
}
_CLASSES_NOT = {
    "d": r"\p{Nd}",
    "D": "[^0-9]",
    "w": r"\p{L}\p{N}_",
    "W": "[^0-9A-Za-z_]",
    "s": rf"\s{_ODD_SPACES}",
    "S": r"\S\x{85}",
}
"""Within a negated bracket, where less is meant by more."""

_CONTROLS = {"0": 0, "n": 10, "r": 13, "t": 9, "f": 12, "v": 11}

_FORMATS = {
    "date": r"[12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
}
FORMATS = _FORMATS | {"date-time": f"{_FORMATS['date']}T{_FORMATS['time']}"}
"""Formats of which the library's own patterns let wrong values pass: 30 February, a leap second at any time."""


def pattern_of(pattern: str, at: str, *, in_json: bool = False) -> str:
    """The library's pattern for a client's pattern; line ends and slashes are escaped in it.

    Args:
        at: the pattern's place, for errors.
        in_json: whether it is for strings in JSON. U+0000 is in no class: with a class of all control characters, the
            library would also accept quotes and backslashes.

    Raises:
        InvalidRequest: it cannot be enforced.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"{at} must have at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{at} contains half of a surrogate pair") from None
    made = [_token(found[0], at) for found in _TOKEN.finditer(pattern)]
    _check_order(made, at)
    if in_json and "\\x{0}" in made:
        raise _refused("U+0000", at)
    return "".join(f"[{part}--\\x{{0}}]" if in_json and part[0] == "[" else part for part in made)


def _check_order(parts: list[str], at: str) -> None:
    """Raise InvalidRequest for misplaced operators: `re` is asked about the same operators between other characters.

    In its dialect alone a `+` behind another sign has a meaning, which a count has not.
    """
    chars = ("a" if part[0] in "\\[" or part.isalnum() else part for part in parts)
    shape = "".join(chars).replace("+", "{1,}")
    try:
        re.compile(shape)
    except (re.error, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{at} is not a regular expression: {getattr(error, 'msg', error)}") from None
    if odd := _ODD.search(shape):
        raise _refused(
            odd[0], at, "cannot be enforced (counts need a minimum, and ^ and $ are only allowed at the edges)"
        )


def whole(pattern: str) -> str:
    """A pattern for texts that match `pattern` from beginning to end."""
    return f"^(?:{pattern})$"


def _token(token: str, at: str) -> str:
    if token[0] == "\\":
        return _escape(token, at, _CLASSES)
    if token[0] == "[":
        return _bracket(token, at)
    if token == "(?":
        raise _refused(token, at)
    if token[0] == "(":
        return "(?:"
    if token == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    return token if token[1:] or token in ")|*+?^$" else _char(ord(token))


def _refused(what: str, at: str, why: str = "") -> InvalidRequest:
    why = why or "cannot be enforced (no look-around, word boundaries, back-references, flags, empty brackets)"
    return InvalidRequest(f"{at}: {clip(what)!r} {why}")


def _char(code: int) -> str:
    """One character, in and out of brackets."""
    char = chr(code)
    return char if char.isalnum() else f"\\x{{{code:X}}}"


def _escape(token: str, at: str, classes: dict[str, str]) -> str:
    name, rest = token[1:2], token[2:]
    if name in classes:
        return classes[name]
    if name in _CONTROLS and not rest:
        return _char(_CONTROLS[name])
    if name in ("u", "x") and rest:
        if "\\" in rest:
            return _char(0x10000 + ((int(rest[:4], 16) & 0x3FF) << 10 | int(rest[6:], 16) & 0x3FF))
        code = int(rest.strip("{}"), 16)
        if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            return _char(code)
    elif name and not (name.isalnum() or name == "_"):
        return _char(ord(name))
    raise _refused(token, at)


def _bracket(token: str, at: str) -> str:
    """A class of characters; a hyphen at its edge, or behind a range, stands for itself."""
    negated = token[1:2] == "^"
    classes = _CLASSES_NOT if negated else _CLASSES
    items = [found[0] for found in _IN_BRACKET.finditer(token[2 if negated else 1 : -1])]
    if not items:
        raise _refused("a bracket that is empty, or not closed", at)
    made = ""
    while items:
        ends = [items.pop(0)]
        if len(items) > 1 and items[0] == "-":
            ends.append(items[1])
            del items[:2]
        chars = [_escape(item, at, classes) if item[0] == "\\" else _char(ord(item)) for item in ends]
        if len(ends) > 1 and (any(item[1:2] in classes for item in ends) or _code(chars[0]) > _code(chars[1])):
            raise _refused("-".join(ends), at, "is not a range of characters")
        made += "-".join(chars)
    return f"[{'^' if negated else ''}{made}]"


def _code(char: str) -> int:
    """The code point that `_char` wrote."""
    return ord(char) if len(char) == 1 else int(char[3:-1], 16)
