"""The worker side of looking ahead: prefetches values of waiting requests, and keeps them until they are not wanted any
more.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.connectors.base import TransferKey
from pdkv.connectors.store.between_tiers import BetweenTiers
from pdkv.connectors.store.plan import StoreCut, StoreMetadata, Value
from pdkv.connectors.transfer.lanes import Lane
from pdkv.connectors.transfer.worker import Job, Task, TransferWorker
from pdkv.errors import StoreError, TransferTimeout
from pdkv.kv_store.base import KVStore
from pdkv.wire.kv import KVTerms

logger = logging.getLogger(__name__)

LANE: Lane = ("ahead", 0)
"""One thread, which brings one buffer's worth at a time, in queue order."""

MAX_AGE_S = 60.0
"""Seconds after which a value that has not been prefetched is left where it is."""


class Ahead(NamedTuple):
    """Values that will soon be loaded."""

    values: list[Value]
    kv_terms: KVTerms | None = None  # of the request that will load them


class Passed(NamedTuple):
    """Values that will no longer be loaded soon."""

    values: list[Value]


class NearValues:
    """One rank's part in looking ahead."""

    def __init__(self, store: KVStore, cut: StoreCut, between: BetweenTiers) -> None:
        """`between`: not used by any other object."""
        self._store = store
        self._between = between
        self._damaged: dict[TransferKey, int] = {}  # values that orders found and that did not match what was saved
        self._cut = cut
        self.looks_ahead = store.look_ahead_bytes > 0

    def submit(self, worker: TransferWorker, meta: StoreMetadata) -> None:
        """Queue a step's orders. Values not prefetched in time are left: their load has begun, or is not wanted any
        more.
        """
        for passed in meta.passed:
            worker.drop(passed.key, "send")
            if passed.values:
                self._submit_one(worker, passed.key._replace(attempt=1), Passed(passed.values))
        for ahead in meta.ahead:
            self._submit_one(worker, ahead.key, Ahead(ahead.values, ahead.kv_terms))

    def _submit_one(self, worker: TransferWorker, key: TransferKey, order: Ahead | Passed) -> None:
        """Queue one order. Every rank reports its end, even one that has nothing to do."""
        timeout_s = (
            math.inf if isinstance(order, Passed) else 2 * MAX_AGE_S
        )  # values that are not released would be kept for ever
        worker.submit(key, "send", [Task(order, LANE, timeout_s=timeout_s)] if self.looks_ahead else [])

    def bring(self, job: Job, order: Ahead) -> int:
        """Prefetch. Nothing is loaded or saved: 0 bytes. A failing store is not an error here: a load will
        notice it.
        """
        self._store.expect(self._keys_of(order.values))
        first, *others = self._store.parts().values()
        if others:
            before = self._between.num_damaged
            try:
                self._between.prefetch(order.values, first, job.started + MAX_AGE_S, order.kv_terms, job.check)
            except (StoreError, TransferTimeout) as error:
                logger.debug("values of waiting requests stay where they are: %s", error)
            finally:
                self._damaged[job.key] = self._between.num_damaged - before
        return 0

    def take_damaged(self, key: TransferKey) -> int:
        """Values that an ended order found damaged."""
        return self._damaged.pop(key, 0)

    def let_go(self, values: Sequence[Value]) -> int:
        """Release values, so that they may be evicted."""
        self._store.unexpect(self._keys_of(values))
        return 0

    def _keys_of(self, values: Sequence[Value]) -> list[bytes]:
        """The keys of the parts that this rank writes, in token order."""
        return [key for value in values for key in self._cut.own_keys(value)]
