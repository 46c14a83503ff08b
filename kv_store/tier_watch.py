"""Asks stores that are silent whether they are there, so that no call has to find out by waiting."""

import logging
import threading
import time
from collections.abc import Sequence
from math import inf

from pdkv.errors import StoreError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import PROBE_KEY, tier_name
from pdkv.kv_store.tier import CallKind, Tier

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0


class TierWatch:
    """Keeps the books of the calls of tiers. Where one takes long, a probe on a thread of its own asks its store for
    nobody's key: without an answer in as long a time again, the store's calls under way are ended, and it is left
    alone, as one is whose call fails, until a probe succeeds. Each one comes after twice as long a time as the last.

    Args:
        lock: guards the tiers' state; all methods but `close` are called under it.
        late_s: what takes long; infinite: there is no watch, and rests end by their time.
    """

    def __init__(self, tiers: Sequence[Tier], lock: threading.Lock, late_s: float) -> None:
        self._tiers = {place: tier for place, tier in enumerate(tiers) if not tier.is_near and late_s < inf}
        self._late_s = late_s
        self._probing: dict[int, float] = {}  # since when, by the tier's place
        self._num_calls = 0
        self._is_idle = bool(self._tiers)
        self._stopping = False
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._thread: threading.Thread | None = None

    def begin(self, tier: Tier) -> int:
        """A call begins; returns its number."""
        self._num_calls += 1
        tier.calls[self._num_calls] = time.monotonic()
        if self._is_idle:
            self._wake()
        return self._num_calls

    def end(self, tier: Tier, call: int, kind: CallKind, error: StoreError | None) -> None:
        """It is over."""
        del tier.calls[call]
        if error is None:
            (tier.reads if kind == "read" else tier.writes).succeeded()
            return
        before = tier.away
        tier.failed(kind, error, time.monotonic())
        place = next((place for place, each in self._tiers.items() if each is tier), None)
        if place is None:
            tier.away = None  # its rest ends by its time
        elif before is None and tier.away is not None:
            self._tell(place, tier)
            self._wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def _wake(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._serve, name="pdkv-tier-watch", daemon=True)
            self._thread.start()
        self._is_idle = False
        self._changed.notify_all()

    def _tell(self, place: int, tier: Tier) -> None:
        assert tier.away is not None
        name = tier_name(place, tier.store)
        logger.warning("KV store: %s is left alone until it answers (%s: %s)", name, tier.away.code, tier.away)

    # --- threads --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        num_calls = -1
        while True:
            with self._changed:
                now = time.monotonic()
                if self._stopping:
                    return
                silent = [place for place, since in self._probing.items() if since + self._late_s <= now]
                due = [p for p, t in self._tiers.items() if p not in self._probing and t.probe_at(self._late_s) <= now]
                if not (silent or due):
                    self._is_idle = num_calls == self._num_calls and not self._next_at() < inf
                    num_calls = self._num_calls  # who is busy is looked at now and then, not told of each call
                    at = self._next_at()
                    self._changed.wait(None if self._is_idle else max(min(at - now, self._late_s), 0.0))
                    continue
                for place in silent:
                    self._judge(place, StoreTimeout(f"no answer within {self._late_s:g} s"))
                self._probing.update(dict.fromkeys(due, now))
            for place in silent:
                self._tiers[place].store.hang_up()
            for place in due:
                threading.Thread(target=self._probe, args=(place, now), name="pdkv-tier-probe", daemon=True).start()

    def _next_at(self) -> float:
        probes = [t.probe_at(self._late_s) for p, t in self._tiers.items() if p not in self._probing]
        return min([*probes, *(since + self._late_s for since in self._probing.values())], default=inf)

    def _probe(self, place: int, since: float) -> None:
        """Any answer is one."""
        problem: StoreError | None = None
        try:
            self._tiers[place].store.contains([PROBE_KEY])
        except StoreError as error:
            problem = error if isinstance(error, (StoreUnavailable, StoreTimeout)) else None
        except Exception as error:
            problem = StoreUnavailable(f"its probe raised {error!r}")
        with self._changed:
            if self._probing.get(place) == since:  # nobody has lost patience
                self._judge(place, problem)
                self._changed.notify_all()

    def _judge(self, place: int, problem: StoreError | None) -> None:
        """A probe has ended, or has been given up."""
        tier, now = self._tiers[place], time.monotonic()
        del self._probing[place]
        was_away = tier.away is not None
        if problem is None:
            tier.away, tier.vouched_at, tier.reads.until = None, now, 0.0
            if was_away:
                logger.info("KV store: %s answers again", tier_name(place, tier.store))
            return
        tier.away = problem
        tier.reads.begin(now)
        if not was_away:
            self._tell(place, tier)
