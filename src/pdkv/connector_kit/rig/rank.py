"""One rank of an engine inside a host: the connector's two sides and a plain KV pool, without a model."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.content import CANARY, GARBAGE, Values, describe_difference, kv_values
from pdkv.connector_kit.rig.damage import Damage, has_digests
from pdkv.connector_kit.rig.watch import StepWatch, resident_bytes
from pdkv.connectors.base import NO_TRANSFERS, KVConnectorMetadata, TransferKey, TransferResults
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.registry import build_connector
from pdkv.connectors.transfer.planning import Ids, as_ids, rank_heads
from pdkv.errors import IncompatiblePeers, TransferError
from pdkv.wire.kv import KVLayout

if TYPE_CHECKING:
    import torch


class HostedRank:
    """Everything of one rank, built in the same order as in the engine."""

    def __init__(self, build: p.Build, notify: Callable[[], None]) -> None:
        config = replace(build.config, block_table=LocalBlockTable(build.config.num_blocks))
        self._engine, self._rank = config.engine, config.rank
        self._layout = config.layout
        self._heads = rank_heads(config.rank, config.tp, config.layout.kv_heads_of_all_ranks)
        self._watch = self.make_watch(notify)
        self._metas: dict[int, KVConnectorMetadata] = {}
        self._expected: dict[TransferKey, p.Expect] = {}
        self._connector = built = build_connector(config, notify)
        self._table = config.block_table if built.block_table is None else built.block_table
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

    def make_watch(self, notify: Callable[[], None]) -> StepWatch:
        """The watch that runs all connector calls."""
        return StepWatch(notify)

    def fill_pool(self, pool: Values) -> Values:
        """Give the pool its first content; returns a copy of it (or, with nothing to compare, an empty pool)."""
        pool[:] = CANARY
        return pool.copy()

    def built(self) -> p.Built:
        """The connector's description of itself."""
        return p.Built(
            observes_scheduled=self._scheduler is not None and bool(self._scheduler.observes.scheduled),
            observes_confirmed=self._scheduler is not None and bool(self._scheduler.observes.confirmed),
            blob=self._blob,
            has_digests=has_digests(self._worker),
            error_codes=sorted(_codes(TransferError)),
        )

    def run(self, command: p.AnyCommand) -> object:
        """Execute one command of the kit."""
        match command:
            case p.Execute():
                return self._execute(command)
            case p.UpdatePeers():
                return self._update_peers(command)
            case p.Expect():
                self._expected[command.key] = command
            case p.Spoil(how=how, seed=seed, targets=targets):
                self._damage = Damage(self._worker, how, seed, targets)
            case p.Unspoil():
                return self._undo_damage()
            case p.Fill():
                self._write(command.range, garbage=not command.range.text)
            case p.ForeignWrites():
                return self._foreign_writes()
            case p.Written(block_ids=block_ids):
                return float(np.mean(self._words[block_ids, ..., 0] != self._known_words[block_ids, ..., 0]))
            case p.TakeCalls():
                return self._watch.take()
            case p.Instrument():
                self._watch.traced = command.on
            case p.CopyCost():
                return self._copy_cost(command.block_ids)
            case _:
                return self._run_scheduler(command)
        return None

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

    def _run_scheduler(self, command: p.AnyCommand) -> object:
        scheduler, table, call = self._scheduler, self._table, self._watch.call
        assert scheduler is not None
        assert table is not None
        match command:
            case p.Match(request=request, num_computed=num):
                return call("get_num_new_matched_tokens", scheduler.get_num_new_matched_tokens, request, num)
            case p.Allocate(request=request, block_tables=block_tables, num_external=num):
                alloc = scheduler.update_state_after_alloc
                return p.Ticket(call("update_state_after_alloc", alloc, request, block_tables, num))
            case p.Plan(view=view, encode=encode):
                meta = call("build_connector_meta", scheduler.build_connector_meta, view)
                self._metas[view.step_id] = meta
                holds = [(hold.key, list(hold.block_ids), hold.owner) for hold in meta.holds]
                return p.Planned(holds, msgspec.msgpack.encode(meta) if encode else None)
            case p.FinishRequest(request=request, block_tables=block_tables):
                return call("request_finished", scheduler.request_finished, request, block_tables)
            case p.Settle(results=results):
                resolved = call("resolve_results", scheduler.resolve_results, results)
                if resolved:
                    call("update_connector_output", scheduler.update_connector_output, resolved)
                return p.as_dicts(resolved)
            case p.TakeEvents():
                return [] if scheduler.tiers is None else list(call("take_events", scheduler.tiers.take_events))
            case p.IsPending():
                return call("has_pending_work", lambda: scheduler.has_pending_work)
            case p.Reuse(block_ids=block_ids):
                for block_id in block_ids:
                    table.reuse(block_id)
            case p.Publish(blocks=blocks):
                for block_id, keys in blocks:
                    table.publish(block_id, keys)
            case _:
                raise TypeError(f"a host does not know {command!r}")
        return None

    def _update_peers(self, command: p.UpdatePeers) -> list[str]:
        with _logged_refusals() as refusals:
            if self._scheduler is not None:
                self._watch.call("update_peers", self._scheduler.update_peers, command.cards)
            self._watch.call("update_peers", self._worker.update_peers, command.added, command.removed)
        return refusals

    # --- worker side ----------------------------------------------------------------------------------------------

    def _execute(self, step: p.Execute) -> p.Executed:
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

    def _compute_layer(self, step: p.Execute, layer: int, meta: KVConnectorMetadata) -> None:
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
            expect = self._expected.pop(key, None)
            if expect is None:
                continue
            self._known_words[expect.block_ids] = self._words[expect.block_ids]
            if key in results.finished_receiving and expect.range is not None:
                difference = self._difference(expect.range)
                if difference:
                    wrong.append((key, difference))
        return p.Executed(p.as_dicts(results), wrong)

    # --- the pool -------------------------------------------------------------------------------------------------

    def _places(self, tokens: p.TokenRange, group: int) -> tuple[Ids, Ids]:
        """Block id and offset in the block, for each token in a KV group."""
        positions = np.arange(tokens.start, tokens.stop, dtype=np.int64)
        blocks = as_ids(tokens.block_tables[group])[positions // self._layout.block_size]
        return blocks, positions % self._layout.block_size

    def _write(self, tokens: p.TokenRange, layer: int | None = None, *, garbage: bool = False) -> None:
        """Write one layer of the model, or all; in a KV group, only tokens that have a block there."""
        values: Values | int = GARBAGE
        if not garbage:
            values = kv_values(tokens.text, tokens.start, tokens.stop, self._layout, self._heads)
        for number, (group, index) in enumerate(self._layout.places):
            if layer not in (None, number):
                continue
            blocks, offsets = self._places(tokens, group)
            there = blocks >= 0
            own = values if isinstance(values, int) else values[there, number]
            for pool in (self._view, self._known):
                pool[:, :, index][blocks[there], offsets[there]] = own

    def _difference(self, tokens: p.TokenRange) -> str:
        """What is wrong at the tokens' places; positions before a window are not checked."""
        expected = kv_values(tokens.text, tokens.start, tokens.stop, self._layout, self._heads)
        found = expected.copy()
        for number, (group, index) in enumerate(self._layout.places):
            blocks, offsets = self._places(tokens, group)
            there = blocks >= 0
            found[there, number] = self._view[:, :, index][blocks[there], offsets[there]]
        return describe_difference(found, expected, tokens.start, self._heads)

    def _undo_damage(self) -> p.Spoilt:
        damage, self._damage = self._damage, None
        if damage is None:
            return p.Spoilt(0, [])
        damage.undo()
        return p.Spoilt(damage.num_done, damage.struck)

    def _foreign_writes(self) -> list[int]:
        exposed = {block for expect in self._expected.values() for block in expect.block_ids}
        num_blocks = len(self._words)
        same = self._words.reshape(num_blocks, -1) == self._known_words.reshape(num_blocks, -1)
        return [block for block in np.flatnonzero(~same.all(axis=1)).tolist() if block not in exposed]

    def _copy_cost(self, block_ids: list[int]) -> float:
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
