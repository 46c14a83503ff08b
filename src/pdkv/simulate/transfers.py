"""Transfers of a simulation: pulls, pushes and host memory, whose scheduler sides are the real ones.

A transfer takes its time on both engines' links, one at a time on each, and moves nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from pdkv.connectors.base import (
    NO_TRANSFERS,
    ConnectorConfig,
    Direction,
    KVConnectorMetadata,
    SchedulerConnector,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata, PullScheduler
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler, PushSend
from pdkv.connectors.plan import INTERFACE, PUSH_ORDERS, ConnectorPlan
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.connectors.store.plan import StoreCut, StoreLoad, StoreMetadata, StoreSave
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.errors import KVNotFound, PeerGone, TransferCancelled, TransferError
from pdkv.kv_store.base import Buffer
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.terms import NO_TERMS
from pdkv.simulate.loop import VirtualTime
from pdkv.wire.kv import EngineCard

PULL = ConnectorPlan(interface=INTERFACE, kind="pull", name="simulated", lends=True)
PUSH = ConnectorPlan(interface=INTERFACE, kind="push", name="simulated", lends=True,
                     orders=(*PUSH_ORDERS, "concurrent"))  # fmt: skip
OPTIONS = StoreConnectorOptions()
HOST = ConnectorPlan(interface=INTERFACE, kind="store", name="store", content_addressed=True,
                     hit_tokens=OPTIONS.tokens_per_value)  # fmt: skip


class Engine(Protocol):
    """What transfers need of an engine."""

    name: str
    card: EngineCard
    loop: VirtualTime
    options: Any
    device: Any
    peers: Any  # engines by name
    transfers: Any
    link_free_at: float
    token_bytes: int

    def wake(self) -> None:
        """Act on a transfer that has ended."""

    def stands_still(self, call: Callable[..., object], *args: Any) -> bool:
        """Whether its process is stopped; if so, the call is made when it goes on."""
        ...


class SimulatedWorker(WorkerConnector):
    """What has ended since the engine last asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._epoch = engine, engine.card.epoch
        self._forget()

    @property
    def _lives(self) -> bool:
        return self._engine.name in self._engine.peers and self._engine.card.epoch == self._epoch

    def _forget(self) -> None:
        self._sent: dict[TransferKey, TransferOutcome] = {}
        self._not_sent: dict[TransferKey, TransferOutcome] = {}
        self._done: dict[TransferKey, TransferOutcome] = {}
        self._failed: dict[TransferKey, TransferOutcome] = {}

    def get_finished(self) -> TransferResults:
        results = TransferResults(self._sent, self._not_sent, self._done, self._failed)
        if not results:
            return NO_TRANSFERS
        self._forget()
        return results

    def _outcome(self, num_tokens: int, seconds: float = 0.0) -> TransferOutcome:
        return TransferOutcome(num_bytes=num_tokens * self._engine.token_bytes, seconds=seconds)

    def _carry(self, peer: str, num_tokens: int, not_before: float = 0.0) -> float:
        """Occupy the links; returns when the tokens land. `not_before`: when the last of them are sent."""
        engine, profile = self._engine, self._engine.options.profile
        ends_of = [engine, engine.peers.get(peer) or engine]
        began = max(engine.loop.clock.now(), *(end.link_free_at for end in ends_of))
        for end in ends_of:
            end.link_free_at = max(began + num_tokens * profile.transfer_token_s, not_before)
        lands: float = engine.link_free_at + profile.transfer_s
        return lands


