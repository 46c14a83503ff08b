"""Regular expressions written so that xgrammar reads them as they are meant, in plain text and within a JSON string.

In a schema xgrammar takes a pattern for what stands between the quotes as it is written, so one for `"` would make text
that is no JSON: characters that JSON escapes are left out here. `(x\\d+)?` lets `1` pass there (its `?` leads into the
loop), `{0,1}` does not. A repetition of more than 128 is not expanded there, and every mask in it takes 50 ms with 128k
tokens; parts of 128 take 0.1.
"""

from pdkv.errors import InvalidRequest
from pdkv.grammar.regex import LAST, Chars, Either, Node, Ranges, Repeat, Sequence, check_size, complement, ranges_of
from pdkv.grammar.regex_optional import check_branches, without_empty_branches

_MAX_EXPANDED = 128
_SURROGATES = (0xD800, 0xDFFF)
_NOT_IN_TEXT = ranges_of((0x00, 0x00), _SURROGATES)
_NOT_IN_JSON = ranges_of(_SURROGATES, (0x00, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))
"""Characters that do not stand in a JSON string as themselves."""


def write(node: Node, at: str, *, in_json: bool) -> str:
    """A pattern without anchors.

    Args:
        at: its place, for errors.
        in_json: for the text between the quotes of a JSON string.

    Raises:
        InvalidRequest: it allows no text, or is too large.
    """
    node = without_empty_branches(node, at)
    check_size(node, at)
    if in_json:
        check_branches(node, at)
    return _Writer(at, in_json).write(node)


class _Writer:
    """Of one pattern."""

    def __init__(self, at: str, in_json: bool) -> None:
        self._at = at
        self._in_json = in_json

    def write(self, node: Node) -> str:
        match node:
            case Chars():
                return self._chars(node)
            case Sequence(parts):
                return "".join(self._grouped(part) if isinstance(part, Either) else self.write(part) for part in parts)
            case Either(branches):
                return "|".join(map(self.write, branches))
            case Repeat(part, least, most):
                return _repeated(self._grouped(part), least, most)

    def _grouped(self, node: Node) -> str:
        """As one piece."""
        return self.write(node) if isinstance(node, Chars) else f"({self.write(node)})"

    def _chars(self, node: Chars) -> str:
        ranges = _without(node.ranges, _NOT_IN_JSON if self._in_json else _NOT_IN_TEXT)
        if not ranges:
            why = "a quote, a backslash and a control character cannot" if self._in_json else "no character can"
            raise InvalidRequest(f"{self._at}: the pattern asks for a character that cannot be enforced: {why}")
        return _class(ranges)


def _repeated(piece: str, least: int, most: int | None) -> str:
    if (least, most) == (1, 1):
        return piece
    if (least, most) in ((0, None), (1, None)):
        return piece + ("+" if least else "*")
    in_full, rest = divmod(least, _MAX_EXPANDED)
    start = f"{piece}{{{_MAX_EXPANDED}}}" * in_full + (f"{piece}{{{rest}}}" if rest else "")
    if most is None:
        return f"{start}{piece}*"
    return start + (_at_most(piece, 0, most - least) if most > least else "")


def _at_most(piece: str, least: int, most: int) -> str:
    """With one way to match each count: with several, compiling takes minutes."""
    if most <= _MAX_EXPANDED:
        return f"{piece}{{{least},{most}}}"
    longer = _at_most(piece, 1, most - _MAX_EXPANDED)
    return f"({piece}{{{least},{_MAX_EXPANDED}}}|{piece}{{{_MAX_EXPANDED}}}{longer})"


def class_in_json(ranges: Ranges) -> str:
    """Those of the characters that stand in a JSON string as themselves; there must be one."""
    return _class(_without(ranges, _NOT_IN_JSON))


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    return complement(ranges_of(*complement(ranges), *others))


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(chr(ranges[0][0]))
    if ranges[-1][1] < LAST:
        return "[" + "".join(map(_in_class, ranges)) + "]"
    # As what it is not, which takes a tenth of the time to compile: halves of surrogate pairs, which are no text, pass.
    [controls, *others] = complement(ranges_of(*ranges, _SURROGATES))  # NUL and what follows are never in `ranges`
    return "[^" + "".join(map(_in_class, others)) + "-".join(f"\\x{code:02x}" for code in controls) + "]"


def _in_class(pair: tuple[int, int]) -> str:
    first, last = (_escaped(chr(code), "[]^-\\") for code in pair)
    return first if pair[0] == pair[1] else f"{first}-{last}"


def literal(char: str) -> str:
    """A pattern for one character."""
    return _escaped(char, r".^$*+?{}[]\|()/-")


def _escaped(char: str, special: str) -> str:
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    return f"\\{char}" if char in special else char
