"""What may be empty in a regular expression, said in one way only: by a repetition that may be none.

xgrammar's automata for patterns in schemas let wrong texts pass where a branch, or what is repeated, may be empty.
"""

from itertools import pairwise

from pdkv.errors import InvalidRequest
from pdkv.grammar.regex import Chars, Either, Node, Ranges, Repeat, Sequence, check_size, ranges_of

MAX_OPTIONAL_PARTS = 16
"""In a row, of a group that may be empty by them: each may be the first that is not."""


def without_empty_branches(node: Node, at: str) -> Node:
    """The same texts; no branch of an Either and no part of a Repeat may be empty.

    Raises:
        InvalidRequest: the pattern at `at` has more than MAX_OPTIONAL_PARTS.
    """
    match node:
        case Chars():
            return node
        case Sequence(parts):
            return Sequence(tuple(without_empty_branches(part, at) for part in parts))
        case Either(branches):
            made = [without_empty_branches(branch, at) for branch in branches]
            filled = [branch for branch in (_filled(branch, at) for branch in made) if branch is not None]
            either = filled[0] if len(filled) == 1 else Either(tuple(filled))
            return Repeat(either, 0, 1 if filled else 0) if any(map(_may_be_empty, made)) else either
        case Repeat(part, least, most):
            made_part = without_empty_branches(part, at)
            if not _may_be_empty(made_part):
                return Repeat(made_part, least, most)
            filled_part = _filled(made_part, at)
            return Sequence(()) if filled_part is None else Repeat(filled_part, 0, most)


def check_branches(node: Node, at: str) -> None:
    """Raises InvalidRequest for an optional group whose branches begin alike, if one of them may go on at its end.

    xgrammar joins states there that are not the same: `(b|bc?)?` lets `bcc` pass.
    """
    match node:
        case Sequence(parts):
            for part in parts:
                check_branches(part, at)
        case Either(branches):
            for branch in branches:
                check_branches(branch, at)
        case Repeat(part, least, _):
            if least == 0 and isinstance(part, Either) and _begin_alike(part) and any(map(_may_go_on, part.branches)):
                raise InvalidRequest(
                    f"{at}: the pattern has an optional group whose branches begin alike, which cannot be enforced: "
                    "put what they have in common in front of it"
                )
            check_branches(part, at)


def _begin_alike(either: Either) -> bool:
    """Whether a character may begin two of the branches."""
    firsts = sorted(pair for branch in _branches(either) for pair in _first(branch))
    return any(one[1] >= other[0] for one, other in pairwise(firsts))


def _branches(either: Either) -> list[Node]:
    """Those of branches that are branches again in their place."""
    nested = ([branch] if not isinstance(branch, Either) else _branches(branch) for branch in either.branches)
    return [branch for branches in nested for branch in branches]


def _first(node: Node) -> Ranges:
    """What it may begin with."""
    match node:
        case Chars(ranges):
            return ranges
        case Either(branches):
            return ranges_of(*(pair for branch in branches for pair in _first(branch)))
        case Repeat(part):
            return _first(part)
        case Sequence(parts):
            first: Ranges = ()
            for part in parts:
                first = ranges_of(*first, *_first(part))
                if not _may_be_empty(part):
                    break
            return first


def _may_go_on(node: Node) -> bool:
    """Whether more may follow one of its texts that is whole."""
    match node:
        case Chars():
            return False
        case Sequence(parts):
            return bool(parts) and _may_go_on(parts[-1])
        case Either(branches):
            return any(map(_may_go_on, branches))
        case Repeat(part, least, most):
            return least != most or _may_go_on(part)


def _may_be_empty(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Either(branches):
            return any(map(_may_be_empty, branches))
        case Repeat(part, least, _):
            return least == 0 or _may_be_empty(part)


def _filled(node: Node, at: str) -> Node | None:
    """Its texts but the empty one; None if there are no others. Takes what `without_empty_branches` returns."""
    if not _may_be_empty(node):
        return node
    match node:
        case Sequence(parts):
            if len(parts) > MAX_OPTIONAL_PARTS:
                raise InvalidRequest(
                    f"{at}: a group of more than {MAX_OPTIONAL_PARTS} parts of which none has to be there"
                )
            firsts = [(_filled(part, at), parts[i + 1 :]) for i, part in enumerate(parts)]
            branches = tuple(Sequence((first, *rest)) for first, rest in firsts if first is not None)
            check_size(Either(branches), at)
            return Either(branches) if branches else None
        case Repeat(part, _, most) if most != 0:
            return Repeat(part, 1, most)
    return None