class PullWorker(SimulatedWorker):
    """Reads from other engines' pools, also of those that stand still: their memory is shared."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._loads: dict[TransferKey, list[BlockLoad]] = {}  # by transfer, the parts that have not landed

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PullMetadata)
        loop = self._engine.loop
        for load in meta.loads:
            if load.continues and load.key not in self._loads:
                continue  # an earlier part has failed
            self._loads.setdefault(load.key, []).append(load)
            lands = self._carry(load.engine, load.stop - load.start)
            loop.call_at(lands, self._land, load, lands - loop.clock.now())

    def _land(self, load: BlockLoad, seconds: float) -> None:
        parts = self._loads.get(load.key, [])
        if not any(each is load for each in parts):
            return
        parts.remove(load)
        source = self._engine.peers.get(load.engine)
        if source is None or source.card.epoch != load.epoch:
            del self._loads[load.key]
            self._failed[load.key] = TransferOutcome(PeerGone.code)
        elif not (parts or load.more):  # they land in order
            del self._loads[load.key]
            self._done[load.key] = self._outcome(load.stop - load.start, seconds)
        self._engine.wake()

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        if direction == "receive" and self._loads.pop(key, None) is not None:
            self._failed[key] = TransferOutcome(TransferCancelled.code)


class PushWorker(SimulatedWorker):
    """Writes into other engines' pools, layer by layer while a step computes them."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._wanted: dict[TransferKey, int] = {}  # tokens that have not come, by receive
        self._sending: dict[TransferKey, dict[TransferKey, None]] = {}  # batches under way, and itself until all are

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PushMetadata)
        for key in meta.dropped:
            self._give_up(key, TransferCancelled.code)
        for key in meta.refused:
            self._failed[key] = TransferOutcome(TransferError.code)
        for key in meta.unsendable:
            self._sending.setdefault(key, {})
            self._give_up(key, KVNotFound.code)
        self._wanted.update((ticket.key, ticket.stop - ticket.start) for ticket in meta.receives)
        for send in meta.sends:
            self._post(send)
        for key in meta.completed:
            self._arrived(key, key)

    def _post(self, send: PushSend) -> None:
        self._sending.setdefault(send.key, {send.key: None})[send.batch] = None
        profile, num_tokens = self._engine.options.profile, send.stop - send.start
        last_layer_s = num_tokens * profile.transfer_token_s / profile.num_layers
        sent_at = self._engine.device.step_ends + last_layer_s if send.during_step else 0.0
        self._engine.loop.call_at(self._carry(send.ticket.engine, num_tokens, sent_at), self._land, send)

    def _land(self, send: PushSend) -> None:
        if send.batch not in self._sending.get(send.key, ()) or not self._lives:
            return
        peer = self._engine.peers.get(send.ticket.engine)
        if peer is not None and peer.stands_still(self._land, send):
            return
        num_tokens = send.stop - send.start
        reader = peer.transfers if peer is not None and peer.card.epoch == send.ticket.epoch else None
        if isinstance(reader, PushWorker) and reader.take(send.ticket.key, num_tokens):
            self._sent[send.batch] = self._outcome(num_tokens)
            self._arrived(send.key, send.batch)
        else:
            self._give_up(send.key, PeerGone.code)
        self._engine.wake()

    def take(self, key: TransferKey, num_tokens: int) -> bool:
        """Write tokens into the blocks of a receive here; False: it is not wanted any more."""
        if (left := self._wanted.pop(key, None)) is None:
            return False
        if left > num_tokens:
            self._wanted[key] = left - num_tokens
        else:
            self._done[key] = self._outcome(num_tokens)
            self._engine.wake()
        return True

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        if direction == "send":
            self._give_up(key, TransferCancelled.code)
        elif self._wanted.pop(key, None) is not None:
            self._failed[key] = TransferOutcome(TransferCancelled.code)

    def _arrived(self, key: TransferKey, part: TransferKey) -> None:
        parts = self._sending.get(key, {})
        parts.pop(part, None)
        if key in self._sending and not parts:
            del self._sending[key]
            self._sent[key] = TransferOutcome()

    def _give_up(self, key: TransferKey, code: str) -> None:
        if (parts := self._sending.pop(key, None)) is not None:
            self._not_sent.update(dict.fromkeys((*parts, key), TransferOutcome(code)))


class Pulls(PullScheduler):
    """The scheduler side of a pull from any engine of the simulation, all of which have one layout."""

    def __init__(self, config: ConnectorConfig, peers: Mapping[str, Any]) -> None:
        assert config.block_table is not None
        super().__init__(config, config.block_table, PeerCards(config))
        self._engines = peers

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        source = self._engines.get(engine)
        return self.block_size if source is not None and source.card.epoch == epoch else None

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """No effect: the simulation knows who is there."""


