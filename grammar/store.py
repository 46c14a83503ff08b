"""Grammars that an engine's requests wait for: each is compiled once, elsewhere, and kept for the next one."""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pdkv.errors import ConfigError, InvalidRequest, PdkvError, ServerBusy, StartupError
from pdkv.grammar.compile_host import CompileHost, Ended
from pdkv.grammar.compile_process import Job
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.library import load_xgrammar
from pdkv.grammar.options import GrammarOptions
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary
from pdkv.grammar.waiting import Lane, WaitingGrammars, Wanted

FIRST_SLICE_S = 1.0
"""Time of a processor that each grammar is given in the fast lane."""

_REMEMBER_S = 60.0
"""How long a grammar that was too slow, or took too much memory, is refused without another try."""

_LOAD_TIMEOUT_S = 120.0
"""For the library and the vocabulary in this process, on a machine that is busy."""

_JOIN_TIMEOUT_S = 5.0

_CLOSED = "the engine is about to stop"

logger = logging.getLogger(__name__)


class GrammarTicket:
    """One request's wait for its grammar."""

    def __init__(self, wanted: Wanted, closed: Callable[[Wanted], None]) -> None:
        self._wanted = wanted
        self._on_close: Callable[[Wanted], None] | None = closed

    @property
    def done(self) -> bool:
        """Whether `result` has something to say."""
        return self._wanted.value is not None

    def result(self) -> CompiledGrammar:
        """The grammar; to be asked once `done`.

        Raises:
            InvalidRequest: the grammar is wrong, or takes more time or memory than a grammar may.
            ServerBusy: too many grammars wait, they cannot be compiled now, or the store was closed.
        """
        value = self._wanted.value
        assert value is not None, "the grammar is not there yet"
        if isinstance(value, PdkvError):
            raise value.anew()
        return value

    def close(self) -> None:
        """Nobody waits any more. May be called at any time, and again."""
        if self._on_close is not None:
            self._on_close(self._wanted)
            self._on_close = None


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
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._host = CompileHost(model_dir, vocab_size, stop_token_ids, options.compile_memory_bytes)
        self._options = options
        self._notify = notify
        self._changed = threading.Condition()
        self._known: OrderedDict[Grammar, Wanted] = OrderedDict()  # the one used last is at the end
        self._known_bytes = 0
        self._pending: dict[Grammar, Wanted] = {}
        self._waiting = WaitingGrammars(options.max_waiting, options.max_waiting_bytes)
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def ask(self, grammar: Grammar) -> GrammarTicket:
        """A ticket for it, which is done at once where the grammar is known. Never blocks."""
        with self._changed:
            wanted = self._find(grammar)
            if wanted is None:
                wanted = Wanted(grammar)
                try:
                    self._begin(wanted)
                except ServerBusy as error:
                    wanted.value = error
            wanted.num_waiting += 1
            return GrammarTicket(wanted, self._leave)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        with self._changed:
            return self._known_bytes

    def _find(self, grammar: Grammar) -> Wanted | None:
        known = self._known.get(grammar)
        if known is None:
            return self._pending.get(grammar)
        if known.forget_at < time.monotonic():
            self._forget(known)
            return None
        self._known.move_to_end(grammar)
        return known

    def _forget(self, wanted: Wanted) -> None:
        del self._known[wanted.grammar]
        self._known_bytes -= wanted.num_bytes

    def _begin(self, wanted: Wanted) -> None:
        if self._is_closed:
            raise ServerBusy(_CLOSED)
        self._start_threads()
        self._waiting.put(wanted, Lane.FAST)
        self._pending[wanted.grammar] = wanted
        self._changed.notify_all()

    def _start_threads(self) -> None:
        """Those that do not run yet. Raises ServerBusy where the system has no more."""
        work: list[Callable[[], None]] = [*(partial(self._run, lane) for lane in Lane), self._load_ahead]
        for target in work[len(self._threads) :]:
            thread = threading.Thread(target=target, name=f"grammars-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ServerBusy(f"no thread can be started to compile grammars: {error}") from None
            self._threads.append(thread)

    def _load_ahead(self) -> None:
        """The library and the vocabulary, while the process does the same."""
        try:
            self._load_vocabulary()
        except PdkvError as error:  # the lanes try again, and tell it
            logger.debug("the vocabulary is not there yet: %s", error)

    def _load_vocabulary(self) -> Vocabulary:
        """From the process, which has it: reading a tokenizer here would stop all other threads.

        Raises:
            ConfigError: there is none.
            StartupError: the process did not start, or went away.
        """
        with self._loading:
            if self._vocabulary is None:
                load_xgrammar()
                data = self._host.run(Job(None, cpu_s=_LOAD_TIMEOUT_S, wall_s=_LOAD_TIMEOUT_S))
                if isinstance(data, Ended):
                    raise StartupError(f"the vocabulary could not be loaded: {data.reason} {data.detail}")
                self._vocabulary = Vocabulary.from_bytes(data)
            return self._vocabulary

    def _leave(self, wanted: Wanted) -> None:
        with self._changed:
            wanted.num_waiting -= 1

    def _run(self, lane: Lane) -> None:
        """Compile one grammar of a lane after the other until the store is closed."""
        while (wanted := self._next(lane)) is not None:
            try:
                outcome = self._compile(wanted.grammar, lane)
                if outcome is None:
                    self._slow_down(wanted)
                else:
                    self._settle(wanted, *outcome)
            except Exception:  # whatever it is, tickets must be settled, and the next grammar is another one
                logger.exception("a grammar could not be compiled")
                self._settle(wanted, ServerBusy("the grammar could not be compiled: see the engine's log"), 0.0)

    def _next(self, lane: Lane) -> Wanted | None:
        """The lane's next grammar that somebody waits for; None once the store is closed."""
        with self._changed:
            while not self._is_closed:
                wanted = self._waiting.pop(lane)
                if wanted is None:
                    self._changed.wait()
                elif wanted.num_waiting > 0:
                    return wanted
                else:
                    del self._pending[wanted.grammar]
            return None

    def _compile(self, grammar: Grammar, lane: Lane) -> "_Outcome | None":
        """What became of it; None: it took more than the fast lane gives."""
        limit_s = self._options.compile_timeout_s
        job = Job(grammar, cpu_s=min(FIRST_SLICE_S, limit_s) if lane is Lane.FAST else limit_s, wall_s=limit_s)
        try:
            result = self._host.run(job)
            if isinstance(result, Ended) and result.reason == "lost":
                result = self._host.run(job)
            if isinstance(result, bytes):
                return _Outcome(CompiledGrammar.from_bytes(result, self._load_vocabulary()))
        except InvalidRequest as error:
            return _Outcome(error)
        except ConfigError as error:
            refusal = f"this server cannot enforce grammars: {error}"
            return _Outcome(InvalidRequest(refusal, param="structured_outputs"), _REMEMBER_S)
        except StartupError as error:
            return _Outcome(ServerBusy(str(error)), 0.0)
        if result.reason == "time" and lane is Lane.FAST:
            return None
        return self._gave_up(result)

    def _gave_up(self, ended: Ended) -> "_Outcome":
        match ended.reason:
            case "time":
                why = f"takes more than {self._options.compile_timeout_s:g} s to compile (--grammar-compile-timeout-s)"
            case "memory":
                why = f"takes more than {self._options.compile_memory_bytes >> 20} MiB to compile"
            case "crash":
                why = f"cannot be compiled: the library that does ended with {ended.detail}"
            case "lost":
                return _Outcome(ServerBusy(f"the grammar could not be compiled: {ended.detail}"), 0.0)
        return _Outcome(InvalidRequest(f"the grammar {why}", param="structured_outputs"), _REMEMBER_S)

    def _slow_down(self, wanted: Wanted) -> None:
        with self._changed:
            try:
                self._waiting.put(wanted, Lane.SLOW)
                self._changed.notify_all()
                return
            except ServerBusy as error:
                busy = error
        self._settle(wanted, busy, 0.0)

    def _settle(self, wanted: Wanted, value: CompiledGrammar | PdkvError, remember_s: float) -> None:
        """Every ticket for it is done now."""
        with self._changed:
            if self._pending.pop(wanted.grammar, None) is None:
                return  # the store was closed meanwhile
            wanted.value = value
            if remember_s > 0:
                wanted.forget_at = time.monotonic() + remember_s
                self._keep(wanted)
        self._notify()

    def _keep(self, wanted: Wanted) -> None:
        self._known[wanted.grammar] = wanted
        self._known_bytes += wanted.num_bytes
        while self._known_bytes > self._options.cache_bytes:  # those in use live on in their matchers
            self._forget(next(iter(self._known.values())))

    def close(self) -> None:
        """End threads and processes; tickets that are not done yet get an error."""
        with self._changed:
            self._is_closed = True
            for wanted in self._pending.values():
                wanted.value = ServerBusy(_CLOSED)
            self._pending.clear()
            self._changed.notify_all()
        self._host.close()
        for thread in self._threads:
            thread.join(timeout=_JOIN_TIMEOUT_S)
        self._notify()


class _Outcome(NamedTuple):
    """What became of a grammar."""

    value: CompiledGrammar | PdkvError
    remember_s: float = math.inf
