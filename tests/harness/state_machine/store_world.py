"""Worlds whose engines share a KV store: real I/O threads, whose every call of the store waits until it is delivered.

Between two events each thread has come to rest: it waits for a job, or in a call. So a schedule decides what the store
sees, and when, and which calls fail.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf, lcm
from typing import Any

import msgspec

from pdkv.connectors.base import Built, ConnectorConfig, WorkerConnector
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.store.base import StoreConnector
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.store.worker import StoreWorker
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import StoreTimeout
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.wire.kv import Order
from state_machine.forward import Forward
from state_machine.host import Chooser, World

WAIT_S = 20.0
REST_POLL_S = 0.001
NUM_VALUES = 12
"""Of a small store, which evicts."""


class Call:
    """One call of a store, as an operation under way. It can get lost, and cannot arrive twice."""

    content = None

    def __init__(self, owner: "SteppedStore", method: str) -> None:
        self.owner = owner
        self.method = method
        self.is_load = getattr(owner.this_thread, "loads", False)  # whatever a load asks, not only `get`
        self.fails = False
        self.go = threading.Event()


class CallFabric:
    """All calls under way; what a world knows as its fabric."""

    def __init__(self) -> None:
        self.num_losses_due = 0
        self.stores: list[SteppedStore] = []
        self._calls: list[Call] = []
        self._open = False  # no call waits any more
        self._changed = threading.Condition()

    @property
    def under_way(self) -> list[Call]:
        """The calls that wait, once all threads have come to rest."""
        with self._changed:
            self._wait_for_rest()
            return list(self._calls)

    def deliver(self, index: int = 0) -> None:
        """Let a call go on, and wait until its thread rests again."""
        self._let_go(self.under_way[index])

    def lose(self, index: int) -> None:
        """The call fails."""
        call = self.under_way[index]
        call.fails = True
        self._let_go(call)

    def unregister(self, worker: WorkerConnector) -> None:
        """Its engine died; what is under way from it goes on."""

    def let_loads_go(self, store: "SteppedStore") -> None:
        """A forward pass of the engine waits for what it loads."""
        with self._changed:
            for call in [c for c in self._calls if c.owner is store and c.is_load]:
                self._calls.remove(call)
                call.go.set()

    def close(self) -> None:
        """The end: nothing waits any more."""
        with self._changed:
            self._open = True
            for call in self._calls:
                call.go.set()
            self._calls.clear()

    def enter(self, store: "SteppedStore", method: str) -> None:
        """A thread calls the store."""
        call = Call(store, method)
        with self._changed:
            if self.num_losses_due and not self._open:
                self.num_losses_due -= 1
                call.fails = True
            if self._open or (store.in_forward and call.is_load):
                call.go.set()
            else:
                self._calls.append(call)
            self._changed.notify_all()
        assert call.go.wait(WAIT_S)
        if call.fails:
            raise StoreTimeout(method)

    def _let_go(self, call: Call) -> None:
        with self._changed:
            self._calls.remove(call)
            call.go.set()
            self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        for _ in range(int(WAIT_S / REST_POLL_S)):
            if all(store.is_at_rest(self._calls) for store in self.stores):
                return
            self._changed.wait(REST_POLL_S)
        raise AssertionError("threads do not come to rest")


class SteppedStore(KVStore):
    """One engine's view of the common store."""

    def __init__(self, fabric: CallFabric, inner: KVStore) -> None:
        self.in_forward = False
        self.scheduler: StoreScheduler | None = None
        self.worker: StoreWorker | None = None
        self.fabric = fabric
        self.this_thread = threading.local()
        self._inner = inner

    def is_at_rest(self, calls: Sequence[Call]) -> bool:
        """Whether its three threads wait, in a call or for work: one loads, one saves, one looks up."""
        if self.worker is None or self.scheduler is None:
            return True
        with self.worker._lock:
            jobs = [job for transfer in self.worker._transfers.values() for job in transfer.jobs]
        num_busy = len({job.lane for job in jobs}) + bool(self.scheduler.lookups._pending)
        return sum(call.owner is self for call in calls) == num_busy

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.fabric.enter(self, "contains")
        return self._inner.contains(keys)

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        self.fabric.enter(self, "get")
        return self._inner.get(keys, out)

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.fabric.enter(self, "put")
        self._inner.put(items)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.fabric.enter(self, "delete")
        self._inner.delete(keys)

    def close(self) -> None:
        """The world closes the common one."""