class Pushes(PushScheduler):
    """The scheduler side of a push to any engine of the simulation."""

    def __init__(self, config: ConnectorConfig, peers: Mapping[str, Any]) -> None:
        super().__init__(config, PeerCards(config))
        self._engines = peers

    def may_receive_from(self, engine: str, epoch: str) -> bool:
        source = self._engines.get(engine)
        return source is not None and source.card.epoch == epoch


# --- host memory ------------------------------------------------------------------------------------------------------


class HostMemory(MemoryStore):
    """One engine's segment: values as large as they would be, without contents. It outlives the engine's process."""

    is_shared: ClassVar[bool] = True
    scope = "simulated"

    def __init__(self, name: str, capacity: int, segments: Sequence["HostMemory"]) -> None:
        super().__init__(name, capacity)
        self._segments = segments

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        for segment in self._segments:
            there = super(HostMemory, segment).contains(keys)
            found = [a or b for a, b in zip(found, there, strict=True)]
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        for key, value in reversed(items):
            self._open_shelf().insert(key, np.asarray(value), NO_TERMS)


class Lookups(KeyLookups):
    """Lookups that are answered at once."""

    def _start(self) -> None:
        """No threads."""

    def _begin(self, keys: Sequence[bytes], now: float, *, wanted: bool, is_chain: bool) -> bool:
        begun = super()._begin(keys, now, wanted=wanted, is_chain=is_chain)
        self._answer_all()
        return begun


class HostWorker(SimulatedWorker):
    """Loads and saves, one of each at a time."""

    def __init__(self, engine: Engine, memory: HostMemory, cut: StoreCut) -> None:
        super().__init__(engine)
        self._memory, self._cut = memory, cut
        self._reading: set[TransferKey] = set()
        self._free_at = {"receive": 0.0, "send": 0.0}

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        loop = self._engine.loop
        for load in meta.loads:
            self._reading.add(load.key)
            loop.call_at(self._occupy("receive", load.stop - load.start), self._read, load)
        for save in meta.saves:
            num_tokens = sum(value.num_tokens for value in save.values)
            loop.call_at(self._occupy("send", num_tokens), self._write, save)

    def _occupy(self, direction: Direction, num_tokens: int) -> float:
        began = max(self._engine.loop.clock.now(), self._free_at[direction])
        self._free_at[direction] = began + num_tokens * self._engine.options.profile.host_token_s
        return self._free_at[direction]

    def _read(self, load: StoreLoad) -> None:
        if load.key in self._reading:
            self._reading.remove(load.key)
            if all(self._memory.contains([key for value in load.values for key in self._cut.own_keys(value)])):
                self._done[load.key] = self._outcome(load.stop - load.start)
            else:
                self._failed[load.key] = TransferOutcome(KVNotFound.code)
            self._engine.wake()

    def _write(self, save: StoreSave) -> None:
        if self._lives:
            values = [*save.values, *save.check]
            there = self._memory.contains([self._cut.own_keys(value)[0] for value in values])
            new = [value for value, is_there in zip(values, there, strict=True) if not is_there]
            num_bytes = self._engine.token_bytes
            self._memory.put([(self._cut.own_keys(v)[0], _empty(v.num_tokens * num_bytes)) for v in new])
            self._sent[save.batch] = self._outcome(sum(value.num_tokens for value in new))
            self._engine.wake()

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        if direction == "receive" and key in self._reading:
            self._reading.remove(key)
            self._failed[key] = TransferOutcome(TransferCancelled.code)


def _empty(num_bytes: int) -> Buffer:
    """A value of that size, which takes no memory."""
    return np.broadcast_to(np.uint8(0), num_bytes)  # type: ignore[return-value]


def host_sides(
    engine: Engine, config: ConnectorConfig, memory: HostMemory
) -> tuple[SchedulerConnector, WorkerConnector]:
    """Both sides of the tier."""
    cut = StoreCut(config, tokens_per_value=OPTIONS.tokens_per_value, layer_groups=1)
    loop = engine.loop
    lookups = Lookups(memory, cut.suffixes, lambda: loop.call_soon(engine.wake), timeout_s=1.0, clock=loop.clock)
    return StoreScheduler(config, OPTIONS, cut, lookups, StoreNews(memory, cut)), HostWorker(engine, memory, cut)
