"""Values on their way to a store and back: sealed before they go, verified before anybody uses them."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pdkv.connectors.store.envelope import Sealer
from pdkv.connectors.store.pieces import Slot
from pdkv.errors import KVCorrupted, StoreError
from pdkv.kv_store.base import KVStore
from pdkv.log_limit import LogLimit

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""The shortest time between two log lines about damaged values."""


State = Literal["whole", "damaged", "absent"]


class Reading(NamedTuple):
    """What became of some slots."""

    missing: list[Slot]  # not in the store, or not what was saved
    num_damaged: int  # values that were not what was saved


class SealedValues:
    """A store's values, none of which is believed. Threads may share it; `store` is for calls that read no value."""

    def __init__(self, store: KVStore, sealer: Sealer) -> None:
        self.store = store
        self._sealer = sealer
        self._lock = threading.Lock()  # guards what follows
        self._num_seen = 0  # of what the store itself has found damaged
        self._num_untold = 0
        self._log_limit = LogLimit(QUIET_S)

    def put(self, slots: Sequence[Slot]) -> None:
        """Store values whose bodies are in their slots. Raises what the store raises."""
        for slot in slots:
            self._sealer.seal(slot.key, slot.view)
        self.store.put([(slot.key, slot.view) for slot in slots])

    def get(self, slots: Sequence[Slot], use: Callable[[Slot], None], part: KVStore | None = None) -> Reading:
        """Read values into their slots and call `use` for each one that is whole, which may raise KVCorrupted.

        What is there and is not whole is looked at once more, since somebody may be replacing it; then it is deleted,
        so that the next save can put a sound value in its place.

        Args:
            part: of the store, which alone is read, and loses what is damaged; None: all of them.

        Raises:
            StoreError: the store does not answer.
        """
        store = self.store if part is None else part
        damaged: list[Slot] = []
        absent: list[Slot] = []
        for slot, state in zip(slots, self._read(slots, store), strict=True):
            if state != "whole" or not _is_used(slot, use):
                (absent if state == "absent" else damaged).append(slot)
        if not damaged and not absent:
            return Reading([], 0)
        missing, num_misfits = self._look_again(damaged, absent, use, store)
        num_damaged = len(damaged) + num_misfits + self._num_found_by_store()
        self._tell(num_damaged)
        return Reading(missing, num_damaged)

    def _read(self, slots: Sequence[Slot], store: KVStore) -> list[State]:
        """Read values into their slots, and check them as they come in, while their bytes are in the cache."""
        checks = [self._sealer.check(slot.key, slot.view) for slot in slots]
        found = store.read(
            [slot.key for slot in slots],
            [slot.view for slot in slots],
            lambda index, stop: checks[index].arrived(stop),
        )
        return [
            "absent" if not is_found else "whole" if check.is_whole() else "damaged"
            for is_found, check in zip(found, checks, strict=True)
        ]

    def _look_again(
        self, damaged: list[Slot], absent: list[Slot], use: Callable[[Slot], None], store: KVStore
    ) -> tuple[list[Slot], int]:
        """What is missing for good, and how many values of another size were in the way."""
        misfits: list[Slot] = []
        good: set[bytes] = set()
        try:
            there = store.contains([slot.key for slot in absent]) if absent else []
            misfits = [slot for slot, is_there in zip(absent, there, strict=True) if is_there]
            suspects = [*damaged, *misfits]
            if suspects:
                for slot, state in zip(suspects, self._read(suspects, store), strict=True):
                    if state == "whole" and _is_used(slot, use):
                        good.add(slot.key)
                store.delete([slot.key for slot in suspects if slot.key not in good])
        except StoreError as error:  # what is damaged is a miss all the same
            logger.debug("damaged values stay in the store: %s", error)
        missing = [slot for slot in (*damaged, *absent) if slot.key not in good]
        return missing, sum(slot.key not in good for slot in misfits)

    def _num_found_by_store(self) -> int:
        """Values that the store itself has found damaged, and called misses, since this was asked last."""
        with self._lock:
            seen, self._num_seen = self._num_seen, self.store.count_damaged()
            return self._num_seen - seen

    def _tell(self, num_damaged: int) -> None:
        """One line for a burst."""
        with self._lock:
            self._num_untold += num_damaged
            if not self._num_untold or not self._log_limit.passes():
                return
            num_damaged, self._num_untold = self._num_untold, 0
        logger.warning(
            "%d stored values were damaged or forged: they are deleted, and their KV is computed again; see "
            "pdkv_engine_kv_damaged_values_total in /metrics (next report in %g s at the earliest)",
            num_damaged, QUIET_S,
        )  # fmt: skip


def _is_used(slot: Slot, use: Callable[[Slot], None]) -> bool:
    """Whether a whole value could be used; what its codec does not know is damaged."""
    try:
        use(slot)
    except KVCorrupted as error:
        logger.debug("a stored value cannot be decoded: %s", error)
        return False
    return True
