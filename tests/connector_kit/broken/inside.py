"""Defects of `memory`: engines of one process."""

import time
from collections import deque
from typing import Any

import msgspec
from state_machine.standin_store import (
    StandInStoreConnector,
    StandInStoreMetadata,
    StandInStoreScheduler,
    StandInStoreWorker,
    StoreName,
)

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import (
    KVConnectorMetadata,
    RequestView,
    ScheduledRange,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.memory.connector import MemoryStoreConnector
from pdkv.connectors.memory.fabric import Content
from pdkv.connectors.memory.pull import MemoryPullConnector, MemoryPullScheduler, MemoryPullWorker
from pdkv.connectors.memory.push import MemoryPushConnector, MemoryPushWorker
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata
from pdkv.connectors.peer.push_scheduler import PushSend
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.errors import TransferError, TransferTimeout
from pdkv.wire.tiers import TierEvents

LATE_STEPS = 2


class _OldEpochScheduler(MemoryPullScheduler):
    def source_block_size(self, engine: str, epoch: str) -> int | None:
        return self.block_size


class _OldEpochWorker(MemoryPullWorker):
    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PullMetadata)
        now = self.fabric._endpoints
        loads = [msgspec.structs.replace(load, epoch=now[load.engine].epoch) for load in meta.loads]
        super().start_load_kv(msgspec.structs.replace(meta, loads=loads))


class KeepsADeadEpochsDescriptors(MemoryPullConnector):
    """An engine's name is enough: what its dead incarnation has handed off is read from the living one."""

    scheduler_type = _OldEpochScheduler
    worker_type = _OldEpochWorker


class _MixedGroupsScheduler(MemoryPullScheduler):
    def build_connector_meta(self, view: SchedulerView) -> PullMetadata:
        meta = super().build_connector_meta(view)
        loads = [msgspec.structs.replace(load, block_ids=load.block_ids[::-1]) for load in meta.loads]
        return msgspec.structs.replace(meta, loads=loads)


class FillsOneGroupsBlocksWithAnothers(MemoryPullConnector):
    """The blocks of all KV groups are read, and not into the blocks of their own group."""

    scheduler_type = _MixedGroupsScheduler


class _HalfCheckedWorker(MemoryPullWorker):
    def check_generations(self, table: BlockTable, load: BlockLoad) -> None:
        half = len(load.source) // 16 * 8
        super().check_generations(
            table, msgspec.structs.replace(load, source=load.source[:half], generations=load.generations[:half])
        )


class ChecksTheFirstGroupOnly(MemoryPullConnector):
    """What lies in the first KV group's blocks decides whether a load counts."""

    worker_type = _HalfCheckedWorker


class _AnyAttemptWorker(MemoryPushWorker):
    def land(self, send: PushSend, content: Content, digests: bytes, sender: MemoryPushWorker) -> bool:
        ticket = send.ticket
        live = next((key for key in self._incoming if key[0] == ticket.transfer_id), ticket.key)
        other = msgspec.structs.replace(send, ticket=msgspec.structs.replace(ticket, attempt=live[1]))
        return super().land(other, content, sender.digests_of(other, self), sender)


class IgnoresTheAttempt(MemoryPushConnector):
    """What is sent for one attempt lands in the blocks of the next one."""

    worker_type = _AnyAttemptWorker


class _ImpatientWorker(MemoryPushWorker):
    def __init__(self, connector: MemoryPushConnector) -> None:
        super().__init__(connector)
        self._since: dict[TransferKey, float] = {}

    def get_finished(self) -> TransferResults:
        for key in self._incoming:
            begun = self._since.setdefault(key, time.monotonic())
            if begun + self.options.transfer_timeout_s <= time.monotonic():
                self._since[key] = float("inf")  # once
                self.receive_failed(key, TransferTimeout.code)
        return super().get_finished()

    def stop_receiving(self, key: TransferKey, error: TransferError) -> None:
        if self._since.get(key) != float("inf"):
            super().stop_receiving(key, error)


class FreesAtTheDeadline(MemoryPushConnector):
    """A load fails when its deadline has passed, and what comes later still lands."""

    worker_type = _ImpatientWorker


class _OwnAttemptScheduler(StandInStoreScheduler):
    def _tail_name(self, request: RequestView) -> StoreName:
        return request.transfer_key


class LooksForItsOwnAttempt(StandInStoreConnector):
    """A reader looks for the tail under its own attempt, whoever handed it off."""

    scheduler_type = _OwnAttemptScheduler


class _EagerWorker(StandInStoreWorker):
    def save_kv_layer(self, layer: int, kv_cache: Any, meta: KVConnectorMetadata) -> None:
        super().save_kv_layer(layer, kv_cache, meta)
        assert isinstance(meta, StandInStoreMetadata)
        for key, _, name in meta.stage:
            self.store.put(name, self._staging[meta.step_id, key, name])


class VisibleBeforeComplete(StandInStoreConnector):
    """A block can be found as soon as its first layer is there."""

    worker_type = _EagerWorker


class _UnstagedScheduler(StandInStoreScheduler):
    def _stage(self, scheduled: ScheduledRange, step_id: int) -> list[tuple[TransferKey, int, StoreName]]:
        return []


class _LateWorker(StandInStoreWorker):
    def __init__(self, connector: StandInStoreConnector) -> None:
        super().__init__(connector)
        self._waiting: deque[StandInStoreMetadata] = deque()

    def commit_staged(self, meta: StandInStoreMetadata) -> None:
        self._waiting.append(meta)
        if len(self._waiting) > LATE_STEPS:
            super().commit_staged(self._waiting.popleft())


class ServesPoisonOnReplay(StandInStoreConnector):
    """Saves read their blocks some steps later, and do not hold them meanwhile."""

    scheduler_type = _UnstagedScheduler
    worker_type = _LateWorker


class _WrongUnit(StoreNews):
    def take(self) -> list[TierEvents]:
        return [msgspec.structs.replace(events, tokens_per_key=HASH_BLOCK_SIZE) for events in super().take()]


class TellsOneKeyForFourBlocks(MemoryStoreConnector):
    """Each key that is told stands for 64 tokens, and is said to stand for 16."""

    def make_scheduler_side(self) -> SchedulerConnector:
        side = super().make_scheduler_side()
        assert isinstance(side, StoreScheduler)
        side._news = _WrongUnit(self.store, self.cut)
        return side
