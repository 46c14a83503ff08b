"""Decides which parts of a grammar are read in one piece, such that every text that the grammar allows stays possible.

The library reads lexemes, each continuing as long as any lexeme allowed at that place can. So a lexeme is either one
character, which is always exact, or a run of characters of one class (a free text, a name, spaces), if nothing else
allowed there has one of these characters. With single characters, a mask of free text takes a hundred times as long.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

from pdkv.grammar.schema_time import SchemaTime

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range."""

_MAX_PLACES, _MAX_PAIRS = 4000, 200_000
"""The most rules with runs in a grammar; beyond that, each character is a lexeme."""

_MAX_APART = 16
"""The most characters of a fixed-length run, each of which has a place of its own."""


class Chars(NamedTuple):
    """Characters of one class: one, or a run."""

    ranges: Ranges
    least: int = 1
    most: int | None = 1

    @property
    def is_run(self) -> bool:
        """Whether it may have a length other than one."""
        return self[1:] != (1, 1)


class Ref(NamedTuple):
    """A reference to another rule."""

    name: str


class Sequence(NamedTuple):
    """Parts one after the other."""

    parts: "tuple[Node, ...]"


class Either(NamedTuple):
    """One of several parts."""

    branches: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """A repetition of one part."""

    part: "Node"
    least: int
    most: int | None


Node = Chars | Ref | Sequence | Either | Repeat
Rules = Mapping[str, Node]


class Grouping:
    """Equivalent rules in which repetitions of a class are runs, including one among others: (a | b)* is a* (b a*)*.
    The same applies to rules that end with themselves: in x ::= a x | b, which is a* b, each character would open a new
    level, and the library would complete all levels again at each place where the text may end.
    """

    def __init__(self, rules: Rules, time: SchemaTime) -> None:
        """`rules`: root, and all rules that are referred to; `time`: the time limit."""
        self._time = time
        self._rules = {name: _repeating(name, node) for name, node in rules.items()}
        self.rules: dict[str, Node] = {}
        for name, node in self._rules.items():
            self.rules[name] = self._grouped(node)

    def _grouped(self, node: Node) -> Node:
        match node:
            case Sequence(parts):
                return Sequence(tuple(map(self._grouped, parts)))
            case Either(branches):
                return Either(tuple(map(self._grouped, branches)))
            case Repeat(part, least, most):
                return self._repeated(part, least, most)
        return node

    def _repeated(self, part: Node, least: int, most: int | None) -> Node:
        name = part.name if isinstance(part, Ref) else ""
        node = self._rules.get(name, part)
        branches = node.branches if isinstance(node, Either) else (node,)
        classes = [self._class(branch, set()) for branch in branches]
        ranges = tuple(pair for found in classes for pair in found or ())
        others = tuple(branch for branch, found in zip(branches, classes, strict=True) if found is None)
        if ranges and not others:
            if least == most and least <= _MAX_APART:
                return Sequence(tuple(Chars(ranges) for _ in range(least)))
            return Chars(ranges, least, most)
        if not ranges or most is not None or least > 1:
            return Repeat(self._grouped(part), least, most)
        rest = self._rest(name or str(len(self.rules)), others)
        run = Chars(ranges, 0, None)
        first = [Either((Chars(ranges), rest))] * least
        return Sequence((*first, run, Repeat(Sequence((rest, run)), 0, None)))

    def _rest(self, name: str, others: "tuple[Node, ...]") -> Ref:
        rest = Ref(f"{name} but characters")  # a name that no client's rule has
        if rest.name not in self.rules:
            self.rules[rest.name] = rest  # in case that it needs itself
            self.rules[rest.name] = self._grouped(Either(others))
        return rest

    def _class(self, node: Node, known: set[str]) -> Ranges | None:
        """The characters of which the node is one, not counting those of known rules; None: it is more than one."""
        match node:
            case Chars(ranges):
                return ranges
            case Ref(name):
                self._time.check()
                if name in known:
                    return ()
                known.add(name)
                return self._class(self._rules[name], known)
            case Either(branches):
                found = [self._class(branch, known) for branch in branches]
                return None if None in found else tuple(pair for ranges in found for pair in ranges or ())
        return None


def _repeating(name: str, node: Node) -> Node:
    again, others = list[Node](), list[Node]()
    for branch in node.branches if isinstance(node, Either) else ():
        match branch:
            case Sequence((*parts, Ref(last))) if last == name and Ref(name) not in parts:
                again.append(parts[0] if len(parts) == 1 else Sequence(tuple(parts)))
            case _:
                others.append(branch)
    return Sequence((Repeat(Either(tuple(again)), 0, None), Either(tuple(others)))) if again and others else node


