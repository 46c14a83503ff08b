"""EBNF of clients, as xgrammar and llama.cpp (GBNF) write it, in the library's dialect of Lark."""

import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple, NoReturn

from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import Format, named
from pdkv.grammar.lexemes import Chars, Either, Lexeme, Node, Ref, Repeat, Sequence, lexemes_of
from pdkv.grammar.schema_time import SchemaTime
from pdkv.limits import clip

MAX_REPEAT = 10_000
"""The largest count of a repetition."""

_TOKEN = re.compile(
    r"(?P<skip>(?:\s|#[^\n]*)+)|(?P<rule>[A-Za-z_][\w.-]*\s*::=)|(?P<name>[A-Za-z_][\w.-]*)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<bracket>\[(?:\\.|[^\]\\\n])*\])'
    r"|(?P<counts>\{\s*[0-9]*\s*(?:,\s*[0-9]*)?\s*\})|(?P<mark>[()|*+?.])"
)
_CHAR = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU0-9])|[^\\]", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a"}
_LAST = 0x10FFFF


def ebnf(text: str, time: SchemaTime | None = None) -> Format:
    """The format of a grammar.

    Args:
        time: what it may take; None: as much as all shapes of one request.

    Raises:
        InvalidRequest: it is none, or takes too long; names the line.
        RequestAborted: nobody waits for it any more.
    """
    time = time or SchemaTime()
    rules = _Reader(text).rules()
    prefix = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return _Writer(rules, lexemes_of(rules, time), prefix).format()


