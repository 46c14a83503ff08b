"""Engines over a store connector, driven by hand: the connector's sides without an engine around them."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC, Clock, unix_time
from pdkv.connectors.base import (
    ConfirmedRange,
    ConnectorConfig,
    RequestView,
    ScheduledRange,
    SchedulerView,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.step_done import StepDone
from pdkv.connectors.store.base import StoreConnector
from pdkv.connectors.store.plan import StoreMetadata
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.connectors.store.shared_storage import SharedStorageOptions
from pdkv.connectors.store.worker import StoreWorker
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.errors import StoreError
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.tiers import TieredStore
from pdkv.wire.kv import EngineCard, KVGroup, KVHandoff, KVLayout
from pdkv.wire.tiers import CacheOrder, TierAnswer

WAIT_S = 20.0
TOTAL_HEADS = 4
NUM_BLOCKS = 48


class FaultyStore(KVStore):
    """A memory store whose calls can be counted, held up and made to fail."""

    def __init__(self) -> None:
        self.inner = MemoryStore(f"rig-{id(self)}")
        self.calls: list[tuple[str, int]] = []  # method, number of keys
        self.failing: dict[str, StoreError] = {}
        self._gates: dict[str, threading.Event] = {}
        self._reached: dict[str, threading.Semaphore] = {}

    def hold(self, method: str) -> None:
        """Calls of the method wait until it is let go."""
        self._gates[method] = threading.Event()
        self._reached[method] = threading.Semaphore(0)

    def wait_held(self, method: str) -> None:
        """Wait until one more call is held up."""
        assert self._reached[method].acquire(timeout=WAIT_S)

    def let_go(self, method: str) -> None:
        """Held calls go on, and later ones are not held."""
        self._gates.pop(method).set()

    def count(self, method: str) -> int:
        """Keys that calls of the method have named."""
        return sum(n for name, n in self.calls if name == method)

    def _enter(self, method: str, num_keys: int) -> None:
        self.calls.append((method, num_keys))
        gate = self._gates.get(method)
        if gate is not None:
            self._reached[method].release()
            assert gate.wait(WAIT_S)
        if method in self.failing:
            raise self.failing[method]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("contains", len(keys))
        return self.inner.contains(keys)

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        self._enter("get", len(keys))
        return self.inner.get(keys, out)

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self._enter("put", len(items))
        self.inner.put(items)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._enter("delete", len(keys))
        self.inner.delete(keys)

    def close(self) -> None:
        """Others of the test use it still."""


KINDS_HERE = ("memory", "host", "file", "tiers", "shared_storage", "sqlite")


def store_here(kind: str, path: Path, unix_time: Callable[[], float] = unix_time) -> KVStore:
    """A store without a server, of one of KINDS_HERE. Those that end values by themselves do so by `unix_time`."""
    match kind:
        case "memory":
            return MemoryStore(f"{path}", unix_time=unix_time)
        case "host":
            return HostStore(path / "kv", StoreOptions(capacity=64 << 20), unix_time)
        case "tiers":
            return TieredStore([store_here("host", path, unix_time), FileStore(path / "files")])
        case "file":
            return FileStore(path / "kv")
        case "shared_storage":
            return SharedStorageOptions.parse({"path": f"{path}/kv"}).open_store()
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "custom_connector"))
    try:
        from pdkv_sqlite import SQLiteStore
    finally:
        del sys.path[0]
    store: KVStore = SQLiteStore(f"{path}/kv.db")
    return store


class RigConnector(StoreConnector):
    """Over a store that the test has made."""

    current: ClassVar[KVStore]
    probe_interval_s = inf  # tests count the store's calls
    watches = False
    retry_after_s = 0.0

    def open_store(self) -> KVStore:
        return self.current


def rig_plan(options: Mapping[str, str]) -> ConnectorPlan:
    """Of a RigConnector."""
    return msgspec.structs.replace(RigConnector.plan(options), options=options)


def make_layout(block_size: int, tp: int = 1, groups: tuple[KVGroup, ...] = ()) -> KVLayout:
    return KVLayout(
        num_layers=len(groups[0].layers) if groups else 3, num_kv_heads=max(TOTAL_HEADS // tp, 1), head_size=4,
        block_size=block_size, dtype="float32", dtype_bytes=4, total_kv_heads=TOTAL_HEADS, groups=groups,
    )  # fmt: skip


def chain(num_keys: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(num_keys)]


def view(transfer_id: str, *, kv: Any = "local", num_tokens: int, **rest: Any) -> RequestView:
    """A request of that many tokens, the last one to be computed; its keys are those of `salt`."""
    salt = rest.pop("salt", "")
    values: dict[str, Any] = {
        "request_id": transfer_id, "attempt": 1, "transfer_id": transfer_id, "kv": kv, "num_tokens": num_tokens,
        "num_wanted": num_tokens - 1, "block_keys": chain((num_tokens - 1) // HASH_BLOCK_SIZE, salt),
    }  # fmt: skip
    return RequestView(**(values | rest))


AMPLE = dict.fromkeys(("lookup_timeout_s", "transfer_timeout_s", "layer_timeout_s"), "60")
"""Deadlines that no busy machine misses."""


class Engine:
    """One engine's connector on all its ranks, driven by hand."""

    def __init__(
        self,
        store: KVStore,
        name: str = "e",
        *,
        block_size: int = 16,
        tp: int = 1,
        kv_shards: int = 1,
        groups: tuple[KVGroup, ...] = (),
        unix_time: Callable[[], float] = unix_time,
        clock: Clock = MONOTONIC,
        **options: str,
    ) -> None:
        self.name, self.tp = name, tp
        options = {**AMPLE, **options}
        plan = rig_plan(options)
        self.layout = msgspec.structs.replace(make_layout(block_size, tp, groups), codec=plan.codec)
        self.block_size = block_size
        self.woken = threading.Semaphore(0)
        self.step_id = 0
        self.earlier_steps: StepDone | None = None  # of the next steps
        RigConnector.current = store
        self.table = LocalBlockTable(NUM_BLOCKS)
        self.connectors = [
            RigConnector(
                ConnectorConfig(
                    engine=name, epoch="1", layout=self.layout, num_blocks=NUM_BLOCKS, plan=plan, model="m",
                    rank=rank, tp=tp, kv_shards=max(kv_shards, tp), clock=clock, block_table=self.table,
                ),
                self.woken.release,
            )
            for rank in range(tp)
        ]  # fmt: skip
        for connector in self.connectors:
            connector.unix_time = unix_time
        scheduler = self.connectors[0].make_scheduler_side()
        assert isinstance(scheduler, StoreScheduler)
        self.scheduler = scheduler
        self.workers: list[StoreWorker] = []
        self.pools: list[torch.Tensor] = []
        heads = self.layout.num_kv_heads
        shape = (NUM_BLOCKS, self.layout.num_layers, 2, heads, block_size, 4)
        for connector in self.connectors:
            worker = connector.make_worker_side()
            assert isinstance(worker, StoreWorker)
            self.workers.append(worker)
            self.pools.append(torch.full(shape, -1.0))
            worker.register_kv_caches(self.pools[-1])
        self._results: list[dict[TransferKey, list[TransferOutcome]]] = [{}, {}, {}, {}]

    @property
    def worker(self) -> StoreWorker:
        return self.workers[0]

    def card(self) -> EngineCard:
        return EngineCard(
            engine=self.name, epoch="1", role="any", pid=0, connector="store", kind="store", content_addressed=True,
            orders=[], model="m", layout=self.layout, hash_block_size=HASH_BLOCK_SIZE, num_blocks=NUM_BLOCKS,
            max_model_len=2048, max_num_seqs=8, tp=self.tp, rank_blobs=[worker.handshake() for worker in self.workers],
        )  # fmt: skip

    # --- KV -------------------------------------------------------------------------------------------------------

    def heads(self, rank: int) -> slice:
        """The heads of all that a rank holds."""
        first = rank * TOTAL_HEADS // self.tp
        return slice(first, first + self.layout.num_kv_heads)

    def fill(self, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        """Write KV of tokens from 0 on, (tokens, layers, 2, TOTAL_HEADS, 4), into blocks."""
        for position in range(len(kv)):
            block, offset = block_ids[position // self.block_size], position % self.block_size
            for rank, pool in enumerate(self.pools):
                pool[block, :, :, :, offset] = kv[position][:, :, self.heads(rank)]

    def tokens(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """KV of tokens [0, num_tokens) as the ranks have it."""
        kv = torch.empty(len(block_ids) * self.block_size, 3, 2, TOTAL_HEADS, 4)
        for rank, pool in enumerate(self.pools):
            kv[:, :, :, self.heads(rank)] = pool[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        return kv[:num_tokens]

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self, **news: Any) -> StoreMetadata:
        """One step; the orders reach the ranks as msgpack."""
        self.step_id += 1
        empty: dict[str, Any] = dict.fromkeys(SchedulerView.__struct_fields__[1:], ())
        meta = self.scheduler.build_connector_meta(SchedulerView(self.step_id, **(empty | news)))
        for worker in self.workers:
            orders = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=StoreMetadata)
            orders.earlier_steps = self.earlier_steps
            worker.start_load_kv(orders)
        assert isinstance(meta, StoreMetadata)
        return meta

    def forward(self) -> None:
        """The layers of a step."""
        for worker in self.workers:
            for layer in range(3):
                worker.wait_for_layer_load(layer)
            worker.wait_for_save()
        self.collect()

    def collect(self) -> None:
        """Take what the ranks report now."""
        for worker in self.workers:
            for known, new in zip(self._results, worker.get_finished(), strict=True):
                for key, outcome in new.items():
                    known.setdefault(key, []).append(outcome)

    def wait(self, key: TransferKey) -> TransferOutcome:
        """The common outcome of a transfer or batch: ended when all ranks have ended it."""
        while (outcomes := self.reported(key)) is None:
            assert self.woken.acquire(timeout=WAIT_S), f"no result for {key}"
            self.collect()
        for known in self._results:
            known.pop(key, None)
        return next((o for o in outcomes if o.code), outcomes[0])

    def reported(self, key: TransferKey) -> list[TransferOutcome] | None:
        """Outcomes on all ranks, told to the scheduler side once; None: some rank has not ended it."""
        for sent, failed in ((0, 1), (2, 3)):
            outcomes = [*self._results[sent].get(key, ()), *self._results[failed].get(key, ())]
            if len(outcomes) >= self.tp:
                ok = key not in self._results[failed]
                maps: list[Mapping[TransferKey, TransferOutcome]] = [{}, {}, {}, {}]
                maps[(sent if ok else failed)] = {key: outcomes[0]}
                self.scheduler.update_connector_output(TransferResults(*maps))
                return outcomes
        return None

    # --- a request ------------------------------------------------------------------------------------------------

    def confirm(
        self, request: RequestView, block_ids: Sequence[int], stop: int, *, start: int = 0, last: bool = False
    ) -> StoreMetadata:
        return self.step(confirmed=[ConfirmedRange(request, start, stop, [list(block_ids)], last)])

    def save(self, request: RequestView, block_ids: Sequence[int], stop: int, **rest: Any) -> TransferOutcome | None:
        """Confirm, and wait until what that began is stored."""
        meta = self.confirm(request, block_ids, stop, **rest)
        outcomes = [self.wait(hold.key) for hold in meta.holds]
        return outcomes[0] if outcomes else None

    def hand_off(self, request: RequestView, block_ids: Sequence[int], num_tokens: int) -> KVHandoff:
        """Save a whole prompt and its tail; returns what decode gets."""
        self.save(request, block_ids, num_tokens, last=True)
        assert not self.wait(request.transfer_key).code
        return self.handoff(request, num_tokens)

    def handoff(self, request: RequestView, num_tokens: int) -> KVHandoff:
        finished = self.scheduler.request_finished(request, [[]])
        assert not finished.hold_blocks
        assert finished.payload is not None
        return KVHandoff(
            request.request_id, request.attempt, request.transfer_id, self.name, "1", num_tokens, finished.payload
        )

    def ask(self, request: RequestView, num_computed: int = 0) -> int:
        """Tokens that are found, after as many questions as it takes."""
        while (matched := self.scheduler.get_num_new_matched_tokens(request, num_computed)).ask_again:
            assert self.woken.acquire(timeout=WAIT_S), "nobody wakes the engine"
        return matched.num_tokens

    def start_load(
        self, request: RequestView, block_ids: Sequence[int], num_tokens: int, *, layerwise: bool = False
    ) -> StoreMetadata:
        self.scheduler.update_state_after_alloc(request, [block_ids], num_tokens)
        stop = request.num_local_hit + num_tokens
        scheduled = [ScheduledRange(request, stop, stop + 1, [list(block_ids)])] if layerwise else []
        return self.step(scheduled=scheduled)

    def load(self, request: RequestView, block_ids: Sequence[int], num_tokens: int) -> TransferOutcome:
        self.start_load(request, block_ids, num_tokens)
        return self.wait(request.transfer_key)

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
            assert worker._staging.num_free == worker._staging.count, "a staging buffer leaked"
        for connector in self.connectors:
            connector.shutdown()


MakeEngine = Callable[..., Engine]
Made = tuple[FaultyStore, MakeEngine]


@contextmanager
def engines() -> Iterator[Made]:
    """A store and a factory of engines on it, which are closed at the end."""
    store = FaultyStore()
    made: list[Engine] = []

    def make(name: str = "e", **arguments: Any) -> Engine:
        made.append(Engine(store, name, **arguments))
        return made[-1]

    try:
        yield store, make
    finally:
        for engine in made:
            engine.close()
        store.inner.close()


def random_kv(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """KV of tokens, all heads."""
    return torch.rand(num_tokens, 3, 2, TOTAL_HEADS, 4, generator=torch.Generator().manual_seed(seed))


def scattered(num_tokens: int, block_size: int, start: int = 3) -> list[int]:
    """Block ids for so many tokens, in no order."""
    return [(start + 5 * i) % NUM_BLOCKS for i in range(-(-num_tokens // block_size))]


def prefill(
    engine: Engine, num_tokens: int, *, transfer_id: str = "t", seed: int = 0
) -> tuple[torch.Tensor, KVHandoff]:
    """Compute and hand off a prompt."""
    kv, blocks = random_kv(num_tokens, seed), scattered(num_tokens, engine.block_size)
    engine.fill(blocks, kv)
    request = view(transfer_id, kv="handoff", num_tokens=num_tokens + 1, salt=str(seed))
    return kv, engine.hand_off(request, blocks, num_tokens)


KEYS = chain(16, "0")
"""Of the first 256 tokens of `prefill`'s prompt: four values."""


def order(engine: Engine, action: Any, keys: list[bytes] | None = KEYS, **fields: Any) -> dict[str, TierAnswer]:
    """What all ranks together answer, by tier."""
    asked = CacheOrder(order_id="o", action=action, keys=keys, **{"timeout_s": 60.0, **fields})
    assert engine.scheduler.tiers.order(asked) == 1
    meta = engine.scheduler.build_connector_meta(SchedulerView(0, [], [], [], [], [], []))
    for worker in engine.workers:
        worker.start_load_kv(meta)
    joined = TransferAggregator(engine.tp)
    while not (answers := engine.scheduler.tiers.take_answers()):
        assert engine.woken.acquire(timeout=WAIT_S)
        results = engine.scheduler.resolve_results(joined.add([worker.get_finished() for worker in engine.workers]))
        assert not results, "none of the engine's business"
    (answer,) = answers
    assert answer.order_id == "o"
    return {tier.tier: tier for tier in answer.tiers}


def find(engine: Engine, **fields: Any) -> dict[str, tuple[int, int]]:
    """(tokens, values) by tier."""
    return {name: (tier.num_tokens, tier.num_values) for name, tier in order(engine, "lookup", **fields).items()}
