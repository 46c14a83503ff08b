"""What the engine knows of its grammars, of the answers that follow them, and of the workers that have both."""

import socket
import time
from collections import OrderedDict
from collections.abc import Iterator

from pdkv.errors import PdkvError
from pdkv.grammar.spec import Grammar
from pdkv.grammar.worker_messages import Answer, Frames, Learn, Open, Order, Refused, Tell, decode_answer, frame
from pdkv.wire.messages import RequestKey

MAX_IDLE = 64
"""Grammars that a worker keeps ready though no request has them."""

MAX_IDLE_CHARS = 8 << 20
"""Text of them."""

_CHUNK_BYTES = 1 << 20


class Known:
    """A grammar of one worker."""

    def __init__(self, number: int, grammar: Grammar, worker: "WorkerState") -> None:
        self.number, self.grammar, self.worker = number, grammar, worker
        self.is_learned = False
        self.error: PdkvError | None = None  # why nobody can have it
        self.num_users = 0  # requests
        self.num_lost = 0  # workers that ended while they were at it

    @property
    def is_ready(self) -> bool:
        """Whether it is known what becomes of it."""
        return self.is_learned or self.error is not None


class Row:
    """An answer, with all that it takes to replay it."""

    def __init__(self, key: RequestKey, known: Known, token_ids: list[int], own_stops: list[int]) -> None:
        self.key, self.known, self.worker = key, known, known.worker
        self.token_ids, self.own_stops = token_ids, own_stops
        self.drafts: list[int] = []
        self.index = -1  # in the slab
        self.has_failed = False

    @property
    def number(self) -> int:
        """Of the masks that it needs, see `Slab`."""
        return len(self.token_ids) + 1

    def opening(self) -> Open:
        """How its worker gets to know it."""
        return Open(self.index, self.known.number, self.token_ids, self.drafts, self.own_stops)


class WorkerState:
    """A worker, or the place of one that is not there now."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tenants = 0
        self.sock: socket.socket | None = None  # None: it is not there
        self.is_deaf = False  # its end of the socket is closed: how it ended is still to be heard
        self.outbox = bytearray()
        self.known: dict[Grammar, Known] = {}
        self.idle: OrderedDict[Grammar, Known] = OrderedDict()  # of those, without users; the longest so first
        self.rows: dict[int, Row] = {}  # by place in the slab
        self.closing: set[int] = set()  # places that it may still write to
        self.num_awaited = 0  # answers
        self.waits_since = 0.0
        self.num_calls = 0  # of the library, when it was looked at last
        self.is_killed = False
        self.num_ends = 0  # since it said anything
        self.patience_s = 0.0  # see PATIENCE_S
        self.seen_at = float("-inf")
        self._frames = Frames()

    @property
    def is_wanted(self) -> bool:
        """Whether it has something to do."""
        return any(not row.has_failed for row in self.rows.values()) or any(
            known.num_users for known in self.known.values()
        )

    @property
    def waiting_chars(self) -> int:
        """Text of the grammars that are not ready."""
        return sum(len(known.grammar.text) for known in self.known.values() if not known.is_learned)

    # --- grammars -------------------------------------------------------------------------------------------------

    def find(self, grammar: Grammar) -> Known | None:
        """One that it has, which is in use from now on."""
        self.idle.pop(grammar, None)
        return self.known.get(grammar)

    def retire(self, known: Known) -> list[Known]:
        """No request has it now. Returns those that it shall forget."""
        grammar = known.grammar
        if self.known.get(grammar) is not known:
            return [known]
        if not known.is_learned:
            del self.known[grammar]
            return [known]
        self.idle[grammar] = known
        num_chars = sum(len(one.text) for one in self.idle)
        gone = list[Known]()
        while len(self.idle) > MAX_IDLE or num_chars > MAX_IDLE_CHARS:
            oldest, dropped = self.idle.popitem(last=False)
            num_chars -= len(oldest.text)
            del self.known[oldest]
            gone.append(dropped)
        return gone

    def drop(self, known: Known) -> None:
        """Nobody can have it any more."""
        if self.known.get(known.grammar) is known:
            del self.known[known.grammar]
        self.idle.pop(known.grammar, None)

    # --- answers --------------------------------------------------------------------------------------------------

    def end_row(self, index: int) -> bool:
        """An answer is over. Returns whether the worker may still write to its place, and has to be told."""
        del self.rows[index]
        if self.sock is None or self.is_deaf:
            return False
        self.closing.add(index)
        return True

    # --- the socket -----------------------------------------------------------------------------------------------

    def begin(self, sock: socket.socket) -> None:
        """It is there: tell it what it has to know."""
        sock.setblocking(False)
        self.sock, self.is_deaf, self.is_killed = sock, False, False
        self._frames = Frames()
        self.num_calls = -1
        for known in self.known.values():
            self.send(Learn(known.number, known.grammar), is_awaited=True)
        for row in self.rows.values():
            if not row.has_failed:
                self.send(row.opening())
        self.send(Tell(), is_awaited=True)

    def end(self) -> list[Known]:
        """It is gone. Returns the grammars that nobody needs in the next one."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self.outbox.clear()
        self.num_awaited = 0
        self.num_ends += 1
        gone = list(self.idle.values())
        for known in gone:
            self.drop(known)
        return gone

    def send(self, message: Order, *, is_awaited: bool = False) -> None:
        """As far as there is room; the rest with `flush`."""
        if self.sock is None or self.is_deaf:
            return
        if is_awaited:
            if not self.num_awaited:
                self.waits_since = time.monotonic()
            self.num_awaited += 1
        self.outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        if self.sock is None or self.is_deaf:
            return
        try:
            del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # its end is heard of elsewhere
            self.outbox.clear()

    def receive(self) -> Iterator[Answer]:
        """What it says."""
        assert self.sock is not None
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_deaf = True
            return
        for message in self._frames.add(data):
            answer = decode_answer(message)
            self.num_awaited -= not isinstance(answer, Refused)
            self.waits_since, self.num_ends = time.monotonic(), 0
            yield answer
