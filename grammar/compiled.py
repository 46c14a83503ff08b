"""A grammar that is ready to match, and its bytes for other processes with the same vocabulary."""

from typing import Any

from pdkv.grammar.library import load_xgrammar
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.matcher import Matcher
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary


class CompiledGrammar:
    """Immutable; makes a matcher for each answer."""

    def __init__(self, compiled: Any, serialized: bytes, vocabulary: Vocabulary) -> None:
        """Use `from_bytes`."""
        self.serialized = serialized
        self._compiled = compiled  # an xgrammar.CompiledGrammar
        self._vocabulary = vocabulary

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary: Vocabulary) -> "CompiledGrammar":
        """What `serialized` was elsewhere. Other Python threads run meanwhile."""
        compiled = load_xgrammar().CompiledGrammar.deserialize_json(data[1:].decode(), vocabulary.info)
        return cls(compiled, data, vocabulary)

    def matcher(self, time: MatchTime | None = None, grammar: int = 0) -> Matcher:
        """One at the beginning of an answer. `time`: where what it takes is counted, under the number `grammar`."""
        matcher = load_xgrammar().GrammarMatcher(self._compiled)
        allows_special = self.serialized[:1] == _WITH_SPECIAL
        time = MatchTime() if time is None else time
        return Matcher(matcher, self._vocabulary, allows_special=allows_special, time=time, grammar=grammar)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.serialized) + int(self._compiled.memory_size_bytes)


_WITH_SPECIAL, _WITHOUT_SPECIAL = b"s", b"-"
"""First byte of a serialized grammar: whether special tokens may match their text."""


def serialize(compiled: Any, grammar: Grammar) -> bytes:
    """The bytes of an `xgrammar.CompiledGrammar`.

    Special tokens may stand for themselves in structural tags alone, where they mark thoughts and calls: elsewhere a
    text that they were counted in would lack them, since answers do.
    """
    first = _WITH_SPECIAL if grammar.kind == "structural_tag" else _WITHOUT_SPECIAL
    return first + str(compiled.serialize_json()).encode()
