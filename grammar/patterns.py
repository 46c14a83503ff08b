"""Regular expressions: those that a grammar enforces as they are meant, and some that are made here."""

from collections.abc import Iterable

from pdkv.errors import InvalidRequest
from pdkv.limits import clip

MAX_PATTERN_CHARS = 16_384
"""Of one regular expression."""

MAX_REPEAT = 10_000
"""The largest count of a repetition; each makes states of its own."""

CHARACTER = r'[^"\\\x00-\x1f]'
"""One character of a JSON string that is written as itself."""

_DAY = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"[12]\d{{3}}-{_DAY}"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,9}[WMY]|\d{1,9}D(T\d{1,9}[HMS])?|\d{1,9}M\d{1,9}D|\d{1,9}Y\d{1,9}M(\d{1,9}D)?|T\d{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,40}}(\.[A-Za-z0-9_+-]{{1,20}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"(https?|ftp)://{_HOST}(:\d{{1,4}})?(/[A-Za-z0-9._~!$&()*+,;=:@-]*)*"
    r"(\?[A-Za-z0-9._~!$&()*+,;=:@/-]*)?(#[A-Za-z0-9._~-]*)?",
}
"""Formats of strings that are enforced, each by a subset of what it allows: an answer is never wrong by it."""

FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path", "textarea", "markdown"})
"""Formats that say how to show a string, and forbid none."""


def check_pattern(pattern: str, at: str) -> None:
    """What the library that matches would leave out in silence is refused here; the rest of the syntax there.

    Raises:
        InvalidRequest: `at` says where the pattern stands.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"{at}: a pattern must have at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    shown, depth, i = clip(pattern), 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += _check_escape(pattern, i, at)
        elif char == "[":
            i = _end_of_class(pattern, i, at)
        elif char == "(":
            depth += 1
            i += _check_group(pattern, i, at)
        elif char == ")":
            depth -= 1
        elif char == "^" and not _begins(pattern, i, depth):
            raise InvalidRequest(f"{at}: '^' at {i} of the pattern {shown!r} stands not at its beginning")
        elif char == "$" and not _ends(pattern, i, depth):
            raise InvalidRequest(f"{at}: '$' at {i} of the pattern {shown!r} stands not at its end")
        elif char == "{":
            _check_repeat(pattern, i, at)
        i += 1
    if depth:
        raise InvalidRequest(f"{at}: the parentheses of the pattern {shown!r} do not match")


def _begins(pattern: str, index: int, depth: int) -> bool:
    """Whether nothing precedes, and an anchor there is one of the whole pattern: without an alternative beside it."""
    return index == 0 and depth == 0


def _ends(pattern: str, index: int, depth: int) -> bool:
    return index == len(pattern) - 1 and depth == 0


def _check_escape(pattern: str, index: int, at: str) -> int:
    """Returns how many more characters belong to it."""
    if index + 1 == len(pattern):
        raise InvalidRequest(f"{at}: the pattern {clip(pattern)!r} ends in an escape")
    name = pattern[index + 1]
    if name in "bBAZzGkpP" or name in "123456789":
        raise InvalidRequest(
            f"{at}: '\\{name}' at {index} of the pattern {clip(pattern)!r} cannot be enforced (no word boundaries, "
            "back-references, Unicode properties)"
        )
    return 1


def _end_of_class(pattern: str, index: int, at: str) -> int:
    """The index of the bracket that closes the one at `index`."""
    i = index + 1
    if pattern[i : i + 1] == "^":
        i += 1
    if pattern[i : i + 1] == "]":
        i += 1
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] == "]":
            return i
        i += 1
    raise InvalidRequest(f"{at}: the bracket at {index} of the pattern {clip(pattern)!r} is not closed")


def _check_group(pattern: str, index: int, at: str) -> int:
    """Returns how many more characters belong to its opening."""
    if pattern[index + 1 : index + 2] != "?":
        return 0
    opening = pattern[index + 1 : index + 3]
    if opening == "?:":
        return 2
    raise InvalidRequest(
        f"{at}: '({opening}' at {index} of the pattern {clip(pattern)!r} cannot be enforced (of groups only (…) and "
        "(?:…) can)"
    )


def _check_repeat(pattern: str, index: int, at: str) -> None:
    end = pattern.find("}", index)
    counts = pattern[index + 1 : end].split(",") if end > 0 else []
    for count in counts:
        if count.strip().isdecimal() and (len(count) > 9 or int(count) > MAX_REPEAT):
            text = f"{at}: the repetition at {index} of the pattern {clip(pattern)!r} is more than {MAX_REPEAT}"
            raise InvalidRequest(text)


def other_names(names: Iterable[str]) -> str:
    """A pattern for the JSON strings without escapes that are none of `names`.

    By a walk through their trie: behind each of its prefixes either the string ends, where no name does, or a character
    follows that goes on with no name, and then anything.
    """
    written = [name for name in names if not any(char in '"\\' or char < " " for char in name)]
    return _behind(sorted(set(written)), 0)


def _behind(names: list[str], depth: int) -> str:
    """The pattern of what may follow `names[i][:depth]`, the same for all."""
    ends = bool(names) and len(names[0]) == depth
    following: dict[str, list[str]] = {}
    for name in names:
        if len(name) > depth:
            following.setdefault(name[depth], []).append(name)
    if not following:
        return f"{CHARACTER}+" if ends else f"{CHARACTER}*"
    others = "".join(map(_in_class, following))
    ways = [rf'[^"\\\x00-\x1f{others}]{CHARACTER}*']
    ways += [f"{_literal(char)}{_behind(rest, depth + 1)}" for char, rest in following.items()]
    together = f"({'|'.join(ways)})"
    return together if ends else f"{together}?"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "[]^-" else char


def _literal(char: str) -> str:
    return f"\\{char}" if char in r".^$*+?{}[]\|()/-" else char
