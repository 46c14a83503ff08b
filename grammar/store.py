"""Grammars that an engine's requests wait for: each is compiled once, elsewhere, and kept for the next one."""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from pdkv.errors import PdkvError, ServerBusy
from pdkv.grammar.compiled import CompiledGrammar, serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.options import GrammarOptions
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class GrammarTicket:
    """One request's wait for its grammar."""

    def __init__(self, outcome: "_Outcome") -> None:
        self._outcome = outcome

    @property
    def done(self) -> bool:
        """Whether `result` has something to say."""
        return self._outcome.value is not None

    def result(self) -> CompiledGrammar:
        """The grammar; to be asked once `done`.

        Raises:
            InvalidRequest: the grammar is wrong, or takes more time or memory than a grammar may.
            ServerBusy: too many grammars wait, or the store was closed.
        """
        value = self._outcome.value
        assert value is not None, "the grammar is not there yet"
        if isinstance(value, PdkvError):
            raise value.anew()
        return value

    def close(self) -> None:
        """Nobody waits any more. May be called at any time, and again."""


class _Outcome:
    """What tickets for one grammar share."""

    def __init__(self) -> None:
        self.value: CompiledGrammar | PdkvError | None = None


class GrammarStore:
    """Compiled grammars of one vocabulary by (kind, text). Thread-safe; nothing is loaded before the first `ask`."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        options: GrammarOptions,
        notify: Callable[[], None],
    ) -> None:
        """`notify` is called from another thread whenever tickets became done."""
        self._load = lambda: Vocabulary.load(model_dir, vocab_size, stop_token_ids)
        self._options = options
        self._notify = notify
        self._outcomes: OrderedDict[Grammar, _Outcome] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(self, grammar: Grammar) -> GrammarTicket:
        """A ticket for it, which is done at once where the grammar is known. Never blocks."""
        with self._lock:
            outcome = self._outcomes.get(grammar)
            if outcome is None:
                outcome = self._outcomes[grammar] = _Outcome()
                if self._is_closed:
                    outcome.value = ServerBusy("the engine is about to stop")
                else:
                    self._begin(grammar)
            return GrammarTicket(outcome)

    def _begin(self, grammar: Grammar) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._waiting.put(grammar)

    def _run(self) -> None:
        try:
            vocabulary = self._load()
            compiler = Compiler(vocabulary)
        except PdkvError as error:
            while (grammar := self._waiting.get()) is not None:
                self._settle(grammar, error)
            return
        while (grammar := self._waiting.get()) is not None:
            try:
                data = serialize(compiler.compile(grammar), grammar)
                self._settle(grammar, CompiledGrammar.from_bytes(data, vocabulary))
            except PdkvError as error:
                self._settle(grammar, error)

    def _settle(self, grammar: Grammar, value: CompiledGrammar | PdkvError) -> None:
        with self._lock:
            self._outcomes[grammar].value = value
        self._notify()

    def close(self) -> None:
        """Tickets that are not done yet get an error."""
        with self._lock:
            self._is_closed = True
            for outcome in self._outcomes.values():
                if outcome.value is None:
                    outcome.value = ServerBusy("the engine is about to stop")
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
