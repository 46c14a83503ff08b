"""One rank of an engine inside a host: the connector's two sides and a plain KV pool, without a model."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.content import CANARY, GARBAGE, Values, describe_difference, kv_values
from pdkv.connector_kit.rig.damage import Damage, How, has_digests
from pdkv.connector_kit.rig.watch import StepWatch, resident_bytes
from pdkv.connectors.base import (
    NO_TRANSFERS,
    OBSERVES_NOTHING,
    ConnectorConfig,
    KVConnectorMetadata,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.connectors.registry import build_connector
from pdkv.connectors.transfer.planning import Ids, as_ids, blocks_of, rank_heads
from pdkv.errors import IncompatiblePeers, TransferError
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.tiers import TierEvents

if TYPE_CHECKING:
    import torch


class HostedRank:
    """Everything of one rank, built in the same order as in the engine. The kit calls its methods from afar."""

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        table = LocalBlockTable(config.num_blocks)
        config = replace(config, block_table=table)
        self._engine, self._rank = config.engine, config.rank
        self._layout = config.layout
        self._heads = rank_heads(config.rank, config.tp, config.layout.kv_heads_of_all_ranks)
        self._watch = StepWatch(notify)
        self._metas: dict[int, KVConnectorMetadata] = {}
        self._expected: dict[TransferKey, tuple[list[int], p.TokenRange | None]] = {}  # loads
        self._connector = built = build_connector(config, notify)
        self._table: BlockTable = table if built.block_table is None else built.block_table
        self._scheduler = built.scheduler() if config.rank == 0 else None
        self._worker = built.worker()
        pool = built.kv_cache()
        self._pool = pool = _new_pool(config.layout, config.num_blocks) if pool is None else pool
        self._words = _words(pool)
        self._known_words = self.fill_pool(self._words)  # if only this engine and its loads wrote it
        self._view, self._known = _tokens_first(self._words), _tokens_first(self._known_words)
        self._worker.register_kv_caches(pool)
        self._damage: Damage | None = None
        self._blob = self._worker.handshake()

    def fill_pool(self, pool: Values) -> Values:
        """Give the pool its first content; returns a copy of it (or, with nothing to compare, an empty pool)."""
        pool[:] = CANARY
        return pool.copy()

    def take_calls(self) -> list[p.CallRecord]:
        """Records of the connector calls since the last time."""
        return self._watch.take()

    def instrument(self, on: bool) -> None:
        """Set whether strict calls are traced, which costs additional CPU time."""
        self._watch.traced = on

    def built(self) -> p.Built:
        """The connector's description of itself."""
        observes = OBSERVES_NOTHING if self._scheduler is None else self._scheduler.observes
        return p.Built(
            observes=(observes.scheduled.value, observes.confirmed.value, *observes[2:]),
            blob=self._blob,
            has_digests=has_digests(self._worker),
            error_codes=sorted(_codes(TransferError)),
        )

    def close(self) -> None:
        """Shut down as an engine does; twice, since it must be idempotent."""
        for _ in range(2):
            self._worker.shutdown()
        for _ in range(2):
            if self._scheduler is not None:
                self._scheduler.shutdown()
        for _ in range(2):
            self._connector.shutdown()

    # --- scheduler side -------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerConnector:
        """The scheduler side, which rank 0 has."""
        assert self._scheduler is not None
        return self._scheduler

    def ask_scheduler(self, name: str, *arguments: Any) -> Any:
        """Call a method of the scheduler side."""
        return self._watch.call(name, getattr(self.scheduler, name), *arguments)

    def plan(self, view: SchedulerView, encode: bool) -> p.Planned:
        """Call build_connector_meta. `encode`: whether other ranks will need it."""
        meta = self._metas[view.step_id] = self.ask_scheduler("build_connector_meta", view)
        return p.Planned(meta.holds, msgspec.msgpack.encode(meta) if encode else None)

    def take_events(self) -> list[TierEvents]:
        """Call take_events, if there are tiers."""
        tiers = self.scheduler.tiers
        return [] if tiers is None else list(self._watch.call("take_events", tiers.take_events))

    def is_pending(self) -> bool:
        """Ask for has_pending_work."""
        return self._watch.call("has_pending_work", lambda: self.scheduler.has_pending_work)

    def write_table(self, entries: list[p.TableEntry]) -> None:
        """End or enter the content of these blocks in the block table."""
        for block_id, keys in entries:
            if keys is None:
                self._table.reuse(block_id)
            else:
                self._table.publish(block_id, keys)

    def update_peers(self, cards: list[EngineCard], added: list[EngineCard], removed: list[EngineCard]) -> list[str]:
        """Tell both sides the current peers; returns the refusals that were logged."""
        with _logged_refusals() as refusals:
            if self._scheduler is not None:
                self._watch.call("update_peers", self._scheduler.update_peers, cards)
            self._watch.call("update_peers", self._worker.update_peers, added, removed)
        return refusals

    # --- worker side ----------------------------------------------------------------------------------------------

    def execute(self, step: p.StepPart) -> p.Executed:
        """Run a step in the order of base.py; layers run without hooks if the metadata needs none."""
        worker, call = self._worker, self._watch.call
        if step.meta is not None and step.begin:
            decoded = msgspec.msgpack.decode(step.meta, type=self._worker.metadata_type)
            self._metas[step.step_id] = decoded
        meta = self._metas[step.step_id]
        if step.begin:
            for cancel in step.cancels:
                call("cancel", worker.cancel, *cancel)
            call("start_load_kv", worker.start_load_kv, meta)
        first, stop = step.layers or (0, len(self._layout.places))
        if step.writes or step.garbage:
            for layer in range(first, stop):
                self._compute_layer(step, layer, meta)
        if not step.end:
            return p.Executed(NO_TRANSFERS, [])
        call("wait_for_save", worker.wait_for_save)
        del self._metas[step.step_id]
        return self._report(call("get_finished", worker.get_finished))

    def _compute_layer(self, step: p.StepPart, layer: int, meta: KVConnectorMetadata) -> None:
        if meta.needs_layer_hooks:
            self._watch.call("wait_for_layer_load", self._worker.wait_for_layer_load, layer)
        for tokens in step.writes:
            self._write(tokens, layer, garbage=not tokens.text)
        if layer < self._layout.num_layers:  # of a block
            for pool in (self._view, self._known):
                pool[step.garbage, :, layer] = GARBAGE
        if meta.needs_layer_hooks:
            self._watch.call("save_kv_layer", self._worker.save_kv_layer, layer, self._pool, meta)

    def _report(self, results: TransferResults) -> p.Executed:
        """Check arrived data before it can change; blocks of ended loads must not be written any more."""
        wrong: list[tuple[TransferKey, str]] = []
        for key in (*results.finished_receiving, *results.failed_receiving):
            if key not in self._expected:
                continue
            block_ids, wanted = self._expected.pop(key)
            self._known_words[block_ids] = self._words[block_ids]
            if key in results.finished_receiving and wanted is not None:
                difference = self._difference(wanted)
                if difference:
                    wrong.append((key, difference))
        return p.Executed(results, wrong)

    # --- the pool -------------------------------------------------------------------------------------------------

    def expect(self, key: TransferKey, block_ids: list[int], wanted: p.TokenRange | None) -> None:
        """Note that a load begins: these blocks may be written from outside until its end is reported, and then
        `wanted` must be right.
        """
        self._expected[key] = (block_ids, wanted)

    def fill(self, tokens: p.TokenRange) -> None:
        """Write tokens, or (text empty) garbage, into blocks outside of any step."""
        self._write(tokens, garbage=not tokens.text)

    def written(self, block_ids: list[int]) -> float:
        """The share of a load that has arrived, by one word of each row."""
        return float(np.mean(self._words[block_ids, ..., 0] != self._known_words[block_ids, ..., 0]))

    def spoil(self, how: How, seed: int = 0, targets: list[list[int]] = []) -> None:  # noqa: B006 (sent, never kept)
        """Change the digested content after the next digest that is made here (damage.py)."""
        self._damage = Damage(self._worker, how, seed, targets)

    def _places(self, tokens: p.TokenRange, group: int) -> tuple[Ids, Ids, Ids]:
        """Block id, offset in the block and number of the token whose KV is there, for each row that there is of a KV
        group. All rows of a state's page are its last token's.
        """
        size, groups = self._layout.block_size, self._layout.groups
        positions = of = np.arange(tokens.start, tokens.stop, dtype=np.int64)
        if groups and groups[group].state:
            entries = blocks_of(tokens.start, tokens.stop, size)
            positions = np.arange(entries.start * size, entries.stop * size, dtype=np.int64)
            of = np.minimum(positions // size * size + size, tokens.stop) - 1
        blocks = as_ids(tokens.block_tables[group])[positions // size]
        there = blocks >= 0
        return blocks[there], positions[there] % size, of[there] - tokens.start

    def _write(self, tokens: p.TokenRange, layer: int | None = None, *, garbage: bool = False) -> None:
        """Write one layer of the model, or all; in a KV group, only tokens that have a block there."""
        values: Values | int = GARBAGE
        if not garbage:
            values = kv_values(tokens.text, tokens.start, tokens.stop, self._layout, self._heads)
        for number, (group, index) in enumerate(self._layout.places):
            if layer not in (None, number):
                continue
            blocks, offsets, of = self._places(tokens, group)
            own = values if isinstance(values, int) else values[of, number]
            for pool in (self._view, self._known):
                pool[:, :, index][blocks, offsets] = own

    def _difference(self, tokens: p.TokenRange) -> str:
        """What is wrong at the tokens' places; positions before a window are not checked."""
        expected = kv_values(tokens.text, tokens.start, tokens.stop, self._layout, self._heads)
        found = expected.copy()
        for number, (group, index) in enumerate(self._layout.places):
            blocks, offsets, of = self._places(tokens, group)
            rows = self._view[:, :, index][blocks, offsets]
            wrong = (rows != expected[of, number]).any(axis=(1, 2, 3))
            found[of[wrong], number] = rows[wrong]  # one of a state's rows may be wrong
        return describe_difference(found, expected, tokens.start, self._heads)

    def unspoil(self) -> p.Spoilt:
        """Restore the damaged blocks."""
        damage, self._damage = self._damage, None
        if damage is None:
            return p.Spoilt(0, [])
        damage.undo()
        return p.Spoilt(damage.num_done, damage.struck)

    def foreign_writes(self) -> list[int]:
        """Blocks that were written from outside although no load owned them."""
        exposed = {block for block_ids, _ in self._expected.values() for block in block_ids}
        num_blocks = len(self._words)
        same = self._words.reshape(num_blocks, -1) == self._known_words.reshape(num_blocks, -1)
        return [block for block in np.flatnonzero(~same.all(axis=1)).tolist() if block not in exposed]

    def copy_cost(self, block_ids: list[int]) -> float:
        """CPU seconds that a plain copy of these blocks takes on one thread."""
        blocks = self._words.reshape(len(self._words), -1)
        target = np.zeros_like(blocks[: len(block_ids)])
        start = time.thread_time()
        np.take(blocks, block_ids, axis=0, out=target, mode="clip")
        return time.thread_time() - start


def _new_pool(layout: KVLayout, num_blocks: int) -> "torch.Tensor":
    import torch

    return torch.zeros(layout.pool_shape(num_blocks), dtype=getattr(torch, layout.dtype))


def _words(pool: "torch.Tensor") -> Values:
    """The pool's memory as int32, in the pool's shape."""
    import torch

    words: Values = pool.view(torch.int32).numpy()
    return words


def _tokens_first(words: Values) -> Values:
    """A pool as (num_blocks, block_size, num_layers, sides, num_kv_heads, head_size)."""
    return words.transpose(0, 4, 1, 2, 3, 5)


def _codes(error: type[TransferError]) -> set[str]:
    return {error.code}.union(*(_codes(child) for child in error.__subclasses__()))


@contextmanager
def _logged_refusals() -> Iterator[list[str]]:
    """IncompatiblePeers in warnings logged anywhere in the process."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments = record.args if isinstance(record.args, tuple) else ()
            errors = [a for a in arguments if isinstance(a, IncompatiblePeers)]
            if record.exc_info and isinstance(record.exc_info[1], IncompatiblePeers):
                errors.append(record.exc_info[1])
            found.extend(str(error) for error in errors)

    collector = Collector(logging.WARNING)
    logging.getLogger().addHandler(collector)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(collector)


def resource_usage() -> p.Usage:
    """Descriptors, threads and memory of this process now."""
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own
    threads = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            threads.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return p.Usage(sorted(descriptors), sorted(threads), resident_bytes())
