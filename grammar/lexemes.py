"""Which parts of a grammar are read in one piece, and whether that leaves every text that the grammar allows.

The library reads lexemes: each goes on as long as any that may stand there can. What one lexeme allows is exact, whatever
it is made of. But one that could go on with a character with which the next may begin swallows it.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pdkv.grammar.schema_time import SchemaTime

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range."""

_MAX_POSITIONS = 4000
_MAX_PAIRS = 100_000
"""Of a grammar whose lexemes are looked at; beyond that each character is one."""


class Chars(NamedTuple):
    """One character."""

    ranges: Ranges


class Ref(NamedTuple):
    """What another rule says."""

    name: str


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


class Lexeme(NamedTuple):
    """Something regular that is read in one piece."""

    node: "Node"


Node = Chars | Ref | Sequence | Either | Repeat | Lexeme
Rules = Mapping[str, Node]


def lexemes_of(rules: Rules, time: SchemaTime) -> dict[str, Node]:
    """The rules with lexemes in them, root and those that it needs: as large ones as leave all texts, or characters."""
    regular = _regular(rules, time)
    made = {name: _grouped(node, regular) for name, node in rules.items() if name not in regular or name == "root"}
    if "root" in regular or _Follow(rules, made, time).is_exact():
        return made
    return {name: _grouped(node, None) for name, node in rules.items()}


def _references(node: Node) -> Iterable[str]:
    match node:
        case Ref(name):
            yield name
        case Sequence(parts) | Either(parts):
            for part in parts:
                yield from _references(part)
        case Repeat(part):
            yield from _references(part)