class SteppedWorker(StoreWorker):
    """While a forward pass waits for layers nobody delivers: loads go on by themselves."""

    view: SteppedStore

    def run_job(self, job: Job, scratch: Any) -> int:
        self.view.this_thread.loads = job.transfer.direction == "receive"
        return super().run_job(job, scratch)

    def wait_for_layer_load(self, layer: int) -> None:
        self.view.in_forward = True
        self.view.fabric.let_loads_go(self.view)
        super().wait_for_layer_load(layer)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self.view.in_forward = False


class SteppedConnector(StoreConnector):
    """Over one engine's view of the store."""

    probe_interval_s, watches = inf, False  # schedules decide when the store is asked, however long a call takes

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None], view: SteppedStore) -> None:
        super().__init__(config, notify)
        self.view = view

    def open_store(self) -> KVStore:
        return self.view

    def make_scheduler_side(self) -> StoreScheduler:
        side = super().make_scheduler_side()
        assert isinstance(side, StoreScheduler)
        self.view.scheduler = side
        return side

    def make_worker_side(self) -> SteppedWorker:
        worker = SteppedWorker(self.config, self.options, self.cut, SealedValues(self.store, self.sealer), self.notify)
        worker.view = self.view
        self.view.worker = worker
        return worker


class StoreWorld(World):
    """A world over a store connector. Its decisions are those of `World`, and how the store cuts."""

    def __init__(self, chooser: Chooser, *, mode: str, order: Order, load: str, forward: Forward) -> None:
        calls = self.calls = CallFabric()
        layout = forward.layout(16)
        self.connectors: list[SteppedConnector] = []
        per_value = (16, 32)[chooser.below(2)]
        capacity = (None, NUM_VALUES * per_value * layout.block_bytes // 16)[chooser.below(2)]
        most = min((len(group.layers) for group in layout.groups), default=layout.num_layers)
        self.hit_tokens = lcm(per_value, 16)
        self.store_options = {
            "tokens_per_value": str(per_value), "layer_groups": str(1 + chooser.below(most)),
            "min_hit_tokens": "16", "load": load, "io_threads": "1", "staging_bytes": ("1", "100000")[chooser.below(2)],
            "lookup_timeout_s": "60", "transfer_timeout_s": "60", "layer_timeout_s": "20",
        }  # fmt: skip
        self.inner = MemoryStore(f"world-{id(self)}", capacity)
        super().__init__(chooser, mode=mode, order=order, load=load, forward=forward)
        self.fabric = calls  # type: ignore[assignment]

    def make_plan(self) -> ConnectorPlan:
        return msgspec.structs.replace(SteppedConnector.plan(self.store_options), options=self.store_options)

    def make_connector(self, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        view = SteppedStore(self.calls, self.inner)
        self.calls.stores.append(view)
        connector = SteppedConnector(config, notify, view)
        self.connectors.append(connector)
        return Built(connector.make_scheduler_side, connector.make_worker_side, shutdown=connector.shutdown)

    def make_hole(self) -> None:
        """A stored value is gone, or is not what was saved."""
        keys = sorted(self.inner._shelf._values)
        if keys:
            key = keys[self.chooser.below(len(keys))]
            value = self.inner._shelf._values[key].copy()
            self.inner.delete([key])
            if self.chooser.below(2):
                value[self.chooser.below(value.size)] ^= 1
                self.inner.put([(key, memoryview(value))])

    def run(self) -> None:
        try:
            super().run()
            for engine in self.engines.values():
                assert isinstance(engine.worker, StoreWorker)
                assert not engine.worker.num_open_jobs, f"{engine.name}: jobs left"
                news = engine.core.external._news  # what the next step tells: without tails an end is not urgent
                left = {key for _, key in engine.worker._transfers} - {*news.finished, *news.aborted}
                assert not left, f"{engine.name}: transfers left"
        finally:
            self.calls.close()
            for connector in self.connectors:
                assert connector.view.scheduler is not None
                assert connector.view.worker is not None
                connector.view.scheduler.shutdown()
                connector.view.worker.shutdown()
                connector.shutdown()
            self.inner.close()
        for connector in self.connectors:
            staging = connector.view.worker._staging  # type: ignore[union-attr]
            assert staging.num_free == staging.count, "a staging buffer leaked"
