"""Asks stores that are silent whether they are there, so that no call has to find out by waiting."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from math import inf

from pdkv.errors import StoreError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import PROBE_KEY
from pdkv.kv_store.tier import CallKind, Tier

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0


class TierWatch:
    """Keeps the books of the calls of tiers. Where one takes long, a probe asks its store for nobody's key: without an
    answer in as long a time again, the store's calls under way are ended, and it is left alone, as one is whose call
    fails, until a probe succeeds. Each one comes after twice as long a time as the last.

    Args:
        lock: guards the tiers' state; all methods but `close` are called under it.
        late_s: what takes long.
    """

    def __init__(self, tiers: Sequence[Tier], lock: threading.Lock, late_s: float) -> None:
        self._tiers = [tier for tier in tiers if tier.is_watched]
        self._late_s = late_s
        self.tell: Callable[[], None] = lambda: None  # a tier is left alone, or is no longer
        self._asked: Tier | None = None  # whose probe is under way
        self._num_calls = 0
        self._is_idle = bool(self._tiers)
        self._stopping = False
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
        was_away = tier.away is not None
        tier.failed(kind, error, time.monotonic())
        if tier.away is not None and not was_away:
            self._tell(tier)
            self._wake()

    def close(self) -> None:
        """End the thread, behind a probe that the stores were told to end. Idempotent."""
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

    def _tell(self, tier: Tier) -> None:
        assert tier.away is not None
        logger.warning("KV store: %s is left alone until it answers (%s: %s)", tier.name, tier.away.code, tier.away)
        self.tell()

    # --- threads --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        num_calls = -1
        while True:
            with self._changed:
                now = time.monotonic()
                if self._stopping:
                    return
                tier = min(self._tiers, key=lambda tier: tier.probe_at(self._late_s))
                at = tier.probe_at(self._late_s)
                if at > now:
                    self._is_idle = num_calls == self._num_calls and at == inf
                    num_calls = self._num_calls  # who is busy is looked at now and then, not told of each call
                    self._changed.wait(None if self._is_idle else min(at - now, self._late_s))
                    continue
                self._asked = tier
            problem = self._probe(tier)
            with self._changed:
                self._asked = None
                self._judge(tier, problem)

    def _probe(self, tier: Tier) -> StoreError | None:
        """Why its store cannot be reached; None: it can. Any answer is one."""
        patience = threading.Timer(self._late_s, self._give_up, [tier])
        patience.daemon = True
        patience.start()
        try:
            tier.store.contains([PROBE_KEY])
        except (StoreUnavailable, StoreTimeout) as error:
            return error
        except StoreError:
            return None
        except Exception as error:
            return StoreUnavailable(f"its probe raised {error!r}")
        finally:
            patience.cancel()
        return None

    def _give_up(self, tier: Tier) -> None:
        """Its probe takes too long; a store that cannot be hung up on is left alone all the same."""
        with self._changed:
            if self._asked is not tier:
                return
            self._judge(tier, StoreTimeout(f"no answer within {self._late_s:g} s"))
        tier.store.hang_up()

    def _judge(self, tier: Tier, problem: StoreError | None) -> None:
        now, was_away = time.monotonic(), tier.away is not None
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
