"""From a grammar's text to the library's compiled form."""

import re
from typing import Any

from pdkv.errors import InvalidRequest
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary, load_xgrammar

_MAX_WORDS = 500
_SOURCE = re.compile(r"(\[[\d:]+\] )?\S+\.(cc|h):\d+: |Check failed: \(.*?\) is false: ")


class Compiler:
    """Compiles one grammar after the other, without bounds on time and memory: see `compile_process.py` for those."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = load_xgrammar().GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Any:
        """An `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequest: the grammar is wrong; in the library's words, which name the place where it knows it.
        """
        try:
            compiled = self._compile(grammar)
            self._check_begins(compiled)
            return compiled
        except (RuntimeError, ValueError, TypeError) as error:  # the library raises nothing more exact
            raise InvalidRequest(
                f"the {grammar.kind} is refused: {_words(error)}", param="structured_outputs"
            ) from None

    def _check_begins(self, compiled: Any) -> None:
        """Refuse what no text fulfils, where that shows at its first token. Raises ValueError."""
        xgr = load_xgrammar()
        mask = xgr.allocate_token_bitmask(1, self._vocabulary.size)
        xgr.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        if not (mask[0] & self._vocabulary.all).any():
            raise ValueError("no text of the model's tokens fulfils it")

    def _compile(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(grammar.text, any_whitespace=False)
            case "regex":
                return self._compiler.compile_regex(grammar.text)
            case "ebnf":
                return self._compiler.compile_grammar(grammar.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(grammar.text)


def _words(error: Exception) -> str:
    """What the library says, without the lines of its source that say it."""
    return _SOURCE.sub("", str(error)).strip()[:_MAX_WORDS]
