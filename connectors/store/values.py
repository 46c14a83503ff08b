"""Values on their way to a store and back: sealed before they are written, verified before they are used."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Literal, NamedTuple

from pdkv.base.clock import unix_time
from pdkv.base.log_limit import LogLimit
from pdkv.connectors.store.envelope import ENVELOPE_BYTES, Check, Sealer
from pdkv.connectors.store.pieces import Slot
from pdkv.errors import KVCorrupted, StoreError
from pdkv.kv_store.base import Arrived, KVStore, Lent, Scattered, TermsOf, put_all
from pdkv.kv_store.read_meter import ReadMeter
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.wire.kv import KVTerms

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""The least seconds between two log lines about damaged values, or about failed saves."""


State = Literal["whole", "expired", "damaged", "absent"]


class Reading(NamedTuple):
    """The outcome of a read into some slots."""

    missing: list[Slot]  # not in the store, or not matching what was saved
    num_damaged: int  # values that did not match what was saved
    num_expired: int = 0  # expired values


class SealedValues:
    """A store's values, each of which is verified. Threads may share it; `store` is for calls that read no value."""

    def __init__(self, store: KVStore, sealer: Sealer, unix_time: Callable[[], float] = unix_time) -> None:
        """`unix_time`: by which values expire."""
        self.store = store
        self.meter = ReadMeter()
        self._sealer = sealer
        self._unix_time = unix_time
        self._lock = threading.Lock()  # guards what follows
        self._num_seen = 0  # values that the store itself has found damaged
        self._num_untold = 0
        self._log_limit = LogLimit(QUIET_S)

    def put(self, slots: Sequence[Slot], kv_terms: KVTerms | None = None, *, for_others: bool = False) -> None:
        """Store values with bodies in their slots, on these terms. Raises what the store raises.

        Args:
            for_others: any other process can read them when this returns.
        """
        terms = NO_TERMS if kv_terms is None else self._terms_now(kv_terms)
        for slot in slots:
            self._sealer.seal(slot.key, slot.view, terms.expires_at)
        items = [(slot.key, slot.view) for slot in slots]
        by_key = {} if kv_terms is None else {slot.key: terms for slot in slots}
        if for_others:
            put_all(self.store, items, by_key)
        else:
            self.store.keep(items, by_key)

    def _terms_now(self, kv_terms: KVTerms) -> Terms:
        """The terms of a value written now. Its expiry is rounded down to a second, so that it is not used for
        longer.
        """
        expires_at = 0 if kv_terms.ttl_s is None else max(int(self._unix_time() + kv_terms.ttl_s), 1)
        return Terms(expires_at, kv_terms.owner, kv_terms.quota_bytes)

    def get(
        self,
        slots: Sequence[Slot],
        use: Callable[[Slot], None],
        kv_terms: KVTerms | None = None,
        part: KVStore | None = None,
    ) -> Reading:
        """Read values into their slots and call `use` for each one that is whole, which may raise KVCorrupted.

        A value that is stored but damaged is read once more, since another engine may be replacing it; then it is
        deleted, so that the next save can put an intact one in its place. So is an intact value that has expired.

        Args:
            kv_terms: the reader's; copies that the store makes while reading count against that owner's quota.
            part: the only part of the store to read, and to delete damaged values from; None: all of them.

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
        missing, num_misfits = self._look_again(missed, use, part, kv_terms)
        num_damaged = len(missed["damaged"]) + num_misfits + self._num_found_by_store()
        self._tell(num_damaged)
        return Reading(missing, num_damaged, len(missed["expired"]))

    def get_scattered(
        self, slots: Sequence[Slot], bodies: Sequence[Sequence[memoryview]], kv_terms: KVTerms | None = None
    ) -> list[bool]:
        """Read values' bodies directly into their destinations, and their envelopes into their slots.

        Returns:
            Which of them are intact. Of the others, part of a body may be at its destination: `get` tells more.

        Raises:
            StoreError: the store does not answer.
        """
        out = [Scattered(*body, slot.view[-ENVELOPE_BYTES:]) for slot, body in zip(slots, bodies, strict=True)]

        def read(keys: Sequence[bytes], arrived: Arrived, terms_of: TermsOf) -> list[bool]:
            return self.store.read_scattered(keys, out, arrived, terms_of)

        return [state == "whole" for state in self._read_into(slots, out, kv_terms, read)]

    def lend(self, slot: Slot) -> Lent | None:
        """An intact value in its place in the store's page-locked memory, and its envelope in its slot; None: there is
        none: `get` tells more.
        """
        lent = self.store.lend(slot.key)
        if lent is None or len(lent.view) != slot.data.nbytes:
            return None
        with self.meter.reading():
            check = self._sealer.check(slot.key, Scattered(lent.view))
            if _state_of(check, self._unix_time(), has_end=False) != "whole":
                return None
        self.meter.add(len(lent.view))
        slot.view[-ENVELOPE_BYTES:] = lent.view[-ENVELOPE_BYTES:]
        return lent

    def _read(self, slots: Sequence[Slot], store: KVStore, kv_terms: KVTerms | None) -> list[State]:
        """Read values into their slots."""
        out = [slot.view for slot in slots]

        def read(keys: Sequence[bytes], arrived: Arrived, terms_of: TermsOf) -> list[bool]:
            return store.read_on_terms(keys, out, arrived, terms_of)

        return self._read_into(slots, [Scattered(view) for view in out], kv_terms, read)

    def _read_into(
        self,
        slots: Sequence[Slot],
        out: Sequence[Scattered],
        kv_terms: KVTerms | None,
        read: Callable[[Sequence[bytes], Arrived, TermsOf], list[bool]],
    ) -> list[State]:
        """Read values, and check them as they arrive, while their bytes are in the cache."""
        checks = [self._sealer.check(slot.key, buffers) for slot, buffers in zip(slots, out, strict=True)]
        owner, quota = (0, None) if kv_terms is None else (kv_terms.owner, kv_terms.quota_bytes)
        with self.meter.reading():
            found = read(
                [slot.key for slot in slots],
                lambda index, stop: checks[index].arrived(stop),
                lambda index: Terms(checks[index].expires_at, owner, quota),
            )
        self.meter.add(sum(slot.view.nbytes for slot, is_found in zip(slots, found, strict=True) if is_found))
        now = self._unix_time()
        has_end = kv_terms is not None and kv_terms.ttl_s is not None
        return [
            _state_of(check, now, has_end=has_end) if is_found else "absent"
            for is_found, check in zip(found, checks, strict=True)
        ]

    def end_of(self, slot: Slot) -> int:
        """The expiry of an intact value in its slot, as unix time; 0: none."""
        return self._sealer.check(slot.key, Scattered(slot.view)).expires_at

    def kept_on(self, slots: Sequence[Slot], kv_terms: KVTerms | None) -> Mapping[bytes, Terms]:
        """The terms of intact values in their slots: each with its own expiry, in this owner's quota."""
        owner, quota = (0, None) if kv_terms is None else (kv_terms.owner, kv_terms.quota_bytes)
        ends = {slot.key: self.end_of(slot) for slot in slots}
        return {key: Terms(end, owner, quota) for key, end in ends.items() if end or owner}

    def _look_again(
        self,
        missed: Mapping[State, list[Slot]],
        use: Callable[[Slot], None],
        part: KVStore | None,
        kv_terms: KVTerms | None,
    ) -> tuple[list[Slot], int]:
        """Read again, part by part, so that a bad value in a fast part neither hides an intact one below it nor deletes
        it: unusable values are deleted where they are.

        Returns:
            The values that are really missing, and how many of the apparently absent ones had another size.
        """
        left = {slot.key: slot for slot in (*missed["damaged"], *missed["absent"], *missed["expired"])}
        misfits = set[bytes]()
        absent = {slot.key for slot in missed["absent"]}
        for each in self.store.parts().values() if part is None else [part]:
            try:
                good, bad = self.store.ask_part(each, partial(self._sift, list(left.values()), use, each, kv_terms))
                misfits |= absent.intersection(bad)
                for key in good:
                    del left[key]
                if bad:
                    self.store.forget(bad)
                    self.store.ask_part(each, partial(each.delete, bad), writes=True)
            except StoreError as error:  # an unusable value is a miss in any case
                logger.debug("damaged or expired values stay in a part of the store: %s", error)
        return list(left.values()), len(misfits.intersection(left))

    def _sift(
        self, slots: Sequence[Slot], use: Callable[[Slot], None], part: KVStore, kv_terms: KVTerms | None
    ) -> tuple[list[bytes], list[bytes]]:
        """Sort the values of a part: keys of values that were used, and of unusable ones."""
        found = list(compress(slots, part.contains([slot.key for slot in slots]))) if slots else []
        good = [
            slot.key
            for slot, state in zip(found, self._read(found, part, kv_terms) if found else (), strict=True)
            if state == "whole" and _is_used(slot, use)
        ]
        return good, [slot.key for slot in found if slot.key not in good]

    def _num_found_by_store(self) -> int:
        """Number of values that the store itself has found damaged, and reported as misses, since the last call."""
        with self._lock:
            seen, self._num_seen = self._num_seen, self.store.count_damaged()
            return self._num_seen - seen

    def _tell(self, num_damaged: int) -> None:
        """Log one line for a burst."""
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


def _state_of(check: Check, now: float, *, has_end: bool) -> State:
    """The state of a stored value. `has_end`: without an expiry it comes from an older engine, which knows none."""
    if not check.is_whole():
        return "damaged"
    if not check.expires_at:
        return "expired" if has_end else "whole"
    return "expired" if Terms(check.expires_at).are_over(now) else "whole"


def _is_used(slot: Slot, use: Callable[[Slot], None]) -> bool:
    """Whether an intact value could be used; one that its codec cannot read is damaged."""
    try:
        use(slot)
    except KVCorrupted as error:
        logger.debug("a stored value cannot be decoded: %s", error)
        return False
    return True
