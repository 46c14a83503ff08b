"""Translates clients' EBNF, as xgrammar and llama.cpp (GBNF) write it, into the library's dialect of Lark."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import Format
from pdkv.grammar.formats import text as quoted
from pdkv.grammar.lexemes import Chars, Either, Grouping, Node, Places, Ranges, Ref, Repeat, Rules, Sequence
from pdkv.grammar.schema_time import SchemaTime

MAX_REPEAT = 10_000
"""The largest count of a repetition."""

_TOKEN = re.compile(
    r"(?P<skip>(?:\s|#[^\n]*)+)|(?P<rule>[A-Za-z_][\w.-]*)\s*::=|(?P<name>[A-Za-z_][\w.-]*)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<bracket>\[(?:\\.|[^\]\\\n])*\])'
    r"|(?P<counts>\{\s*[0-9]*\s*(?:,\s*[0-9]*)?\s*\})|(?P<mark>[()|*+?.])"
)
_CHAR = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrtfvba]|[^a-zA-Z0-9])|[^\\]", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a"}
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def ebnf(grammar: str, time: SchemaTime | None = None) -> Format:
    """The format of a grammar.

    Args:
        time: its time limit; None: the limit for all shapes of one request.

    Raises:
        InvalidRequest: it is not valid, or takes too long; names the line.
        RequestAborted: the request was cancelled.
    """
    reader = _Reader(grammar)
    rules = reader.rules()
    prefix = "e_" + blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    if reader.is_regular:  # then all of it is one lexeme: its rules are terminals, whose names are in capitals
        return _Writer(rules, set(), prefix.upper()).format()
    time = time or SchemaTime()
    rules = Grouping(rules, time).rules
    return _Writer(rules, Places(rules, time).exact_runs(), prefix).format()


class _Reader:
    """Parses one grammar's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, place
        self._i = 0
        self.is_regular = False  # known behind `rules`: no rule refers to itself

    def rules(self) -> dict[str, Node]:
        """Rules by name: root, and all rules that are referred to."""
        place = 0
        while place < len(self._text):
            found = _TOKEN.match(self._text, place)
            if found is None:
                raise self._wrong(f"cannot be read at {clip(self._text[place : place + 20])!r}", place)
            if (kind := str(found.lastgroup)) != "skip":
                self._tokens.append((kind, found[kind], place))
            place = found.end()
        self._tokens.append(("end", "the end", place))
        rules: dict[str, Node] = {}
        while (token := self._next())[0] != "end":
            if token[0] != "rule":
                raise self._wrong(f"must have a rule, name ::= …, in the place of {clip(token[1])!r}", token[2])
            if token[1] in rules:
                raise self._wrong(f"has two rules for {clip(token[1])!r}", token[2])
            rules[token[1]] = self._either()
        self._check_names(rules)
        return rules

    def _check_names(self, rules: Rules) -> None:
        needs, user = TopologicalSorter[str](), ""
        for kind, name, place in (*self._tokens, ("rule", "", 0), ("name", "root", 0)):
            if kind == "rule":
                user = name
            elif kind == "name":
                needs.add(user, name)
                if name not in rules:
                    raise self._wrong(f"has no rule for {clip(name)!r}", place)
        with contextlib.suppress(CycleError):
            needs.prepare()
            self.is_regular = True

    def _wrong(self, why: str, place: int) -> InvalidRequest:
        line = self._text.count("\n", 0, place) + 1
        return InvalidRequest(f"the grammar {why}, in line {line}")

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
                return _in_turn(parts)
            parts.append(self._repeated(self._part(*self._next())))

    def _part(self, kind: str, text: str, place: int) -> Node:
        match kind:
            case "name":
                return Ref(text)
            case "text":
                return _in_turn([Chars(((code, code),)) for code, _ in self._chars(text[1:-1], place)])
            case "bracket":
                return self._bracket(text[1:-1], place)
            case "mark" if text == ".":
                return Chars(((0, _LAST),))
            case "mark" if text == "(":
                inner = self._either()
                if not self._takes(")"):
                    raise self._wrong(
                        f"must have a closing parenthesis in the place of {clip(self._tokens[self._i][1])!r}", place
                    )
                return inner
        raise self._wrong(f"must have something in front of {clip(text)!r}", place)

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
            raise self._wrong(
                f"must repeat up to {MAX_REPEAT} times, and most not less than least: got {clip(text)}", place
            )
        return Repeat(part, least, most) if most != 0 else Sequence(())

    def _chars(self, text: str, place: int) -> Iterator[tuple[int, bool]]:
        """Code points, and whether each stands for itself, unescaped."""
        at = 0
        while at < len(text):
            found = _CHAR.match(text, at)
            if found is None:
                raise self._wrong(f"has an escape that is not known: {text[at : at + 2]}", place)
            char = found[0]
            code = (
                ord(char)
                if len(char) == 1
                else int(char[2:], 16)
                if len(char) > 2
                else ord(_CONTROLS.get(char[1], char[1]))
            )
            if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
                raise self._wrong(f"has an escape for an invalid character: {clip(char)!r}", place)
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
                raise self._wrong(f"has a range from a character to an earlier one in [{clip(text)}]", place)
            i += 3 if is_range else 1
        allowed = _complement(ranges) if negated else tuple(ranges)
        if not allowed:
            raise self._wrong(f"has a character class that matches nothing: [{clip(text)}]", place)
        return Chars(allowed)


def _in_turn(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    others, at = [], 0
    for first, last in sorted((*ranges, _SURROGATES, (_LAST + 1, _LAST + 1))):
        if at < first:
            others.append((at, first - 1))
        at = max(at, last + 1)
    return tuple(others)


class _Writer:
    """Writes one grammar as Lark, in which the named runs are lexemes."""

    def __init__(self, rules: Rules, runs: set[Chars], prefix: str) -> None:
        self._runs = runs
        self._names = {name: f"{prefix}_{i}" for i, name in enumerate(rules)}
        self._lark = {self._names[name]: self._write(node) for name, node in rules.items()}

    def format(self) -> Format:
        """The whole grammar."""
        return Format(self._names["root"], self._lark)

    def _write(self, node: Node) -> str:
        match node:
            case Ref(name):
                return self._names[name]
            case Chars(ranges, least, most) if node in self._runs:
                run = f"/[{_ranges(ranges)}]{_counts(max(least, 1), most)}/"
                return run if least else f"({run})?"
            case Chars(ranges, least, most) if node.is_run:
                return self._write(Repeat(Chars(ranges), least, most))
            case Chars(((first, last),)) if first == last:
                return quoted(chr(first)).expression
            case Chars(ranges):
                return f"/[{_ranges(ranges)}]/"
            case Sequence(parts):
                return f"({' '.join(map(self._write, parts))})" if parts else '""'
            case Either(branches):
                return f"({' | '.join(map(self._write, branches))})"
            case Repeat(part, least, most):
                return f"({self._write(part)}){_counts(least, most)}"
        raise AssertionError(node)


def _counts(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _ranges(ranges: Ranges) -> str:
    return "".join(
        f"\\x{{{first:X}}}-\\x{{{last:X}}}" if first != last else f"\\x{{{first:X}}}" for first, last in ranges
    )
