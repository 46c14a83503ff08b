"""From a grammar's text to the library's compiled form."""

import json
import random
import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.errors import InvalidRequest
from pdkv.grammar.library import load_xgrammar
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.matcher import Matcher
from pdkv.grammar.patterns import CHARACTER
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import WORD_BITS, Vocabulary

_MAX_WORDS = 500
_SOURCE = re.compile(r"(\[[\d:]+\] )?\S+\.(cc|h):\d+: |Check failed: \(.*?\) is false: ")

_CHARACTER_IN_JSON = json.dumps(CHARACTER)[1:-1]

_CLASS = r"[^\"\\\0-\x1f]"
"""`CHARACTER` in EBNF as the library prints it."""

_LENGTH = re.compile(
    r'^(?P<name>\S+) ::= Regex\("\^\(?' + re.escape(_CHARACTER_IN_JSON) + r"\{(?P<counts>\d+(,\d*)?)\}\)?"
    r'\$", json_string=true\)$',
    re.MULTILINE,
)
"""A rule for strings of some length, as the library prints it."""

_TRIAL_TOKENS, _TRIAL_S = 64, 0.3
"""Tokens of an answer that a grammar is tried out with, and what they may take together: the engine waits for it."""

_TOKEN_OR_NUL = re.compile(r'"token": ?"|tokens": ?\["|\\u0000')
"""In a structural tag: a token by its text, which takes the vocabulary to read, or a NUL, which EBNF cannot say."""

_MAX_WARM = 128
"""Longest string whose masks are made ahead. The library writes out no longer repetitions."""


class Compiler:
    """Compiles one grammar after the other, without bounds on time and memory: see `compile_process.py` for those.

    Strings with a length take a mask for each character that they may have, 25 ms each with 128k tokens. As EBNF they
    are a chain of rules, and the shorter one is the end of the longer: its masks are made once, by `warm_up`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        xgr = load_xgrammar()
        self.vocabulary = vocabulary
        self._compiler = xgr.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
        self._of_lengths = xgr.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=True)
        self._num_warm = 0

    def warm_up(self) -> bool:
        """Make one more mask of strings with a length ahead. Returns whether there is more to do."""
        self._num_warm += 1
        self._of_lengths.compile_grammar(
            f'root ::= "\\"" character{{0, {self._num_warm}}} "\\""\ncharacter ::= {_CLASS}'
        )
        return self._num_warm < _MAX_WARM

    def compile(self, grammar: Grammar) -> Any:
        """An `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequest: the grammar is wrong; in the library's words, which name the place where it knows it.
        """
        try:
            compiled = self._compile(grammar)
            self._try_out(compiled)
            return compiled
        except (RuntimeError, ValueError, TypeError) as error:  # the library raises nothing more exact
            raise InvalidRequest(
                f"the {grammar.kind} is refused: {_words(error)}", param="structured_outputs"
            ) from None

    def _try_out(self, compiled: Any) -> None:
        """Refuse what no text fulfils, and what takes too long to match, as far as one short answer shows it.

        Raises:
            ValueError: it is to be refused.
        """
        time = MatchTime(is_exact=True)
        matcher = Matcher(load_xgrammar().GrammarMatcher(compiled), self.vocabulary, allows_special=True, time=time)
        mask = torch.empty((1, self.vocabulary.num_words), dtype=torch.int32)
        rng = random.Random(0)
        for i in range(_TRIAL_TOKENS):
            matcher.fill(mask, 0)
            token = _any_token(mask[0].numpy(), rng)
            if token is None and i == 0:
                raise ValueError("no text of the model's tokens fulfils it")
            if token is None or not matcher.accept(token) or matcher.has_ended:
                return
            if time.total_s > _TRIAL_S:
                raise ValueError(f"matching it takes {time.total_s / (i + 1) * 1e3:.0f} ms a token")

    def _compile(self, grammar: Grammar) -> Any:
        if _CHARACTER_IN_JSON in grammar.text and (ebnf := _with_lengths(grammar)) is not None:
            return self._of_lengths.compile_grammar(ebnf)
        match grammar.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(grammar.text, any_whitespace=False)
            case "regex":
                return self._compiler.compile_regex(grammar.text)
            case "ebnf":
                return self._compiler.compile_grammar(grammar.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(grammar.text)


def _any_token(mask: NDArray[np.int32], rng: random.Random) -> int | None:
    """One of the tokens that a mask (num_words,) allows; None: it allows none."""
    [words] = mask.nonzero()
    if not len(words):
        return None
    index = int(rng.choice(words))
    return index * WORD_BITS + rng.choice([bit for bit in range(WORD_BITS) if int(mask[index]) >> bit & 1])


def _with_lengths(grammar: Grammar) -> str | None:
    """EBNF in which strings with a length are repeated characters; None: the library would read it in another way."""
    of = load_xgrammar().Grammar
    if grammar.kind == "json_schema":
        text = str(of.from_json_schema(grammar.text, any_whitespace=False))
    elif grammar.kind == "structural_tag" and not _TOKEN_OR_NUL.search(grammar.text):
        text = str(of.from_structural_tag(grammar.text))
    else:
        return None
    if not _LENGTH.search(text) or str(of.from_ebnf(text)) != text:
        return None
    return _LENGTH.sub(r"\g<name> ::= length_character{\g<counts>}", text) + f"\nlength_character ::= {_CLASS}\n"


def _words(error: Exception) -> str:
    """What the library says, without the lines of its source that say it."""
    return _SOURCE.sub("", str(error)).strip()[:_MAX_WORDS]
