"""Regular expressions: those that a grammar enforces as they are meant, and some that are made here."""

from collections.abc import Iterable

from pdkv.grammar.regex import ANY, complement, parse, ranges_of
from pdkv.grammar.regex_writer import class_in_json, literal, write

CHARACTER = class_in_json(ANY)
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


def pattern_of(pattern: str, at: str) -> str:
    """A client's pattern for strings in JSON as the library enforces it.

    Raises:
        InvalidRequest: it is wrong, or cannot be enforced; `at` says where it stands.
    """
    return f"^({write(parse(pattern, at), at, in_json=True)})$"


def text_pattern_of(pattern: str, at: str) -> str:
    """The same for text that is no JSON."""
    return write(parse(pattern, at), at, in_json=False)


def pattern_of_length(least: int, most: int | None) -> str:
    """Strings of so many characters, in the form that `compiling.py` knows."""
    return f"^{CHARACTER}{{{least},{'' if most is None else most}}}$"


def other_names(names: Iterable[str]) -> str:
    """A pattern for the JSON strings without escapes that are none of `names`.

    By a walk through their trie: behind each of its prefixes either the string ends, where no name does, or a character
    follows that goes on with no name, and then anything.
    """
    written = [name for name in names if not any(char in '"\\' or char < " " for char in name)]
    return f"^{_behind(sorted(set(written)), 0)}$"


def _behind(names: list[str], depth: int) -> str:
    """The pattern of what may follow `names[i][:depth]`, the same for all."""
    ends = bool(names) and len(names[0]) == depth
    following: dict[str, list[str]] = {}
    for name in names:
        if len(name) > depth:
            following.setdefault(name[depth], []).append(name)
    if not following:
        return f"{CHARACTER}+" if ends else f"{CHARACTER}*"
    others = complement(ranges_of(*((ord(char), ord(char)) for char in following)))
    ways = [f"{class_in_json(others)}{CHARACTER}*"]
    ways += [f"{literal(char)}{_behind(rest, depth + 1)}" for char, rest in following.items()]
    together = f"({'|'.join(ways)})"
    return together if ends else f"{together}{{0,1}}"
