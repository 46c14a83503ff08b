"""Values on their way to a store and back: sealed before they go, verified before anybody uses them."""

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
from pdkv.kv_store.base import Arrived, KVStore, Scattered, TermsOf, put_all
from pdkv.kv_store.read_meter import ReadMeter
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.wire.kv import KVTerms

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

    def __init__(self, store: KVStore, sealer: Sealer, unix_time: Callable[[], float] = unix_time) -> None:
        """`unix_time`: by which values end."""
        self.store = store
        self.meter = ReadMeter()
        self._sealer = sealer
        self._unix_time = unix_time
        self._lock = threading.Lock()  # guards what follows
        self._num_seen = 0  # of what the store itself has found damaged
        self._num_untold = 0
        self._log_limit = LogLimit(QUIET_S)

    def put(self, slots: Sequence[Slot], kv_terms: KVTerms | None = None, *, for_others: bool = False) -> None:
        """Store values whose bodies are in their slots, on these terms. Raises what the store raises.

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
        """Of a value that is written now. Its end is rounded down to a second: nobody uses it for longer."""
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

        What is there and is not whole is looked at once more, since somebody may be replacing it; then it is deleted,
        so that the next save can put a sound value in its place. So is what is whole and whose time is over.

        Args:
            kv_terms: of whoever reads; copies that the store makes of what is read are in that owner's room.
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
        missing, num_misfits = self._look_again(missed, use, part, kv_terms)
        num_damaged = len(missed["damaged"]) + num_misfits + self._num_found_by_store()
        self._tell(num_damaged)
        return Reading(missing, num_damaged, len(missed["expired"]))

    def get_scattered(
        self, slots: Sequence[Slot], bodies: Sequence[Sequence[memoryview]], kv_terms: KVTerms | None = None
    ) -> list[bool]:
        """Read values straight into where their bodies belong, and their envelopes into their slots.

        Returns:
            Which of them are whole. Of the others, part of a body may be in its place: `get` says what there is.

        Raises:
            StoreError: the store does not answer.
        """
        out = [Scattered(*body, slot.view[-ENVELOPE_BYTES:]) for slot, body in zip(slots, bodies, strict=True)]

        def read(keys: Sequence[bytes], arrived: Arrived, terms_of: TermsOf) -> list[bool]:
            return self.store.read_scattered(keys, out, arrived, terms_of)

        return [state == "whole" for state in self._read_into(slots, out, kv_terms, read)]

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
        """Read values, and check them as they come in, while their bytes are in the cache."""
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
        """The end of a value that is whole in its slot, as unix time; 0: it has none."""
        return self._sealer.check(slot.key, Scattered(slot.view)).expires_at

    def kept_on(self, slots: Sequence[Slot], kv_terms: KVTerms | None) -> Mapping[bytes, Terms]:
        """The terms of values that are whole in their slots: the ends that they have, in this owner's room."""
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
        """Part by part, so that a bad value in a fast one neither hides a sound one behind it nor takes it along: what
        nobody may use is deleted where it is.

        Returns:
            What is missing for good, and how many of the values that seemed absent were of another size.
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
            except StoreError as error:  # what nobody may use is a miss all the same
                logger.debug("damaged or expired values stay in a part of the store: %s", error)
        return list(left.values()), len(misfits.intersection(left))

    def _sift(
        self, slots: Sequence[Slot], use: Callable[[Slot], None], part: KVStore, kv_terms: KVTerms | None
    ) -> tuple[list[bytes], list[bytes]]:
        """Of what a part has: keys of values that were used, and of those that nobody may use."""
        found = list(compress(slots, part.contains([slot.key for slot in slots]))) if slots else []
        good = [
            slot.key
            for slot, state in zip(found, self._read(found, part, kv_terms) if found else (), strict=True)
            if state == "whole" and _is_used(slot, use)
        ]
        return good, [slot.key for slot in found if slot.key not in good]

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


def _state_of(check: Check, now: float, *, has_end: bool) -> State:
    """Of a value that was there. `has_end`: one without an end is an older engine's, which knows nothing of ends."""
    if not check.is_whole():
        return "damaged"
    if not check.expires_at:
        return "expired" if has_end else "whole"
    return "expired" if Terms(check.expires_at).are_over(now) else "whole"


def _is_used(slot: Slot, use: Callable[[Slot], None]) -> bool:
    """Whether a whole value could be used; what its codec does not know is damaged."""
    try:
        use(slot)
    except KVCorrupted as error:
        logger.debug("a stored value cannot be decoded: %s", error)
        return False
    return True
