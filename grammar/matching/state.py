"""The engine's records of its grammars, of the answers that follow them, and of the workers that have both."""

import socket
from collections.abc import Callable, Iterator

from pdkv.errors import PdkvError
from pdkv.grammar.matching.messages import Answer, Frames, Learn, Open, Order, Refused, Tell, decode_answer, frame
from pdkv.sampling.shape import Grammar
from pdkv.wire.types import RequestKey

MAX_IDLE, MAX_IDLE_CHARS = 64, 8 << 20
"""The most unused grammars, and their text, that a worker keeps ready."""

_CHUNK_BYTES = 1 << 20


class Known:
    """A grammar of one worker; to a request, its ticket."""

    def __init__(self, number: int, grammar: Grammar, worker: "WorkerState") -> None:
        self.number, self.grammar, self.worker = number, grammar, worker
        self.is_learned = False
        self.error: PdkvError | None = None  # why no request can have it
        self.num_users = 0  # requests
        self.num_lost = 0  # workers that ended while they were at it

    @property
    def done(self) -> bool:
        """Whether the outcome is known: there is an error, or answers may name the grammar by its number."""
        return self.is_learned or self.error is not None


class Row:
    """An answer, with everything needed to replay it."""

    def __init__(self, key: RequestKey, known: Known, first: int, token_ids: list[int], own_stops: list[int]) -> None:
        self.key, self.known, self.worker = key, known, known.worker
        self.token_ids, self.own_stops = token_ids, own_stops
        self.drafts: list[int] = []
        self.place = self.worker.free.pop()  # in the slab
        self.has_failed = False
        self._first = first

    @property
    def number(self) -> int:
        """The number of the masks that the answer needs, see `Open`."""
        return self._first + len(self.token_ids)

    def opening(self) -> Open:
        """The message that introduces the answer to its worker."""
        return Open(self.place, self._first, self.known.number, self.token_ids, self.drafts, self.own_stops)


class WorkerState:
    """A worker, or the place of one that does not exist now."""

    def __init__(self, index: int, num_rows: int, now: Callable[[], float]) -> None:
        self.index = index
        self._now = now
        self.num_tenants = 0
        self.sock: socket.socket | None = None  # None: it is not there
        self.is_deaf = False  # its end of the socket is closed: how it ended is still to be heard
        self.outbox = bytearray()
        self.known: dict[Grammar, Known] = {}  # what was asked for last is last
        self.rows: dict[int, Row] = {}  # by place in the slab
        self.free = list(range(index * num_rows, (index + 1) * num_rows))  # places
        self.num_awaited = 0  # answers
        self.waits_since = 0.0
        self.progress = (0, 0)  # when it was looked at last: calls of the library, and nanoseconds of processor time
        self.is_killed = False
        self.num_ends = 0  # since it said anything
        self._frames = Frames()

    @property
    def is_wanted(self) -> bool:
        """Whether the worker has something to do."""
        answers = any(not row.has_failed for row in self.rows.values())
        return answers or any(known.num_users for known in self.known.values())

    @property
    def waiting_chars(self) -> int:
        """Text of the grammars that are not ready."""
        return sum(len(known.grammar.text) for known in self.known.values() if not known.is_learned)

    def find(self, grammar: Grammar) -> Known | None:
        """A grammar that the worker has; it becomes the most recently requested one."""
        known = self.known.pop(grammar, None)
        if known is not None:
            self.known[grammar] = known
        return known

    def drop(self, known: Known) -> None:
        """Note that no other request can get this grammar."""
        if self.known.get(known.grammar) is known:
            del self.known[known.grammar]

    def retire(self, known: Known) -> list[Known]:
        """Note that no request has this grammar now. Returns the grammars to forget: the worker keeps the most recently
        requested ones.
        """
        if self.known.get(known.grammar) is not known:
            return [known]
        num_left, chars_left, gone = MAX_IDLE, MAX_IDLE_CHARS, list[Known]()
        for idle in [one for one in reversed(self.known.values()) if not one.num_users]:
            num_left, chars_left = num_left - 1, chars_left - len(idle.grammar.text)
            if min(num_left, chars_left) < 0 or not idle.is_learned:
                gone.append(self.known.pop(idle.grammar))
        return gone

    # --- the socket -----------------------------------------------------------------------------------------------

    def begin(self, sock: socket.socket) -> None:
        """Note that the worker exists: send it everything that it needs to know."""
        sock.setblocking(False)
        self.sock, self.is_deaf, self.is_killed = sock, False, False
        self._frames = Frames()
        self.progress = (-1, 0)
        for known in self.known.values():
            self.send(Learn(known.number, known.grammar), is_awaited=True)
        for row in self.rows.values():
            if not row.has_failed:
                self.send(row.opening())
        self.send(Tell(), is_awaited=True)

    def end(self) -> None:
        """Note that the worker is gone, and with it the grammars that no request has."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self.outbox.clear()
        self.num_awaited = 0
        self.num_ends += 1
        self.known = {grammar: known for grammar, known in self.known.items() if known.num_users}

    def send(self, message: Order, *, is_awaited: bool = False) -> None:
        """Send as much as there is room for; `flush` sends the rest."""
        if self.sock is None or self.is_deaf:
            return
        if is_awaited:
            if not self.num_awaited:
                self.waits_since = self._now()
            self.num_awaited += 1
        self.outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of the waiting data as there is room for."""
        if self.sock is None or self.is_deaf:
            return
        try:
            del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # its end is heard of elsewhere
            self.outbox.clear()

    def receive(self) -> Iterator[Answer]:
        """Receive the worker's messages."""
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
            self.waits_since, self.num_ends = self._now(), 0
            yield answer
