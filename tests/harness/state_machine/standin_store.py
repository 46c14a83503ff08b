"""A store connector for the stand-in's engines, whose blocks are too small for units: content-addressed, two-phase.

Its reads and commits are operations on a MemoryFabric, which a schedule delivers, delays and loses. It keeps to the
contracts of base.py and uses every hook of it, save_kv_layer too. (Schedules of the store connectors themselves are in
store_world.py.)

A step's full blocks are staged layer by layer while it computes and committed when it is confirmed; what was confirmed
without having been staged (prefix hits) is copied out of its block. The partial tail of a hand-off is stored under its
transfer, found only through it and dropped on release.
"""

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import xxhash

from pdkv.base.options import option
from pdkv.connectors.base import (
    ASK_AGAIN,
    NO_MATCH,
    BlockTables,
    ConfirmedRange,
    Direction,
    FinishDecision,
    KVConnectorMetadata,
    LoadMode,
    MatchedTokens,
    RequestView,
    ScheduledRange,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.memory.base import MemoryMode, MemoryPeerOptions, MemoryScheduler, MemoryWorker
from pdkv.connectors.memory.fabric import Content, MemoryFabric, Operation, copy_in, copy_out
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.errors import KVNotFound, TransferCancelled, TransferTimeout

STAGED_STEPS = 4
"""Staged blocks that no later step commits are dropped after so many steps; a plan's update lags by at most two."""


StoreName = bytes | TransferKey
"""What a stored block is found by: its last hash-block key, or, for a partial tail, its transfer."""


class StoredBlock(NamedTuple):
    """What lies in the store, and the digest of what was put there under its name."""

    content: Content
    digest: bytes


class BlockStore:
    """Content-addressed blocks outside every engine, least recently used evicted first."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.num_damaged = 0  # blocks that were not what was put: dropped
        self._blocks: OrderedDict[StoreName, StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: StoreName) -> bool:
        return name in self._blocks

    def get(self, name: StoreName) -> Content | None:
        """The block's content, which counts as a use; None: it is not there, or not what was put under this name."""
        block = self._blocks.get(name)
        if block is None:
            return None
        if block.digest != _digest(name, block.content):
            self.num_damaged += 1
            del self._blocks[name]
            return None
        self._blocks.move_to_end(name)
        return block.content

    def blocks(self) -> list[tuple[StoreName, Content]]:
        """All that were put and are not damaged."""
        return [(name, b.content) for name, b in self._blocks.items() if b.digest == _digest(name, b.content)]

    def put(self, name: StoreName, content: Content) -> None:
        """Make a completely written block visible."""
        self._blocks[name] = StoredBlock(content, _digest(name, content))
        self._blocks.move_to_end(name)
        while self.capacity is not None and len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def discard(self, name: StoreName) -> None:
        """Drop a block, if it is there."""
        self._blocks.pop(name, None)


def _digest(name: StoreName, content: Content) -> bytes:
    """Of a block under its name, its bytes and their shape."""
    array = content
    if not isinstance(array, np.ndarray):
        import torch  # not before there is a tensor

        array = content.contiguous().flatten().view(torch.uint8).cpu().numpy()
    digest = xxhash.xxh3_128(repr((name, tuple(content.shape), str(content.dtype))).encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


_STORES: WeakKeyDictionary[MemoryFabric, BlockStore] = WeakKeyDictionary()


def store_of(fabric: MemoryFabric) -> BlockStore:
    """What engines on that fabric share."""
    return _STORES.setdefault(fabric, BlockStore())


def share_store(fabric: MemoryFabric, store: BlockStore) -> None:
    """Let engines on that fabric share this one."""
    _STORES[fabric] = store


class StandInStoreOptions(MemoryPeerOptions):
    """As those of the memory connector, and how loads go."""

    load: LoadMode = option("async", "wait outside the batch, or compute while layers come in")


class StandInStoreLoad(msgspec.Struct, frozen=True):
    """Read whole blocks of the store."""

    key: TransferKey
    names: list[StoreName]
    target: list[int]
    layerwise: bool


class StandInStoreSave(msgspec.Struct, frozen=True):
    """Make blocks visible: staged in an earlier step, or copied now from a block that nothing overwrites before."""

    key: TransferKey
    staged: list[tuple[int, StoreName]]  # (step_id, name), by the same request
    copied: list[tuple[int, StoreName]]  # (block_id, name)
    last: bool  # the hand-off is complete with this save


class StandInStoreMetadata(KVConnectorMetadata, kw_only=True):
    """Loads, saves and what this step shall stage."""

    loads: list[StandInStoreLoad] = msgspec.field(default_factory=list)
    saves: list[StandInStoreSave] = msgspec.field(default_factory=list)
    stage: list[tuple[TransferKey, int, StoreName]] = msgspec.field(
        default_factory=list
    )  # (request's transfer, block_id, name): complete when the step is
    drops: list[TransferKey] = msgspec.field(default_factory=list)  # transfers whose tails nobody needs any more


class StandInStoreScheduler(MemoryScheduler):
    """Scheduler side: what is staged, committed and found."""

    def __init__(self, connector: MemoryMode) -> None:
        super().__init__(connector)
        self.store = store_of(self.fabric)
        self._loads: list[StandInStoreLoad] = []
        self._staged: dict[tuple[TransferKey, StoreName], int] = {}  # by request -> step that stages it
        self._tails: set[TransferKey] = set()  # of own hand-offs

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        names = self._names(request, num_computed_tokens)
        stored = [name for name in names if name in self.store]
        complete = len(stored) == len(names)
        awaits = request.kv == "await_peer" and (request.handoff is None or request.kv_ready is None)
        if awaits and not (complete and request.handoff is not None):
            return ASK_AGAIN
        num_found = next((i for i, name in enumerate(names) if name not in self.store), len(names))
        stop = min(num_computed_tokens + num_found * self.block_size, request.num_wanted)
        if stop <= num_computed_tokens:
            return NO_MATCH
        mode: LoadMode = "layerwise" if self.options.load == "layerwise" else "async"
        return MatchedTokens(stop - num_computed_tokens, mode)

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        if num_external_tokens:
            first = request.num_local_hit // self.block_size
            stop = -(-(request.num_local_hit + num_external_tokens) // self.block_size)
            names = self._names(request, request.num_local_hit)[: stop - first]
            layerwise = self.options.load == "layerwise"
            self._loads.append(
                StandInStoreLoad(request.transfer_key, names, list(block_tables[0][first:stop]), layerwise)
            )
        return None

    def build_connector_meta(self, view: SchedulerView) -> KVConnectorMetadata:
        saves = [save for confirmed in view.confirmed if (save := self._save(confirmed)) is not None]
        stage = [item for scheduled in view.scheduled for item in self._stage(scheduled, view.step_id)]
        void = {*view.preempted, *view.aborted}
        self._staged = {
            slot: step
            for slot, step in self._staged.items()
            if step > view.step_id - STAGED_STEPS and slot[0] not in void
        }
        drops = [key for key in view.aborted if key in self._tails]  # another one's reader may have the same key
        handed_off = {confirmed.request.transfer_key for confirmed in view.confirmed if confirmed.last}
        self._tails.difference_update(drops, set(view.finished) - handed_off)
        loads, self._loads = self._loads, []
        layered = bool(stage) or any(load.layerwise for load in loads)
        return StandInStoreMetadata(
            step_id=view.step_id, needs_layer_hooks=layered, loads=loads, saves=saves, stage=stage, drops=drops
        )

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        """The store has its own copy: no block is held. Tells the reader which tail is its own."""
        return FinishDecision(hold_blocks=False)

    def _names(self, request: RequestView, start: int) -> list[StoreName]:
        """Names of the blocks that hold tokens [start, num_wanted): full ones by key, then the tail of a hand-off."""
        num_full = request.num_wanted // self.block_size
        names: list[StoreName] = list(request.block_keys[start // self.block_size : num_full])
        handoff = request.handoff
        tail = request.num_wanted % self.block_size
        handed = handoff.num_tokens if handoff is not None else 0
        if tail and handed % self.block_size and handed >= request.num_wanted:
            names.append(self._tail_name(request))
        return names

    def _tail_name(self, request: RequestView) -> StoreName:
        """A partial tail has no content key: only the transfer's own reader finds it."""
        return request.source_key

    def _stage(self, scheduled: ScheduledRange, step_id: int) -> list[tuple[TransferKey, int, StoreName]]:
        """Blocks that become complete with this step; each request's own, since another one's load may fail."""
        request, key = scheduled.request, scheduled.request.transfer_key
        items: list[tuple[TransferKey, int, StoreName]] = []
        for block in range(scheduled.start // self.block_size, scheduled.stop // self.block_size):
            if block < len(request.block_keys):
                items.append((key, scheduled.block_tables[0][block], request.block_keys[block]))
        if request.kv == "handoff" and scheduled.stop == request.num_tokens and scheduled.stop % self.block_size:
            items.append((key, scheduled.block_tables[0][scheduled.stop // self.block_size], self._tail_name(request)))
            self._tails.add(key)
        self._staged.update(((key, name), step_id) for _, _, name in items)
        return items

    def _save(self, confirmed: ConfirmedRange) -> StandInStoreSave | None:
        """Commit what was staged of a confirmed range, and copy the rest."""
        request = confirmed.request
        blocks = range(confirmed.start // self.block_size, confirmed.stop // self.block_size)
        named: list[tuple[int, StoreName]] = [(confirmed.block_tables[0][b], request.block_keys[b]) for b in blocks]
        if confirmed.last and confirmed.stop % self.block_size:
            named.append((confirmed.block_tables[0][confirmed.stop // self.block_size], self._tail_name(request)))
            self._tails.add(request.transfer_key)
        key = request.transfer_key
        staged = [(self._staged.pop((key, name)), name) for _, name in named if (key, name) in self._staged]
        done = {name for _, name in staged}
        copied = [(b, name) for b, name in named if name not in done and name not in self.store]
        if not (staged or copied or confirmed.last):
            return None
        return StandInStoreSave(key, staged, copied, confirmed.last)


class StandInStoreWorker(MemoryWorker):
    """Worker side: stages by layer, posts commits, loads at once or layer by layer."""

    def __init__(self, connector: MemoryMode) -> None:
        super().__init__(connector)
        self.store = store_of(self.fabric)
        self._staging: dict[tuple[int, TransferKey, StoreName], Content] = {}
        self._active: dict[TransferKey, StandInStoreLoad] = {}
        self._commits: dict[TransferKey, list[Commit]] = {}  # under way
        self._closing: dict[TransferKey, float] = {}  # hand-offs that are complete with their commits -> deadline
        self._step: StandInStoreMetadata | None = None

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, StandInStoreMetadata)
        self._step = meta
        for load in meta.loads:
            self._active[load.key] = load
            self.fabric.post(ReadStore(self, load))
        self.commit_staged(meta)
        for key in meta.drops:
            self.store.discard(key)
            for commit in self._commits.get(key, ()):
                commit.content.pop(key, None)  # the tail
        self._staging = {k: v for k, v in self._staging.items() if k[0] > meta.step_id - STAGED_STEPS}

    def wait_for_layer_load(self, layer: int) -> None:
        """Every load of this step is over before the first layer's attention."""
        assert self._step is not None
        keys = {load.key for load in self._step.loads if load.layerwise}
        if layer == 0 and keys:
            self._read_now(keys)
            for key in keys:
                self.end_key(key, TransferTimeout.code)

    def _read_now(self, keys: set[TransferKey]) -> None:
        """Deliver all stages of these loads' reads: somebody waits for them inside a step."""
        under_way = self.fabric.under_way
        own = [op for op in under_way if isinstance(op, ReadStore) and op.worker is self and op.load.key in keys]
        under_way[:] = [operation for operation in under_way if operation not in own]
        for read in own:
            rest: Operation | None = read
            while rest is not None:
                rest = rest.deliver()

    def save_kv_layer(self, layer: int, kv_cache: Content, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, StandInStoreMetadata)
        for key, block_id, name in meta.stage:
            slot = (meta.step_id, key, name)
            if layer == 0:
                self._staging[slot] = copy_out(kv_cache, [block_id])
            self._staging[slot][0, layer] = kv_cache[block_id, layer]

    def get_finished(self) -> TransferResults:
        now = self.fabric.clock()
        for key in [key for key, deadline in self._closing.items() if deadline <= now]:
            self._close(key, TransferTimeout.code)
        return super().get_finished()

    def stop(self, key: TransferKey, direction: Direction) -> None:
        if direction == "receive":
            self.end_key(key, TransferCancelled.code)

    def is_active(self, load: StandInStoreLoad) -> bool:
        """Whether the transfer still waits for this read; what lands later is refused."""
        return self._active.get(load.key) is load

    def end(self, load: StandInStoreLoad) -> None:
        """All blocks of the load are in."""
        del self._active[load.key]
        self.received(load.key, len(load.target))

    def end_key(self, key: TransferKey, code: str, num_tokens: int = 0, num_damaged: int = 0) -> None:
        """Nothing of this transfer lands from now on; its first `num_tokens` tokens have."""
        if self._active.pop(key, None) is not None:
            self.receive_failed(key, code, num_tokens, num_damaged)

    def committed(self, commit: "Commit") -> None:
        """A commit is visible."""
        under_way = self._commits.get(commit.key, [])
        if commit in under_way:
            under_way.remove(commit)
        if not under_way:
            self._commits.pop(commit.key, None)
            if commit.key in self._closing:
                self._close(commit.key, "")

    def commit_staged(self, meta: StandInStoreMetadata) -> None:
        """Post the commits of what earlier steps staged and has been confirmed since."""
        for save in meta.saves:
            self._commit(save)

    def _commit(self, save: StandInStoreSave) -> None:
        content: dict[StoreName, Content] = {}
        for step_id, name in save.staged:
            staged = self._staging.pop((step_id, save.key, name), None)
            if staged is not None:
                content[name] = staged
        for block_id, name in save.copied:
            content[name] = copy_out(self.pool, [block_id])
        commit = Commit(self, save.key, content)
        self._commits.setdefault(save.key, []).append(commit)
        self.fabric.post(commit)
        if save.last:
            self._closing[save.key] = self.fabric.clock() + self.options.transfer_timeout_s

    def _close(self, key: TransferKey, code: str) -> None:
        del self._closing[key]
        for late in self._commits.pop(key, ()):
            late.content.pop(key, None)  # nobody would drop the tail any more
        if code:
            self.send_failed(key, code)
        else:
            self.sent(key, 0)


class ReadStore(Operation):
    """Two stages: the data leaves the store, the data lands."""

    def __init__(self, worker: StandInStoreWorker, load: StandInStoreLoad) -> None:
        self.worker = worker
        self.load = load
        self.content: list[Content] | None = None
        self.num_damaged = 0  # of what was read

    def deliver(self) -> Operation | None:
        worker, load = self.worker, self.load
        if self.content is None:
            store = worker.store
            num_damaged = store.num_damaged
            found = (store.get(name) for name in load.names)
            self.content = list(takewhile(lambda content: content is not None, found))
            self.num_damaged = store.num_damaged - num_damaged
            return self
        if not worker.is_active(load):
            worker.fabric.num_refused += 1
            return None
        for block_id, content in zip(load.target, self.content, strict=False):
            copy_in(worker.pool, [block_id], content)
        if len(self.content) == len(load.names):
            worker.end(load)
        else:
            worker.end_key(load.key, KVNotFound.code, len(self.content) * worker.block_size, self.num_damaged)
        return None


class Commit(Operation):
    """Makes complete blocks visible, all at once."""

    def __init__(self, worker: StandInStoreWorker, key: TransferKey, content: dict[StoreName, Content]) -> None:
        self.worker = worker
        self.key = key
        self.content = content

    def deliver(self) -> Operation | None:
        for name, content in self.content.items():
            self.worker.store.put(name, content)
        self.worker.committed(self)
        return None


STAND_IN_STORE = f"{__name__}:StandInStoreConnector"
"""Its name as a connector."""


class StandInStoreConnector(MemoryMode):
    """Any engine saves what it computed; any engine finds it by content."""

    declares = ConnectorPlan(interface=INTERFACE, kind="store", content_addressed=True, one_process=True)
    options_type = StandInStoreOptions
    scheduler_type = StandInStoreScheduler
    worker_type = StandInStoreWorker