def _regular(rules: Rules, time: SchemaTime) -> set[str]:
    """The rules that refer to no rule that refers to itself."""
    needs = {name: set(_references(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = {}
    for name, needed in needs.items():
        for other in needed:
            users.setdefault(other, []).append(name)
    regular, ready = set[str](), [name for name, needed in needs.items() if not needed]
    while ready:
        time.check()
        name = ready.pop()
        regular.add(name)
        for user in users.get(name, ()):
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    return regular


def _grouped(node: Node, regular: set[str] | None) -> Node:
    made, is_regular = _group(node, regular)
    return Lexeme(made) if is_regular else made


def _group(node: Node, regular: set[str] | None) -> tuple[Node, bool]:
    """The node, and whether it is regular; if not, what is within it is made lexemes. None: each character is one."""
    match node:
        case Chars():
            return (Lexeme(node), False) if regular is None else (node, True)
        case Ref(name):
            return node, regular is not None and name in regular
        case Repeat(part, least, most):
            made, is_regular = _group(part, regular)
            return Repeat(made, least, most), is_regular
        case Either(branches):
            parts = [_group(branch, regular) for branch in branches]
            if all(is_regular for _, is_regular in parts):
                return node, True
            alike = [part for part, is_regular in parts if is_regular]
            others = [part for part, is_regular in parts if not is_regular]
            return Either((*others, *([Lexeme(Either(tuple(alike)))] if alike else []))), False
        case Sequence(members):
            parts = [_group(part, regular) for part in members]
            if regular is not None and all(is_regular for _, is_regular in parts):
                return node, True
            made_parts, run = list[Node](), list[Node]()
            for part, is_regular in (*parts, (Sequence(()), False)):
                if is_regular:
                    run.append(part)
                    continue
                if run:
                    made_parts.append(Lexeme(Sequence(tuple(run))))
                made_parts.append(part)
                run = []
            return Sequence(tuple(made_parts[:-1])), False
    return node, False


class _Follow:
    """What may stand behind the lexemes of a grammar, and whether one could swallow it."""

    def __init__(self, rules: Rules, made: Rules, time: SchemaTime) -> None:
        self._rules = rules
        self._made = made
        self._time = time
        self._first: dict[str, tuple[frozenset[Lexeme], bool]] = dict.fromkeys(made, (frozenset(), False))
        self._behind: dict[str, set[Lexeme]] = {name: set() for name in made}
        self._next: dict[Lexeme, set[Lexeme]] = {}
        self._starts: dict[Node, tuple[Ranges, bool]] = {}
        self._chars: list[Ranges] = []  # by position: a character in a lexeme
        self._goes_on: list[set[int]] = []  # the positions that may follow each

    def is_exact(self) -> bool:
        """Whether no lexeme can go on with a character with which what follows may begin."""
        self._find_next()
        begins, ends = set[int](), dict[int, Ranges]()
        for lexeme, following in self._next.items():
            first, last, _ = self._positions(lexeme.node)
            if len(self._chars) > _MAX_POSITIONS:
                return False
            begins |= first
            behind = tuple(pair for other in following for pair in self._begin(lexeme, other))
            ends |= dict.fromkeys(last, behind)
        seen = {(p, q) for p in begins for q in begins if self._meet(p, q)}
        pending = list(seen)
        while pending:
            self._time.check()
            p, q = pending.pop()
            if p in ends and any(_meet(ends[p], self._chars[after]) for after in self._goes_on[q]):
                return False
            more = {(a, b) for a in self._goes_on[p] for b in self._goes_on[q] if self._meet(a, b)} - seen
            seen |= more
            pending += more
            if len(seen) > _MAX_PAIRS:
                return False
        return True

    def _meet(self, p: int, q: int) -> bool:
        return _meet(self._chars[p], self._chars[q])

    # --- which lexemes follow which -----------------------------------------------------------------------------------

    def _find_next(self) -> None:
        size = -1
        while size != (size := self._size()):
            for name, node in self._made.items():
                self._time.check()
                self._first[name] = self._walk(node, frozenset(self._behind[name]))

    def _size(self) -> int:
        sets = (*self._behind.values(), *self._next.values(), *(first for first, _ in self._first.values()))
        return sum(map(len, sets)) + sum(is_empty for _, is_empty in self._first.values())

    def _walk(self, node: Node, behind: frozenset[Lexeme]) -> tuple[frozenset[Lexeme], bool]:
        """The lexemes with which a node may begin, and whether it may be empty; notes what follows those in it."""
        match node:
            case Lexeme():
                self._next.setdefault(node, set()).update(behind)
                return frozenset({node}), self._start(node.node)[1]
            case Ref(name):
                self._behind[name] |= behind
                return self._first[name]
            case Either(branches):
                walked = [self._walk(branch, behind) for branch in branches]
                return frozenset().union(*(first for first, _ in walked)), any(is_empty for _, is_empty in walked)
            case Repeat(part, least, most):
                first, is_empty = self._walk(part, behind)
                if most != 1:
                    first, is_empty = self._walk(part, behind | first)
                return first, is_empty or least == 0
            case Sequence(parts):
                is_empty = True
                first = frozenset[Lexeme]()
                for part in reversed(parts):
                    begin, may_be_empty = self._walk(part, behind)
                    behind = behind | begin if may_be_empty else begin
                    first = first | begin if may_be_empty else begin
                    is_empty = is_empty and may_be_empty
                return first, is_empty
        raise AssertionError(node)

    # --- characters -----------------------------------------------------------------------------------------------

    def _begin(self, lexeme: Lexeme, other: Lexeme) -> Ranges:
        """With what `other` may begin that `lexeme` must leave to it. If it ends with any number of some characters, it
        may take those of them, too, of which `other` needs none.
        """
        node = self._resolved(other.node)
        taken = self._edge(lexeme.node, -1)
        if taken is not None and taken == self._edge(node, 0):
            node = Sequence(node.parts[1:]) if isinstance(node, Sequence) else Sequence(())
        return self._start(node)[0]

    def _resolved(self, node: Node) -> Node:
        while isinstance(node, Ref) or (isinstance(node, Sequence) and len(node.parts) == 1):
            node = self._rules[node.name] if isinstance(node, Ref) else node.parts[0]
        return node

    def _edge(self, node: Node, index: int) -> Node | None:
        """The characters of which any number may stand at an edge."""
        node = self._resolved(node)
        if isinstance(node, Sequence) and node.parts:
            return self._edge(node.parts[index], index)
        is_any = isinstance(node, Repeat) and node.most is None and node.least <= -index
        return node.part if is_any and isinstance(node.part, Chars) else None

    def _start(self, node: Node) -> tuple[Ranges, bool]:
        """With what a regular node may begin, and whether it may be empty."""
        if node not in self._starts:
            self._time.check()
            self._starts[node] = self._started(node)
        return self._starts[node]

    def _started(self, node: Node) -> tuple[Ranges, bool]:
        match node:
            case Chars(ranges):
                return ranges, False
            case Ref(name):
                return self._start(self._rules[name])
            case Either(branches):
                starts = [self._start(branch) for branch in branches]
                return tuple({pair for ranges, _ in starts for pair in ranges}), any(is_empty for _, is_empty in starts)
            case Repeat(part, least, most):
                ranges, is_empty = self._start(part)
                return (ranges, is_empty or least == 0) if most != 0 else ((), True)
            case Sequence(parts):
                begin: Ranges = ()
                for part in parts:
                    ranges, is_empty = self._start(part)
                    begin += ranges
                    if not is_empty:
                        return begin, False
                return begin, True
        raise AssertionError(node)

    def _positions(self, node: Node) -> tuple[set[int], set[int], bool]:
        """The positions with which a regular node may begin and end, and whether it may be empty (Glushkov)."""
        self._time.check()
        match node:
            case _ if len(self._chars) > _MAX_POSITIONS:
                return set(), set(), True
            case Chars(ranges):
                self._chars.append(ranges)
                self._goes_on.append(set())
                position = {len(self._chars) - 1}
                return position, position, False
            case Ref(name):
                return self._positions(self._rules[name])
            case Either(branches):
                made = [self._positions(branch) for branch in branches]
                return set().union(*(m[0] for m in made)), set().union(*(m[1] for m in made)), any(m[2] for m in made)
            case Repeat(part, least, most):
                first, last, is_empty = self._positions(part)
                if most != 1:
                    self._join(last, first)
                return first, last, is_empty or least == 0
            case Sequence(parts):
                first, last, is_empty = set[int](), set[int](), True
                for part in parts:
                    begin, end, may_be_empty = self._positions(part)
                    self._join(last, begin)
                    first |= begin if is_empty else set()
                    last = last | end if may_be_empty else end
                    is_empty = is_empty and may_be_empty
                return first, last, is_empty
        raise AssertionError(node)

    def _join(self, last: set[int], first: set[int]) -> None:
        for position in last:
            self._goes_on[position] |= first


def _meet(ones: Ranges, others: Ranges) -> bool:
    return any(one[0] <= other[1] and other[0] <= one[1] for one in ones for other in others)
