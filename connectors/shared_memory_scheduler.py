"""The scheduler side of `shared_memory`: finds KV in peers' arenas, and names blocks and generations for hand-offs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import (
    ASK_AGAIN,
    NO_MATCH,
    ConnectorConfig,
    Finished,
    MatchedTokens,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.planning import whole_blocks
from pdkv.connectors.shared_arena import PeerArena
from pdkv.connectors.shared_block_table import SharedBlockTable, Words, key_words
from pdkv.connectors.shared_memory_worker import BlockLoad, SharedMemoryMetadata
from pdkv.connectors.shared_peers import PeerArenas
from pdkv.errors import PdkvError
from pdkv.messages import MAX_BLOB_BYTES, EngineCard, KVHandoff


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """--connector-config of this connector."""

    io_threads: int = 1  # threads that copy
    min_hit_tokens: int = 64  # a shorter find in another engine's cache is computed rather than copied
    load_timeout_s: float = 10.0  # deadline of one copy, from its start on
    content_lookup: bool = True  # whether other engines' caches are looked through at all


class BlockRun(NamedTuple):
    """Blocks [first, first + num_blocks) have that generation."""

    first: int
    num_blocks: int
    generation: int


_RUNS = msgspec.msgpack.Decoder(list[BlockRun])


class _Match(NamedTuple):
    """What can be loaded, and from where: a BlockLoad before its blocks are known."""

    engine: str
    epoch: str
    start: int
    stop: int
    unit: int
    source: Sequence[int]
    generations: Sequence[int]
    is_handoff: bool = True


class SharedMemoryScheduler(SchedulerConnector):
    """Finds KV in peers' arenas and names blocks for hand-offs. Looks into shared memory, never waits for it."""

    observes_steps: ClassVar[bool] = False

    def __init__(
        self, config: ConnectorConfig, table: SharedBlockTable, options: SharedMemoryOptions, peers: PeerArenas
    ) -> None:
        self._block_size = config.layout.block_size
        self._table = table
        self._options = options
        self._peers = peers
        self._matches: dict[TransferKey, _Match] = {}  # of the last question, until the blocks are allocated
        self._queued: dict[TransferKey, BlockLoad] = {}  # for the next metadata
        self._loading: set[TransferKey] = set()  # queued or with the worker

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        self._matches.pop(request.transfer_key, None)
        if request.kv == "await_peer":
            if request.handoff is None:
                return NO_MATCH if request.kv_ready is False else ASK_AGAIN
            match = self._match_handoff(request, request.handoff, num_computed_tokens)
        else:
            match = self._match_content(request, num_computed_tokens)
        if match is None:
            return NO_MATCH
        self._matches[request.transfer_key] = match
        return MatchedTokens(match.stop - match.start)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> bytes | None:
        """Queue the load of what the last question found. Every queued load is answered, by success or failure."""
        key = request.transfer_key
        match = self._matches.pop(key, None)
        if num_external_tokens <= 0 or key in self._loading:
            return None
        if match is None:  # nothing was found: a load without a source fails with a reason
            start = request.num_wanted - num_external_tokens
            match = _Match("", "", start, request.num_wanted, self._block_size, [], [])
        stop = min(match.start + num_external_tokens, match.stop)
        num_sources = -(-stop // match.unit) - match.start // match.unit
        self._queued[key] = BlockLoad(
            key=key,
            engine=match.engine,
            epoch=match.epoch,
            start=match.start,
            stop=stop,
            unit=match.unit,
            source=match.source[:num_sources],
            generations=match.generations[:num_sources],
            block_ids=list(block_ids[match.start // self._block_size : -(-stop // self._block_size)]),
            is_handoff=match.is_handoff,
        )
        self._loading.add(key)
        return None

    def build_connector_meta(self, view: SchedulerView) -> SharedMemoryMetadata:
        for keys in (view.finished, view.aborted, view.preempted):
            for key in keys:
                self._matches.pop(key, None)
        loads, self._queued = list(self._queued.values()), {}
        return SharedMemoryMetadata(step_id=view.step_id, loads=loads)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> Finished:
        self._matches.pop(request.transfer_key, None)
        if request.kv != "handoff":
            return Finished(hold_blocks=False)
        generations = [self._table.generation(block_id) for block_id in block_ids]
        payload = encode_blocks(block_ids, generations)
        if len(payload) > MAX_BLOB_BYTES:  # too scattered to be named: decode computes it by itself, loudly
            return Finished(hold_blocks=False, payload=b"")
        return Finished(hold_blocks=True, payload=payload)

    def update_connector_output(self, results: TransferResults) -> None:
        self._loading.difference_update(results.finished_receiving, results.failed_receiving)

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        self._peers.replace(cards)
        for peer in self._peers.incarnations():  # now, so that what is open does not depend on the traffic
            self._open(*peer)

    def shutdown(self) -> None:
        self._peers.clear()
        self._matches.clear()

    def _open(self, engine: str, epoch: str) -> PeerArena | None:
        try:
            return self._peers.get(engine, epoch)
        except PdkvError:  # logged where it was found out; here it means: nothing to be had from there
            return None

    def _match_handoff(self, request: RequestView, handoff: KVHandoff, start: int) -> _Match | None:
        peer = self._open(handoff.engine, handoff.epoch)
        stop = min(request.num_wanted, handoff.num_tokens)
        blocks = decode_blocks(handoff.payload)
        if peer is None or blocks is None or start >= stop:
            return None
        unit = peer.header.layout.block_size
        first, last = start // unit, -(-stop // unit)
        block_ids, generations = blocks
        if last > len(block_ids):
            return None
        return _Match(handoff.engine, handoff.epoch, start, stop, unit, block_ids[first:last], generations[first:last])

    def _match_content(self, request: RequestView, start: int) -> _Match | None:
        """The longest chain of whole blocks behind `start` that one peer has."""
        stop = request.num_wanted // self._block_size * self._block_size
        shortest = max(self._options.min_hit_tokens, self._block_size)
        if not self._options.content_lookup or start % self._block_size or stop - start < shortest:
            return None
        keys = request.block_keys[start // HASH_BLOCK_SIZE : stop // HASH_BLOCK_SIZE]
        probe = -(-shortest // HASH_BLOCK_SIZE) - 1  # a chain without this key is too short: most peers end here
        if len(keys) <= probe:
            return None
        words: Words | None = None
        best: _Match | None = None
        for engine, epoch in self._peers.incarnations():
            peer = self._open(engine, epoch)
            if peer is None or not peer.table.may_have(keys[probe]):
                continue
            words = key_words(keys) if words is None else words
            found = peer.table.find_chain(words)
            end = start + len(found.units) * HASH_BLOCK_SIZE // self._block_size * self._block_size
            if end - start >= shortest and (best is None or end > best.stop):
                count = (end - start) // HASH_BLOCK_SIZE
                best = _Match(
                    engine, epoch, start, end, HASH_BLOCK_SIZE,
                    found.units[:count].tolist(), found.generations[:count].tolist(), is_handoff=False,
                )  # fmt: skip
                best = _in_whole_blocks(best, peer.header.layout.block_size)
        return best


def _in_whole_blocks(match: _Match, block_size: int) -> _Match:
    """Name the peer's blocks instead of their hash blocks, where they are taken from their beginning and in order."""
    per_block = block_size // HASH_BLOCK_SIZE
    blocks = whole_blocks(match.source, per_block)
    if blocks is None or match.start % block_size:
        return match
    return match._replace(unit=block_size, source=blocks, generations=match.generations[::per_block])


def encode_blocks(block_ids: Sequence[int], generations: Sequence[int]) -> bytes:
    """A hand-off's payload: msgpack of runs of adjacent blocks that have one generation."""
    runs: list[BlockRun] = []
    for block_id, generation in zip(block_ids, generations, strict=True):
        last = runs[-1] if runs else None
        if last is not None and block_id == last.first + last.num_blocks and generation == last.generation:
            runs[-1] = last._replace(num_blocks=last.num_blocks + 1)
        else:
            runs.append(BlockRun(block_id, 1, generation))
    return msgspec.msgpack.encode(runs)


def decode_blocks(payload: bytes) -> tuple[list[int], list[int]] | None:
    """(block ids, generations) of a hand-off's payload; None: it names none."""
    try:
        runs = _RUNS.decode(payload)
    except msgspec.DecodeError:
        return None
    if any(run.first < 0 or run.num_blocks < 1 for run in runs) or sum(run.num_blocks for run in runs) > 1 << 20:
        return None
    block_ids = [block_id for run in runs for block_id in range(run.first, run.first + run.num_blocks)]
    return block_ids, [run.generation for run in runs for _ in range(run.num_blocks)]