class Places:
    """The places of characters in a grammar: which may follow each, and which may occur instead of it after the same
    text.

    Which reference led to a rule is ignored, so the sets may be larger than necessary. Sets are bits of an int.
    """

    def __init__(self, rules: Rules, time: SchemaTime) -> None:
        """`rules`: the rules of a `Grouping`; `time`: the time limit."""
        self._rules = rules
        self._time = time
        self._places: dict[Chars | int, int] = {}  # a run is one place wherever it stands
        self._ranges: list[Ranges] = []
        self._next: list[int] = []  # by place
        self._first = dict.fromkeys(rules, (0, False))
        self._behind = dict.fromkeys(rules, 0)
        self._again: dict[int, int] = {}  # by repetition: with what it goes on
        self._is_done = False
        self._meets: dict[Ranges, int] = {}

    def exact_runs(self) -> set[Chars]:
        """The runs that nothing with a common character may replace or follow.

        Raises:
            InvalidRequest: it takes too long.
            RequestAborted: the request was cancelled.
        """
        self._find_next()
        runs = {run: place for run, place in self._places.items() if isinstance(run, Chars)}
        beside = self._beside(runs.values()) if runs and len(self._next) <= _MAX_PLACES else [-1] * len(self._next)
        return {
            run
            for run, place in runs.items()
            # Behind itself it may stand where it need not be there, as the first one takes all of them.
            if beside[place] in (0, 1 << place) and (run[1:] == (0, None) or not self._next[place] >> place & 1)
        }

    def _find_next(self) -> None:
        names = list(self._rules)
        while not self._is_done and len(self._next) <= _MAX_PLACES:
            self._is_done = True
            for name in names:
                self._time.check()
                first = self._walk(self._rules[name], self._behind[name])
                self._is_done &= first == self._first[name]
                self._first[name] = first
            names.reverse()

    def _walk(self, node: Node, behind: int) -> tuple[int, bool]:
        """The places with which a node may begin, and whether it may be empty; notes what follows those in it."""
        first, is_empty = 0, False
        match node:
            case Chars(_, least) if len(self._next) > _MAX_PLACES:
                return 0, least == 0
            case Chars(ranges, least):
                place = self._places.setdefault(node if node.is_run else id(node), len(self._next))
                if place == len(self._next):
                    self._next.append(0)
                    self._ranges.append(ranges)
                self._next[place] |= behind
                return 1 << place, least == 0
            case Ref(name):
                self._is_done &= not behind & ~self._behind[name]
                self._behind[name] |= behind
                return self._first[name]
            case Either(branches):
                for branch in branches:
                    begin, may_be_empty = self._walk(branch, behind)
                    first, is_empty = first | begin, is_empty or may_be_empty
            case Repeat(part, least, most):
                known = self._again.get(id(node), 0) if most != 1 else 0
                first, is_empty = self._walk(part, behind | known)
                self._is_done &= most == 1 or first == known
                self._again[id(node)] = first
                is_empty = is_empty or least == 0
            case Sequence(parts):
                is_empty = True
                for part in reversed(parts):
                    begin, may_be_empty = self._walk(part, behind)
                    behind, first = (behind | begin, first | begin) if may_be_empty else (begin, begin)
                    is_empty = is_empty and may_be_empty
        return first, is_empty

    def _beside(self, runs: Iterable[int]) -> list[int]:
        """By place: alternatives with a character in common; all of them, if that takes too long."""
        goes_on = list(self._next)
        for place in runs:
            goes_on[place] |= 1 << place
        found, num_pairs = [0] * len(goes_on), 0
        first, _ = self._first["root"]
        pending = [(place, first) for place in _bits(first)]
        while pending and num_pairs <= _MAX_PAIRS:
            self._time.check()
            place, others = pending.pop()
            new = others & self._meeting(place) & ~found[place]
            found[place] |= new
            num_pairs += new.bit_count()
            after = reduce(or_, (goes_on[other] for other in _bits(new)), 0)
            pending += ((behind, after) for behind in _bits(goes_on[place] if after else 0))
        return [-1] * len(found) if pending else found

    def _meeting(self, place: int) -> int:
        """The places that have a character in common with this one."""
        ones = self._ranges[place]
        if ones not in self._meets:
            self._meets[ones] = sum(
                1 << other
                for other, ranges in enumerate(self._ranges)
                if any(one[0] <= pair[1] and pair[0] <= one[1] for one in ones for pair in ranges)
            )
        return self._meets[ones]


def _bits(places: int) -> Iterator[int]:
    while places:
        yield (places & -places).bit_length() - 1
        places &= places - 1