class _Reader:
    """Of one grammar's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, place
        self._i = 0

    def rules(self) -> dict[str, Node]:
        """By name; those that are referred to are there, and root."""
        place = 0
        while place < len(self._text):
            found = _TOKEN.match(self._text, place)
            if found is None:
                self._fail(f"cannot be read at {clip(self._text[place : place + 20])!r}", place)
            if found.lastgroup != "skip":
                self._tokens.append((str(found.lastgroup), found[0], place))
            place = found.end()
        self._tokens.append(("end", "the end", place))
        rules: dict[str, Node] = {}
        while (token := self._next())[0] != "end":
            if token[0] != "rule":
                self._fail(f"must have a rule, name ::= …, in the place of {clip(token[1])!r}", token[2])
            name = token[1].removesuffix("::=").rstrip()
            if name in rules:
                self._fail(f"has two rules for {clip(name)!r}", token[2])
            rules[name] = self._either()
        for kind, name, place in (*self._tokens, ("name", "root", 0)):
            if kind == "name" and name not in rules:
                self._fail(f"has no rule for {clip(name)!r}", place)
        return rules

    def _fail(self, why: str, place: int) -> NoReturn:
        line = self._text.count("\n", 0, place) + 1
        raise InvalidRequest(f"the grammar {why}, in line {line}")

    def _next(self) -> tuple[str, str, int]:
        self._i += 1
        return self._tokens[self._i - 1]

    def _takes(self, mark: str) -> bool:
        is_there = self._tokens[self._i][:2] == ("mark", mark)
        self._i += is_there
        return is_there

    def _either(self) -> Node:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            kind, text, _ = self._tokens[self._i]
            if kind in ("end", "rule") or text in ("|", ")"):
                return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
            parts.append(self._repeated(self._part(*self._next())))

    def _part(self, kind: str, text: str, place: int) -> Node:
        match kind:
            case "name":
                return Ref(text)
            case "text":
                return Sequence(tuple(Chars(((code, code),)) for code in self._codes(text[1:-1], place)))
            case "bracket":
                return self._bracket(text[1:-1], place)
            case "mark" if text == ".":
                return Chars(((0, _LAST),))
            case "mark" if text == "(":
                inner = self._either()
                if not self._takes(")"):
                    self._fail(f"must have a closing parenthesis in the place of {clip(self._tokens[self._i][1])!r}", place)
                return inner
        self._fail(f"must have something in front of {clip(text)!r}", place)

    def _repeated(self, part: Node) -> Node:
        kind, text, place = self._tokens[self._i]
        if text in ("*", "+", "?") and kind == "mark":
            self._i += 1
            return Repeat(part, int(text == "+"), 1 if text == "?" else None)
        if kind != "counts":
            return part
        self._i += 1
        first, comma, last = (piece.strip() for piece in text[1:-1].partition(","))
        least, most = int(first or 0), int(last) if last else None if comma else int(first or 0)
        if max(least, most or 0) > MAX_REPEAT or (most is not None and least > most) or text.strip("{} ") == "":
            self._fail(f"must repeat up to {MAX_REPEAT} times, and most not less than least: got {clip(text)}", place)
        return Repeat(part, least, most)

    def _codes(self, text: str, place: int) -> Iterator[int]:
        return (code for code, _ in self._chars(text, place))

    def _chars(self, text: str, place: int) -> Iterator[tuple[int, bool]]:
        """Code points, and whether each stands for itself, unescaped."""
        at = 0
        while at < len(text):
            found = _CHAR.match(text, at)
            if found is None:
                self._fail(f"has an escape that is not known: {clip(text[at : at + 10])!r}", place)
            char = found[0]
            code = ord(char) if len(char) == 1 else int(char[2:], 16) if len(char) > 2 else ord(_CONTROLS.get(char[1], char[1]))
            if code > _LAST or 0xD800 <= code <= 0xDFFF:
                self._fail(f"has a character that is none: {clip(char)!r}", place)
            yield code, len(char) == 1
            at = found.end()

    def _bracket(self, text: str, place: int) -> Chars:
        negated = text.startswith("^")
        chars = list(self._chars(text[negated:], place))
        ranges, i = list[tuple[int, int]](), 0
        while i < len(chars):
            is_range = i + 2 < len(chars) and chars[i + 1] == (ord("-"), True)
            ranges.append((chars[i][0], chars[i + 2 if is_range else i][0]))
            if ranges[-1][0] > ranges[-1][1]:
                self._fail(f"has a range from a character to an earlier one in [{clip(text)}]", place)
            i += 3 if is_range else 1
        return Chars(_complement(ranges) if negated else tuple(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    others, at = [], 0
    for first, last in sorted(ranges):
        if at < first:
            others.append((at, first - 1))
        at = max(at, last + 1)
    return (*others, (at, _LAST)) if at <= _LAST else tuple(others)


class _Writer:
    """Lark of one grammar."""

    def __init__(self, rules: dict[str, Node], made: dict[str, Node], prefix: str) -> None:
        self._rules = rules
        self._names = {name: f"e_{prefix}_{i}" for i, name in enumerate(made)}
        self._terminals: dict[str, str] = {}
        self._lark: dict[str, str] = {}
        for name, node in made.items():
            self._lark[self._names[name]] = self._write(node)

    def format(self) -> Format:
        """All of it."""
        return Format(self._names["root"], self._lark)

    def _write(self, node: Node) -> str:
        match node:
            case Lexeme(inner):
                made = named(self._terminal(inner), terminal=True)
                self._lark |= made.rules
                return made.expression
            case Ref(name):
                return self._names[name]
        return _written(node, self._write)

    def _terminal(self, node: Node) -> str:
        """What a lexeme is made of; regular rules are terminals of their own, each once."""
        match node:
            case Chars():
                return f"/[{_ranges(node)}]/"
            case Ref(name):
                if name not in self._terminals:
                    made = named(self._terminal(self._rules[name]), terminal=True)
                    self._lark |= made.rules
                    self._terminals[name] = made.expression
                return self._terminals[name]
            case Sequence(parts) if parts and all(isinstance(part, Chars) for part in parts):
                return f"/{''.join(f'[{_ranges(part)}]' for part in parts)}/"
        return _written(node, self._terminal)


def _written(node: Node, write: Callable[[Node], str]) -> str:
    match node:
        case Sequence(parts):
            return f"({' '.join(map(write, parts))})" if parts else '""'
        case Either(branches):
            return f"({' | '.join(map(write, branches))})"
        case Repeat(part, least, most):
            return f"({write(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def _ranges(chars: Node) -> str:
    assert isinstance(chars, Chars)
    return "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" if first != last else f"\\x{{{first:X}}}" for first, last in chars.ranges)
