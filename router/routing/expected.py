"""What engines are about to have: blocks of prompts that they were given, before their own events speak of these."""

from collections import deque
from collections.abc import Mapping, Sequence

from pdkv.base.block_keys import HASH_BLOCK_SIZE

EXPECTED_S = 5.0
"""Seconds for which an engine is expected to have, or to get, what it was given to compute."""

MAX_KEYS = 1 << 18
"""Keys that are expected at once, of 4 M tokens; beyond them, what was given longest ago is not expected any more."""


class ExpectedKV:
    """Keys by engine, each until the engine's events name it or EXPECTED_S have passed.

    Without it, a prefix is nowhere between the choice of an engine and that engine's first event: prompts that share
    it are computed on several engines at once and evict others there, and misses and queues feed each other
    (benchmarks/policies.py).
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, dict[str, float]] = {}  # key -> engine -> time
        self._given: deque[tuple[float, str, Sequence[bytes]]] = deque()  # by time

    @property
    def num_keys(self) -> int:
        """Distinct keys that any engine is expected to have."""
        return len(self._ends)

    def add(self, engine: str, keys: Sequence[bytes], now: float) -> None:
        """The engine was given a prompt, and these keys of it are missing there."""
        if keys:
            self._given.append((now + EXPECTED_S, engine, keys))
            for key in keys:
                self._ends.setdefault(key, {})[engine] = now + EXPECTED_S
            while len(self._ends) > MAX_KEYS:
                self._end_oldest()

    def extend(self, keys: Sequence[bytes], cached: Mapping[str, int], now: float) -> Mapping[str, int]:
        """Tokens of the longest prefix of `keys` that each engine has or is expected to have, given what it has."""
        self._expire(now)
        if not self._ends or not keys:
            return cached
        found = dict(cached)
        for engine in cached.keys() | self._ends.get(keys[0], {}).keys():
            end = begin = cached.get(engine, 0) // HASH_BLOCK_SIZE
            while end < len(keys) and engine in self._ends.get(keys[end], ()):
                end += 1
            if end > begin:
                found[engine] = end * HASH_BLOCK_SIZE
        return found

    def forget(self, engine: str, keys: Sequence[bytes]) -> None:
        """The engine has said itself what became of these."""
        if self._ends:
            for key in keys:
                self._forget(engine, key)

    def remove_engine(self, engine: str) -> None:
        """The engine is gone. Idempotent."""
        for _, name, keys in self._given:
            if name == engine:
                for key in keys:
                    self._forget(engine, key)

    def _expire(self, now: float) -> None:
        while self._given and self._given[0][0] <= now:
            self._end_oldest()

    def _end_oldest(self) -> None:
        end, engine, keys = self._given.popleft()
        for key in keys:
            if self._ends.get(key, {}).get(engine, end + 1) <= end:
                self._forget(engine, key)

    def _forget(self, engine: str, key: bytes) -> None:
        engines = self._ends.get(key)
        if engines is not None and engines.pop(engine, None) is not None and not engines:
            del self._ends[key]
