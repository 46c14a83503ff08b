"""Refuses grammars, by digest, that engines gave up as too costly, before any engine gets them."""

from pdkv.errors import GrammarGivenUp
from pdkv.sampling.shape import Grammar

REFUSED_S, MAX_GIVEN_UP = 60.0, 1024
"""Seconds for which a given-up grammar is refused, and the number remembered (the latest)."""


class GivenUpGrammars:
    """The given-up grammars of one router. No clock: `now` is in seconds."""

    def __init__(self) -> None:
        self._given_up: dict[bytes, tuple[float, GrammarGivenUp]] = {}  # by digest: until when, and why; oldest first

    def add(self, grammar: Grammar, error: GrammarGivenUp, now: float) -> None:
        """Note that an engine gave the grammar up."""
        digest = grammar.digest
        self._given_up.pop(digest, None)
        self._given_up[digest] = (now + REFUSED_S, error.anew())
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def check(self, grammar: Grammar | None, now: float) -> None:
        """Raises GrammarGivenUp, as the engine did, while the grammar is refused."""
        if grammar is None or not self._given_up:
            return
        until, error = self._given_up.get(grammar.digest, (now, None))
        if error is not None and now < until:
            raise error.anew()
