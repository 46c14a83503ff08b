"""From a grammar's text to the library's compiled form."""

import re
from typing import Any

from pdkv.errors import InvalidRequest
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary, load_xgrammar

_WHERE_IN_SOURCE = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|h):\d+: ")
_MAX_WORDS = 500
_CHECK = re.compile(r"^Check failed: .*? is false: ")


class Compiler:
    """Compiles one grammar after the other, without bounds on time and memory: see `compile_process.py` for those."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = load_xgrammar().GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Any:
        """An `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequest: the grammar is wrong; in the library's words, which name the place where it knows it.
        """
        try:
            return self._compile(grammar)
        except (RuntimeError, ValueError, TypeError) as error:  # the library raises nothing more exact
            raise InvalidRequest(
                f"the {grammar.kind} is refused: {_words(error)}", param="structured_outputs"
            ) from None

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
    """What the library says, without the line of its source that says it."""
    text = _WHERE_IN_SOURCE.sub("", str(error).strip())
    return _CHECK.sub("", text)[:_MAX_WORDS]
