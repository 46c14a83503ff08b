"""Probes silent stores, so that no call has to find out by waiting."""

import logging
import threading
from collections.abc import Callable, Sequence
from math import inf

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.service_thread import ServiceThread, start_thread
from pdkv.errors import StoreError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import PROBE_KEY
from pdkv.kv_store.tier import CallKind, Tier

logger = logging.getLogger(__name__)


class TierWatch:
    """Tracks the calls of tiers. If one takes long, a probe asks its store for a nonexistent key: if that gets no
    answer within the same time again, the store's running calls are ended, and the tier is left alone, as after a
    failed call, until a probe succeeds. Each probe comes after twice as long a time as the last.

    Args:
        lock: guards the tiers' state; all methods but `close` are called under it.
        late_s: duration from which a call counts as long.
    """

    def __init__(self, tiers: Sequence[Tier], lock: threading.Lock, late_s: float, clock: Clock = MONOTONIC) -> None:
        self._tiers = [tier for tier in tiers if tier.is_watched]
        self._late_s = late_s
        self._clock = clock
        self.tell: Callable[[], None] = lambda: None  # a tier is left alone, or is no longer
        self._num_calls = 0
        self._is_idle = bool(self._tiers)
        self._changed = threading.Condition(lock)
        self._thread = ServiceThread(self._serve, self._wake, "pdkv-tier-watch")

    def begin(self, tier: Tier) -> int:
        """A call begins; returns its number."""
        self._num_calls += 1
        tier.calls[self._num_calls] = self._clock.now()
        if self._is_idle:
            self._begin()
        return self._num_calls

    def end(self, tier: Tier, call: int, kind: CallKind, error: StoreError | None) -> None:
        """Note the end of a call."""
        del tier.calls[call]
        if error is None:
            (tier.reads if kind == "read" else tier.writes).succeeded()
            return
        was_away = tier.away is not None
        tier.failed(kind, error, self._clock.now())
        if tier.away is not None and not was_away:
            self._tell(tier)
            self._begin()

    def close(self) -> None:
        """End the thread, after its current probe, which the stores have been told to end. Idempotent."""
        self._thread.stop()

    def _begin(self) -> None:
        self._thread.start()
        self._is_idle = False
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tell(self, tier: Tier) -> None:
        assert tier.away is not None
        logger.warning("KV store: %s is left alone until it answers (%s: %s)", tier.name, tier.away.code, tier.away)
        self.tell()

    # --- threads --------------------------------------------------------------------------------------------------

    def _serve(self, stopping: threading.Event) -> None:
        num_calls = -1
        while True:
            with self._changed:
                now = self._clock.now()
                if stopping.is_set():
                    return
                tier = min(self._tiers, key=lambda tier: tier.probe_at(self._late_s))
                at = tier.probe_at(self._late_s)
                if at > now:
                    self._is_idle = num_calls == self._num_calls and at == inf
                    num_calls = self._num_calls  # who is busy is looked at now and then, not told of each call
                    self._clock.wait(self._changed, None if self._is_idle else min(at, now + self._late_s))
                    continue
            problem = self._probe(tier)
            with self._changed:
                self._judge(tier, problem)

    def _probe(self, tier: Tier) -> StoreError | None:
        """Why its store cannot be reached; None: it can. A probe that takes too long is ended."""
        answers: list[StoreError | None] = []
        answered = threading.Event()

        def ask() -> None:
            answers.append(_ask(tier))
            answered.set()

        try:
            start_thread(threading.Thread(target=ask, name="pdkv-tier-probe", daemon=True), StoreUnavailable)
        except StoreUnavailable as error:  # the next probe may get a thread
            return error
        if not self._clock.wait(answered, self._clock.now() + self._late_s):
            with self._changed:
                self._judge(tier, StoreTimeout(f"no answer within {self._late_s:g} s"))
            tier.store.hang_up()
            answered.wait()
        return answers[0]

    def _judge(self, tier: Tier, problem: StoreError | None) -> None:
        now, was_away = self._clock.now(), tier.away is not None
        if problem is None:
            tier.away, tier.vouched_at, tier.reads.until = None, now, 0.0
            if was_away:
                logger.info("KV store: %s answers again", tier.name)
                self.tell()
            return
        tier.away = problem
        tier.reads.begin(now)
        if not was_away:
            self._tell(tier)


def _ask(tier: Tier) -> StoreError | None:
    """Any answer means that it is there."""
    try:
        tier.store.contains([PROBE_KEY])
    except (StoreUnavailable, StoreTimeout) as error:
        return error
    except StoreError:
        return None
    except Exception as error:
        return StoreUnavailable(f"its probe raised {error!r}")
    return None
