"""Values on their way to a store and back: sealed before they go, verified before anybody uses them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from pdkv.connectors.store.envelope import Check, Sealer
from pdkv.connectors.store.pieces import Slot
from pdkv.errors import KVCorrupted, StoreError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.read_meter import ReadMeter
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.log_limit import LogLimit
from pdkv.wire.messages import KVTerms

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""The shortest time between two log lines about damaged values, or about saves that fail."""


State = Literal["whole", "expired", "damaged", "absent"]


class Reading(NamedTuple):
    """What became of some slots."""

    missing: list[Slot]  # not in the store, or not what was saved
    num_damaged: int  # values that were not what was saved
    num_expired: int = 0  # values whose time was over


class SealedValues:
    """A store's values, none of which is believed. Threads may share it; `store` is for calls that read no value."""

    def __init__(self, store: KVStore, sealer: Sealer, clock: Callable[[], float] = time.time) -> None:
        """`clock`: unix time, by which values end."""
        self.store = store
        self.meter = ReadMeter()
        self._sealer = sealer
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._num_seen = 0  # of what the store itself has found damaged
        self._num_untold = 0
        self._log_limit = LogLimit(QUIET_S)

    def put(self, slots: Sequence[Slot], kv_terms: KVTerms | None = None) -> None:
        """Store values whose bodies are in their slots, on these terms. Raises what the store raises."""
        terms = NO_TERMS if kv_terms is None else self._terms_now(kv_terms)
        for slot in slots:
            self._sealer.seal(slot.key, slot.view, terms.expires_at)
        items = [(slot.key, slot.view) for slot in slots]
        if kv_terms is None:
            self.store.put(items)
        else:
            self.store.put_on_terms(items, {slot.key: terms for slot in slots})

    def _terms_now(self, kv_terms: KVTerms) -> Terms:
        """Of a value that is written now. Its end is rounded down to a second: nobody uses it for longer."""
        expires_at = 0 if kv_terms.ttl_s is None else max(int(self._clock() + kv_terms.ttl_s), 1)
        return Terms(expires_at, kv_terms.owner, kv_terms.quota_bytes)

    def get(
        self,
        slots: Sequence[Slot],
        use: Callable[[Slot], None],
        kv_terms: KVTerms | None = None,
        part: KVStore | None = None,
    ) -> Reading:
        """Read values into their slots and call `use` for each one that is whole, which may raise KVCorrupted.

        What is there and is not whole is looked at once more, since somebody may be replacing it; then it is deleted,
        so that the next save can put a sound value in its place. So is what is whole and whose time is over.

        Args:
            kv_terms: of whoever reads; copies that the store makes of what is read are in that owner's room.

        Args:
            part: of the store, which alone is read, and loses what is damaged; None: all of them.

        Raises:
            StoreError: the store does not answer.
        """
        store = self.store if part is None else part
        missed: dict[State, list[Slot]] = {"damaged": [], "absent": [], "expired": []}
        for slot, state in zip(slots, self._read(slots, store, kv_terms), strict=True):
            if state != "whole" or not _is_used(slot, use):
                missed["damaged" if state == "whole" else state].append(slot)
        if not any(missed.values()):
            return Reading([], 0)
        missing, num_misfits = self._look_again(missed, use, store, kv_terms)
        num_damaged = len(missed["damaged"]) + num_misfits + self._num_found_by_store()
        self._tell(num_damaged)
        return Reading(missing, num_damaged, len(missed["expired"]))

    def _read(self, slots: Sequence[Slot], store: KVStore, kv_terms: KVTerms | None) -> list[State]:
        """Read values into their slots, and check them as they come in, while their bytes are in the cache."""
        checks = [self._sealer.check(slot.key, slot.view) for slot in slots]
        owner, quota = (0, None) if kv_terms is None else (kv_terms.owner, kv_terms.quota_bytes)
        with self.meter.reading():
            found = store.read_on_terms(
                [slot.key for slot in slots],
                [slot.view for slot in slots],
                lambda index, stop: checks[index].arrived(stop),
                lambda index: Terms(checks[index].expires_at, owner, quota),
            )
        self.meter.add(sum(slot.view.nbytes for slot, is_found in zip(slots, found, strict=True) if is_found))
        now = self._clock()
        return [_state_of(check, now) if is_found else "absent" for is_found, check in zip(found, checks, strict=True)]

    def kept_on(self, slots: Sequence[Slot], kv_terms: KVTerms | None) -> Mapping[bytes, Terms]:
        """The terms of values that are whole in their slots: the ends that they have, in this owner's room."""
        owner, quota = (0, None) if kv_terms is None else (kv_terms.owner, kv_terms.quota_bytes)
        ends = {slot.key: self._sealer.check(slot.key, slot.view).expires_at for slot in slots}
        return {key: Terms(end, owner, quota) for key, end in ends.items() if end or owner}

    def _look_again(
        self,
        missed: Mapping[State, list[Slot]],
        use: Callable[[Slot], None],
        store: KVStore,
        kv_terms: KVTerms | None,
    ) -> tuple[list[Slot], int]:
        """What is missing for good, and how many values of another size were in the way. What nobody may use is
        deleted.
        """
        damaged, absent, expired = missed["damaged"], missed["absent"], missed["expired"]
        misfits: list[Slot] = []
        good: set[bytes] = set()
        try:
            there = store.contains([slot.key for slot in absent]) if absent else []
            misfits = [slot for slot, is_there in zip(absent, there, strict=True) if is_there]
            suspects = [*damaged, *misfits]
            if suspects:
                for slot, state in zip(suspects, self._read(suspects, store, kv_terms), strict=True):
                    if state == "whole" and _is_used(slot, use):
                        good.add(slot.key)
            if suspects or expired:
                store.delete([slot.key for slot in (*suspects, *expired) if slot.key not in good])
        except StoreError as error:  # what nobody may use is a miss all the same
            logger.debug("damaged or expired values stay in the store: %s", error)
        missing = [slot for slot in (*damaged, *absent, *expired) if slot.key not in good]
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


def _state_of(check: Check, now: float) -> State:
    """Of a value that was there."""
    if not check.is_whole():
        return "damaged"
    return "expired" if Terms(check.expires_at).are_over(now) else "whole"


def _is_used(slot: Slot, use: Callable[[Slot], None]) -> bool:
    """Whether a whole value could be used; what its codec does not know is damaged."""
    try:
        use(slot)
    except KVCorrupted as error:
        logger.debug("a stored value cannot be decoded: %s", error)
        return False
    return True
