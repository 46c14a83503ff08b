"""Compiled grammars as a rank that is not the first gets them: as bytes, once each, with the step that brings them."""

import threading
from collections.abc import Callable, Mapping

from pdkv.errors import PdkvError, RankTimeout
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.vocabulary import Vocabulary


class GrammarReader:
    """Makes grammars of bytes. The vocabulary that this takes is loaded on a thread, which `expect` starts: rank 0 says
    that grammars will come while it loads its own, and compiles the first one.

    Args:
        load: the vocabulary, the same as rank 0's.
        timeout_s: how long `read` waits for it.
    """

    def __init__(self, load: Callable[[], Vocabulary], timeout_s: float) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._loaded: Vocabulary | PdkvError | None = None

    def expect(self) -> None:
        """Grammars will come. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vocabulary", daemon=True)
            self._thread.start()

    def read(self, serialized: Mapping[int, bytes]) -> dict[int, CompiledGrammar]:
        """By number.

        Raises:
            ConfigError: there is no vocabulary here, as there is on rank 0.
            RankTimeout: it takes too long.
        """
        if not serialized:
            return {}
        self.expect()
        assert self._thread is not None
        self._thread.join(self._timeout_s)
        vocabulary = self._loaded
        if isinstance(vocabulary, PdkvError):
            raise vocabulary
        if vocabulary is None:
            raise RankTimeout(f"the vocabulary for grammars was not loaded within {self._timeout_s:g} s")
        return {number: CompiledGrammar.from_bytes(data, vocabulary) for number, data in serialized.items()}

    def _run(self) -> None:
        try:
            self._loaded = self._load()
        except PdkvError as error:
            self._loaded = error
        except Exception as error:
            self._loaded = PdkvError(f"the vocabulary for grammars cannot be loaded: {type(error).__name__}: {error}")
