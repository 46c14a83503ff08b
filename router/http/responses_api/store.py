"""Stores responses in memory for a while, per API key, so that a client can continue from one by its id."""

import math
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from pdkv.base.clock import MONOTONIC
from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest

_ENTRY_BYTES = 512
"""Bytes of an entry besides its items."""


@dataclass(slots=True)
class _Entry:
    previous: str | None
    items: bytes  # its items beyond those of `previous`: a JSON list without its brackets
    until: float

    @property
    def size(self) -> int:
        return len(self.items) + _ENTRY_BYTES


class ResponseStore:
    """The stored responses. Responses that do not fit or are too old are dropped, starting with the oldest response of
    the owner that has most. Any thread.
    """

    def __init__(
        self, max_bytes: int, keep_s: float, max_conversation_bytes: int, clock: Callable[[], float] = MONOTONIC.now
    ) -> None:
        """`keep_s`: 0 keeps none. `max_conversation_bytes`: limit on the JSON of the conversation that a response
        continues.
        """
        self.keep_s = keep_s
        self._max_bytes = max_bytes
        self._max_conversation_bytes = max_conversation_bytes
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # by owner and id, in order of their ends
        self._running: dict[tuple[str, int], _Entry] = {}  # what requests add whose responses are to come
        self._serials = count()
        self._sizes: Counter[str] = Counter()  # by owner, of both
        self._lock = threading.RLock()  # a request may be dropped while its own thread is in here

    @property
    def held(self) -> int:
        """Bytes of all responses, and of what running requests add."""
        return sum(self._sizes.values())

    def put(self, owner: str, response_id: str, previous: str | None, items: bytes) -> None:
        """Store the items that a response and its request add to the `previous` one."""
        entry = _Entry(previous, items, self._clock() + self.keep_s)
        with self._lock:
            self._entries[owner, response_id] = entry
            self._sizes[owner] += entry.size
            self._forget()

    def begin(self, owner: str, previous: str | None, items: bytes) -> Callable[[str, bytes], None]:
        """Hold the items of a request whose response is to come. Returns what stores that, by its id and output, unless
        the items had to make room; they go with the last reference to it.
        """
        key = owner, next(self._serials)
        entry = _Entry(previous, items, math.inf)
        with self._lock:
            self._running[key] = entry
            self._sizes[owner] += entry.size
            self._forget()
        keep = partial(self._end, key)
        weakref.finalize(keep, self._leave, key).atexit = False
        return keep

    def _end(self, key: tuple[str, int], response_id: str, output: bytes) -> None:
        if (entry := self._leave(key)) is not None:
            self.put(key[0], response_id, entry.previous, b",".join(filter(None, [entry.items, output])))

    def _leave(self, key: tuple[str, int]) -> _Entry | None:
        with self._lock:
            if (entry := self._running.pop(key, None)) is not None:
                self._sizes[key[0]] -= entry.size
            return entry

    def conversation(self, owner: str, response_id: str) -> list[bytes]:
        """All items up to a response's end, of each response as a JSON list without its brackets; their time to live
        starts over.

        Raises:
            InvalidRequest: the owner has no such response, or no longer has it, or the conversation is too long.
        """
        with self._lock:
            self._forget()
            found: list[tuple[str, _Entry]] = []
            size, name = 0, response_id
            while name:
                entry = self._entries.get((owner, name))
                if entry is None:
                    raise InvalidRequest(
                        f"previous_response_id: this API key has no response {clip(response_id)!r}, or no longer has "
                        "it: send the whole conversation as input",
                        param="previous_response_id",
                        code="previous_response_not_found",
                    )
                found.append((name, entry))
                size += len(entry.items)
                if size > self._max_conversation_bytes:
                    raise InvalidRequest(
                        f"previous_response_id: its conversation has more than {self._max_conversation_bytes} bytes "
                        "(--max-body-bytes): begin a new one with a summary",
                        param="previous_response_id",
                    )
                name = entry.previous or ""
            until = self._clock() + self.keep_s
            for name, entry in reversed(found):
                entry.until = until
                self._entries.move_to_end((owner, name))
        return [entry.items for _, entry in reversed(found) if entry.items]

    def _forget(self) -> None:
        now = self._clock()
        while (oldest := next(iter(self._entries), None)) and self._entries[oldest].until <= now:
            self._drop(oldest)
        while self.held > self._max_bytes:
            [(owner, _)] = self._sizes.most_common(1)
            if (oldest := next((key for key in self._entries if key[0] == owner), None)) is not None:
                self._drop(oldest)
            else:
                self._leave(next(key for key in self._running if key[0] == owner))

    def _drop(self, key: tuple[str, str]) -> None:
        self._sizes[key[0]] -= self._entries.pop(key).size
