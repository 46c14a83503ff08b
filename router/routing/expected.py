"""The KV that engines are about to have: blocks of prompts given to them, until their own events report them."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from pdkv.base.block_keys import HASH_BLOCK_SIZE

EXPECTED_S = 5.0
"""Seconds for which an engine is expected to have, or to get, what it was given to compute."""

MAX_KEYS = 1 << 18
"""Keys that are expected at once, of 4 M tokens; beyond them, what was given longest ago is not expected any more."""


MAX_ENDS = 8
"""Prompts whose expectations are cleared away at once; others that are over wait, and count for nothing."""


class _Life:
    """An engine until its cache is emptied: what it was given before counts no more, and goes when its time is up."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class ExpectedKV:
    """Keys by engine, each until the engine's events name it or EXPECTED_S have passed.

    Without this, a prefix would be known nowhere between the choice of an engine and that engine's first event: prompts
    that share it are computed on several engines at once and evict others there, and misses and queues feed each other
    (benchmarks/policies.py).
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._ends: dict[bytes, dict[_Life, float]] = {}  # key -> engine -> time
        self._given: deque[tuple[float, _Life, Sequence[bytes]]] = deque()  # by time

    @property
    def num_keys(self) -> int:
        """Distinct keys that any engine is expected to have, or was expected to have until recently."""
        return len(self._ends)

    def add(self, engine: str, keys: Sequence[bytes], now: float) -> None:
        """Note that the engine was given a prompt, of which it lacks these keys."""
        if keys:
            life = self._lives.setdefault(engine, _Life(engine))
            self._given.append((now + EXPECTED_S, life, keys))
            for key in keys:
                self._ends.setdefault(key, {})[life] = now + EXPECTED_S
            while len(self._ends) > MAX_KEYS:
                self._end_oldest()

    def extend(self, engine: str, keys: Sequence[bytes], num_cached: int, now: float) -> int:
        """Tokens of the longest prefix of `keys` that the engine has or is expected to have, given what it has."""
        self._expire(now)
        ends, life, place = self._ends, self._lives.get(engine), num_cached // HASH_BLOCK_SIZE
        if life is None or not ends:
            return num_cached
        end = place
        while end < len(keys) and (known := ends.get(keys[end])) and known.get(life, now) > now:
            end += 1
        return end * HASH_BLOCK_SIZE if end > place else num_cached

    def engines(self, keys: Sequence[bytes], most: int) -> Iterable[str]:
        """Engines that are expected to have some of these keys: those with the last ones first, and then no others."""
        found: dict[_Life, float] = {}
        for key in reversed(keys) if self._ends else ():
            if key in self._ends:
                found |= self._ends[key]
                if len(found) >= most:
                    break
        return (life.name for life in islice(found, most))

    def forget(self, engine: str, keys: Sequence[bytes]) -> None:
        """The engine has said itself what became of these."""
        if self._ends and (life := self._lives.get(engine)) is not None:
            for key in keys:
                self._forget(life, key)

    def remove_engine(self, engine: str) -> None:
        """The engine is gone, or has nothing any more. Idempotent."""
        self._lives.pop(engine, None)

    def _expire(self, now: float) -> None:
        for _ in range(MAX_ENDS):
            if not self._given or self._given[0][0] > now:
                break
            self._end_oldest()

    def _end_oldest(self) -> None:
        end, life, keys = self._given.popleft()
        if not self._given:
            self._lives.clear()  # nothing is expected any more
        for key in keys:
            if self._ends.get(key, {}).get(life, end + 1) <= end:
                self._forget(life, key)

    def _forget(self, life: _Life, key: bytes) -> None:
        engines = self._ends.get(key)
        if engines is not None and engines.pop(life, None) is not None and not engines:
            del self._ends[key]
