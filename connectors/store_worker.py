"""The worker side of store connectors: I/O threads between the pool's units, staging buffers and the store."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata, TransferKey
from pdkv.connectors.io_lanes import Lane, LaneConfig
from pdkv.connectors.planning import Ids, unit_index
from pdkv.connectors.staging import Bytes, StagingBuffers
from pdkv.connectors.store_options import TransferOptions
from pdkv.connectors.store_pieces import Piece, lay_out, pack
from pdkv.connectors.store_plan import StoreCut, StoreLoad, StoreMetadata, StoreSave, Value, ValuePart
from pdkv.connectors.transfer_worker import Job, Task, TransferWorker
from pdkv.connectors.units import UnitPool
from pdkv.errors import ConfigError, KVNotFound, TransferCancelled, TransferError, TransferTimeout
from pdkv.kv_store.base import KVStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Read(NamedTuple):
    """One buffer's worth of a load."""

    load: StoreLoad
    pieces: list[Piece]


class _Write(NamedTuple):
    """One buffer's worth of a save or, to be checked first, any number of values."""

    save: StoreSave
    values: Sequence[Value]
    check: bool


class _Delete(NamedTuple):
    """Keys of a tail that nobody needs any more."""

    keys: list[bytes]


class _LayerLoad:
    """A load that the forward pass waits for, layer group by layer group."""

    def __init__(self, num_jobs: Sequence[int]) -> None:
        self._num_open = list(num_jobs)  # by layer group
        self._failed = False
        self._changed = threading.Condition()

    def done(self, group: int) -> None:
        """A job of that group has filled its blocks."""
        with self._changed:
            self._num_open[group] -= 1
            self._changed.notify_all()

    def fail(self) -> None:
        """The rest does not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether the rest does not come."""
        return self._failed

    def wait(self, group: int, timeout_s: float) -> bool:
        """Whether the group's layers came in, or the load has failed, within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failed or not self._num_open[group], timeout_s)


class StoreWorker(TransferWorker):
    """One rank's loads and saves. Loads have the shared lane; saves have lanes of their own, and cannot delay them."""

    def __init__(
        self,
        config: ConnectorConfig,
        options: TransferOptions,
        cut: StoreCut,
        store: KVStore,
        notify: Callable[[], None],
    ) -> None:
        super().__init__(
            self._result_is_in,
            timeout_s=options.transfer_timeout_s,
            lanes=LaneConfig(
                num_shared=options.io_threads,
                idle_s=threading.TIMEOUT_MAX,  # no step starts a thread
                max_lanes=options.save_threads,
                thread_name="pdkv-store",
            ),
        )
        self.num_failed_saves = 0  # jobs
        self._options = options
        self._cut = cut
        self._store = store
        self._wake = notify
        self._block_size = config.layout.block_size
        self._saves_fail = False  # the last one did: told once
        self._numbers = count()
        self._layer_loads: dict[TransferKey, _LayerLoad] = {}  # of this step and, until they ended, earlier ones
        self._step_loads: list[TransferKey] = []
        self._layer_deadline = 0.0
        self._ended = threading.Event()

    def _result_is_in(self) -> None:
        self._ended.set()
        self._wake()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Raises ConfigError for a pool that has no whole units."""
        try:
            self._pool = UnitPool(kv_cache)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        per_value = self._cut.tokens_per_value // HASH_BLOCK_SIZE
        largest = max(self._pool.unit_bytes(part.part) for part in self._cut.parts) * per_value
        size = max(self._options.staging_bytes, largest)
        threads = self._options.io_threads + self._options.save_threads
        self._staging = StagingBuffers(threads, size, pinned=not self._pool.on_cpu)
        self.start_threads([("save", number) for number in range(self._options.save_threads)])

    def handshake(self) -> bytes:
        return msgspec.msgpack.encode(self._cut.cut)

    # --- the step thread ------------------------------------------------------------------------------------------

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        self._step_loads = []
        self._layer_deadline = time.monotonic() + self._options.layer_timeout_s
        for load in meta.loads:
            self._start_load(load)
        for save in meta.saves:
            self._start_save(save)
        for drop in meta.drops:
            self.drop(drop.key)
            if drop.tail is not None:
                keys = [drop.tail.key + part.suffix for part in self._cut.parts if part.owned]
                name = (f"{drop.key[0]}/drop-{next(self._numbers)}", drop.key[1])
                tasks = [Task(_Delete(keys), self._save_lane(drop.key))] if keys else []
                self.submit(name, "send", tasks)

    def _start_load(self, load: StoreLoad) -> None:
        orders = [_Read(load, pieces) for pieces in self._pieces(load.values, self._cut.parts, split=load.layerwise)]
        if load.layerwise:
            num_jobs = [0] * self._cut.layer_groups
            for order in orders:
                num_jobs[order.pieces[0].part.group] += 1
            self._layer_loads[load.key] = _LayerLoad(num_jobs)
            self._step_loads.append(load.key)
        self.submit(load.key, "receive", [Task(order) for order in orders])

    def _start_save(self, save: StoreSave) -> None:
        tasks: list[Task] = []
        if any(part.owned for part in self._cut.parts):
            whole = [value for value in save.values if value.num_tokens == self._cut.tokens_per_value]
            size = self._staging.size_bytes
            per_job = max(size // max(self._value_bytes, 1), 1)
            chunks = [whole[i : i + per_job] for i in range(0, len(whole), per_job)]
            tasks = [
                Task(_Write(save, chunk, False), self._save_lane((save.batch[0], i))) for i, chunk in enumerate(chunks)
            ]
            if save.check:
                tasks.append(Task(_Write(save, save.check, True), self._save_lane(save.batch)))
            tails = save.values[len(whole) :]
            if tails:  # in the lane in which it will be deleted
                tasks.append(Task(_Write(save, tails, False), self._save_lane(save.key)))
        is_handoff = save.key != save.batch
        self.submit(save.key, "send", tasks, batch=save.batch if is_handoff else None, last=save.last or not is_handoff)

    @property
    def _value_bytes(self) -> int:
        """Of all parts that this rank writes."""
        units = self._cut.tokens_per_value // HASH_BLOCK_SIZE
        return units * sum(self._pool.unit_bytes(part.part) for part in self._cut.parts if part.owned)

    def _save_lane(self, key: TransferKey) -> Lane:
        return ("save", crc32(f"{key[0]}/{key[1]}".encode()) % self._options.save_threads)

    def wait_for_layer_load(self, layer: int) -> None:
        """Loads of this step that are not in at the step's deadline fail."""
        group = self._cut.group_that_begins_at(layer) if self._step_loads else None
        if group is None:
            return
        for key in self._step_loads:
            load = self._layer_loads[key]
            if not load.failed and not load.wait(group, max(self._layer_deadline - time.monotonic(), 0.0)):
                load.fail()
                self.stop_jobs(lambda job, key=key: job.key == key, TransferTimeout.code)  # type: ignore[misc]

    def wait_for_save(self) -> None:
        """What a forward pass has waited for is reported with its step: its last job may be about to say so."""
        for key in self._step_loads:
            while not self._layer_loads[key].failed and self._is_open(key):
                self._ended.clear()
                remaining = self._layer_deadline - time.monotonic()
                if self._is_open(key) and not self._ended.wait(max(remaining, 0.0)):
                    break
        self._step_loads = []
        self._layer_loads = {key: load for key, load in self._layer_loads.items() if self._is_open(key)}

    def _is_open(self, key: TransferKey) -> bool:
        return bool(self.open_jobs(key, "receive"))

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def run_job(self, job: Job, scratch: Any) -> int:
        match job.order:
            case _Read() as order:
                return self._read(job, order)
            case _Write() as order:
                return self._reported(lambda: self._write(job, order))
            case _Delete(keys):
                return self._reported(lambda: self._store.delete(keys) or 0)
        raise AssertionError(job.order)

    def _reported(self, save: Callable[[], int]) -> int:
        """Run a save; log the first failure after a success, and the first success after a failure."""
        try:
            num_bytes = save()
        except TransferCancelled:
            raise
        except TransferError as error:
            self.num_failed_saves += 1
            if not self._saves_fail:
                logger.warning("KV is not saved (%s: %s); told again when it is", error.code, error)
            self._saves_fail = True
            raise
        if self._saves_fail:
            logger.warning("KV is saved again, %d saves failed since the start", self.num_failed_saves)
        self._saves_fail = False
        return num_bytes

    def _read(self, job: Job, order: _Read) -> int:
        layers = self._layer_loads.get(job.key) if order.load.layerwise else None
        try:
            with self._staging.take(job.remaining_s()) as buffer:
                keys, views = lay_out(order.pieces, buffer)
                found = self._store.get(keys, views)
                if not all(found):
                    raise KVNotFound(f"{len(found) - sum(found)} of {len(found)} values are not there or damaged")
                job.check()
                self._fill_blocks(order, buffer)
        except BaseException:
            if layers is not None:
                layers.fail()
            raise
        if layers is not None:
            layers.done(order.pieces[0].part.group)
        return sum(len(view) for view in views)

    def _fill_blocks(self, order: _Read, buffer: Bytes) -> None:
        """Scatter what lies in [load.start, load.stop): values may begin before, in blocks that are hits."""
        load, offset = order.load, 0
        for piece in order.pieces:
            begin, end = piece.values[0].start, piece.values[-1].stop
            start, stop = max(begin, load.start), min(end, load.stop)
            if start < stop:
                units = unit_index(load.block_ids, self._block_size, start - load.start, stop - load.start)
                first = offset + (start - begin) // HASH_BLOCK_SIZE * piece.unit_bytes
                self._pool.scatter(units, piece.part.part, buffer[first : first + units.size * piece.unit_bytes])
            offset += piece.num_bytes

    def _write(self, job: Job, order: _Write) -> int:
        parts = [part for part in self._cut.parts if part.owned]
        values = order.values
        if order.check:
            keys = [value.key + part.suffix for value in values for part in parts]
            there = self._store.contains_for_all(keys)
            values = [value for i, value in enumerate(values) if not all(there[i * len(parts) : (i + 1) * len(parts)])]
        num_bytes = 0
        for pieces in self._pieces(values, parts):
            with self._staging.take(job.remaining_s()) as buffer:
                keys, views = lay_out(pieces, buffer)
                self._gather(order.save, pieces, buffer)
                job.check()
                self._store.put(list(zip(keys, views, strict=True)))
                num_bytes += sum(len(view) for view in views)
        return num_bytes

    def _gather(self, save: StoreSave, pieces: Sequence[Piece], buffer: Bytes) -> None:
        offset = 0
        for piece in pieces:
            units = np.concatenate([self._units(save, value) for value in piece.values])
            image = buffer[offset : offset + piece.num_bytes]
            self._pool.gather(units, piece.part.part, image)
            num_used = piece.values[-1].num_tokens % HASH_BLOCK_SIZE
            if num_used:  # what earlier owners of the block left behind the tail stays here
                last = image[-piece.unit_bytes :]
                rows = piece.part.part.num_layers * 2 * piece.part.part.num_heads
                last.reshape(rows, HASH_BLOCK_SIZE, -1)[:, num_used:] = 0
            offset += piece.num_bytes

    def _units(self, save: StoreSave, value: Value) -> Ids:
        start = value.start - save.first_token
        return unit_index(save.block_ids, self._block_size, start, start + value.num_tokens)

    def _pieces(
        self, values: Sequence[Value], parts: Sequence[ValuePart], *, split: bool = False
    ) -> Iterator[list[Piece]]:
        sized = [(part, self._pool.unit_bytes(part.part)) for part in parts]
        return pack(values, sized, self._staging.size_bytes, split=split)
