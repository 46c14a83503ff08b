"""The terms on which values are kept: expiry, and the owner whose quota they count against. Stores that support them
follow them.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar


class Terms(NamedTuple):
    """The terms of one value."""

    expires_at: int = 0  # unix time in seconds from which on it no longer exists; 0: it does not expire
    owner: int = 0  # owner; 0: unknown
    quota: int | None = None  # bytes that the owner's values may use of a memory; None: no limit

    def are_over(self, now: float) -> bool:
        """Whether the value has expired."""
        return 0 < self.expires_at <= now


NO_TERMS = Terms()

K = TypeVar("K", bytes, tuple[int, int])

_SLACK = 64  # Expiry entries of values that are gone may exceed the number of values by this many.


class Ledger(Generic[K]):
    """Bytes of the values in a memory, by owner, and their expiry. The lock of the memory's owner guards it.

    Bytes are taken before a value is written and entered, so that two concurrent writes of one owner do not both get
    the last of its quota. They are given back when the value has left, or is not entered after all.
    """

    def __init__(self) -> None:
        self._terms: dict[K, Terms] = {}  # of the values that have some
        self._owned: dict[int, OrderedDict[K, None]] = {}  # by owner, least recently used first
        self._num_bytes: dict[int, int] = {}  # by owner
        self._quotas: dict[int, int] = {}  # by owner, as they were told last
        self._ends: list[tuple[int, K]] = []  # a heap; also of values that are gone

    def fits(self, terms: Terms, num_bytes: int) -> bool:
        """Whether the owner stays within its quota with this many more bytes."""
        return terms.quota is None or self._num_bytes.get(terms.owner, 0) + num_bytes <= terms.quota

    def take(self, terms: Terms, num_bytes: int) -> None:
        """Count bytes for the owner."""
        if not terms.owner:
            return
        self._num_bytes[terms.owner] = self._num_bytes.get(terms.owner, 0) + num_bytes
        if terms.quota is not None:
            self._quotas[terms.owner] = terms.quota

    def give_back(self, terms: Terms, num_bytes: int) -> None:
        """Give the owner's bytes back."""
        if not terms.owner:
            return
        self._num_bytes[terms.owner] -= num_bytes
        if not self._num_bytes[terms.owner]:
            del self._num_bytes[terms.owner]
            self._quotas.pop(terms.owner, None)

    def enter(self, key: K, terms: Terms) -> None:
        """Enter a value as its owner's most recently used one."""
        if terms.owner or terms.expires_at:
            self._terms[key] = terms
        if terms.owner:
            self._owned.setdefault(terms.owner, OrderedDict())[key] = None
        if terms.expires_at:
            heapq.heappush(self._ends, (terms.expires_at, key))

    def use(self, key: K) -> None:
        """Make a value its owner's most recently used one."""
        terms = self._terms.get(key)
        if terms is not None and terms.owner:
            self._owned[terms.owner].move_to_end(key)

    def leave(self, key: K) -> None:
        """Note that a value is gone; its bytes are not given back yet."""
        terms = self._terms.pop(key, None)
        if terms is None:
            return
        if terms.owner:
            del self._owned[terms.owner][key]
            if not self._owned[terms.owner]:
                del self._owned[terms.owner]
        if len(self._ends) > 2 * len(self._terms) + _SLACK:
            self._ends = [(terms.expires_at, key) for key, terms in self._terms.items() if terms.expires_at]
            heapq.heapify(self._ends)

    def terms_of(self, key: K) -> Terms:
        """The terms of an existing value."""
        return self._terms.get(key, NO_TERMS)

    def owned(self, owner: int) -> Mapping[K, None]:
        """An owner's values, least recently used first."""
        return self._owned.get(owner, {})

    def first_over(self, now: float) -> K | None:
        """An expired value; None: there is none."""
        while self._ends and self._ends[0][0] <= now:
            expires_at, key = self._ends[0]
            if self.terms_of(key).expires_at == expires_at:
                return key
            heapq.heappop(self._ends)
        return None

    def bytes_over(self, share: float) -> Mapping[int, int]:
        """For each owner, the bytes that would have to be evicted if its values used that share of its quota more."""
        over = {owner: self._num_bytes[owner] + int(quota * share) - quota for owner, quota in self._quotas.items()}
        return {owner: num_bytes for owner, num_bytes in over.items() if num_bytes > 0}

    def count(self) -> dict[int, int]:
        """Bytes by owner. A copy, for which no lock is needed."""
        return dict(self._num_bytes)
