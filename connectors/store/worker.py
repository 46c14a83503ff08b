"""The worker side of store connectors: I/O threads between the pool's units, staging buffers and the store."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.log_limit import LogLimit
from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnectorMetadata,
    Stats,
    TransferKey,
    TransferOutcome,
)
from pdkv.connectors.stats import stats_of_tiers, sum_stats
from pdkv.connectors.step_done import ON_HOST, StepDone
from pdkv.connectors.store.between_tiers import BetweenTiers
from pdkv.connectors.store.coding import ValueCoder
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.forms import Forms, Pace, choose_form
from pdkv.connectors.store.hidden import ComputeClock, HiddenTime
from pdkv.connectors.store.near import LANE as AHEAD_LANE
from pdkv.connectors.store.near import Ahead, NearValues, Passed
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.connectors.store.orders import Ordered, TierOrders
from pdkv.connectors.store.pieces import Piece, Slot, buffer_bytes, lay_out, pack
from pdkv.connectors.store.plan import BlockSpan, StoreCut, StoreLoad, StoreMetadata, StoreSave, Value
from pdkv.connectors.store.progress import LayerLoad, LoadProgress
from pdkv.connectors.store.values import QUIET_S, SealedValues
from pdkv.connectors.transfer.jobs import Transfer
from pdkv.connectors.transfer.lanes import Lane, LaneConfig
from pdkv.connectors.transfer.planning import Bytes, Ids, unit_index
from pdkv.connectors.transfer.staging import StagingBuffers
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.connectors.transfer.worker import Job, Task, TransferWorker
from pdkv.errors import ConfigError, TransferCancelled, TransferError, TransferTimeout
from pdkv.kernels.streams import streams_of
from pdkv.wire.kv import KVTerms
from pdkv.wire.reports import ConnectorStats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Read(NamedTuple):
    """One buffer's worth of a load."""

    load: StoreLoad
    pieces: list[Piece]
    after: StepDone  # the last step of the blocks' previous owner
    left: Sequence[int] = ()  # bytes from here to the load's end, by form; empty: there is no choice


_STAGING_BYTES = 4 << 20
_VALUES_AT_ONCE = 8
"""The least values in a thread's buffer for a store that takes one request for each, over a long distance."""

TAIL_TTL_S = 3600
"""Seconds after which a tail expires if its engine ended before deleting it; longer than a hand-off waits."""

_Places = dict[bytes, list[memoryview]]
"""By a value's key, the destination of its body in the pool."""


class _Write(NamedTuple):
    """One buffer's worth of a save or, if they must be checked first, any number of values."""

    save: StoreSave
    values: Sequence[Value]
    check: bool
    after: StepDone


class _Delete(NamedTuple):
    """Keys of a tail that is no longer needed."""

    keys: list[bytes]


class StoreWorker(TransferWorker):
    """One rank's loads and saves. Loads use the shared lane; saves have lanes of their own, and cannot delay loads."""

    metadata_type = StoreMetadata

    def __init__(
        self,
        config: ConnectorConfig,
        options: StoreConnectorOptions,
        cut: StoreCut,
        values: SealedValues,
        notify: Callable[[], None],
        *,
        coder: ValueCoder | None = None,
    ) -> None:
        """`coder`: codes values that are not stored as images of their units; None: all are."""
        super().__init__(
            self._result_is_in,
            timeout_s=options.transfer_timeout_s,
            lanes=LaneConfig(
                num_shared=options.io_threads,
                idle_s=threading.TIMEOUT_MAX,  # no step starts a thread
                max_lanes=options.save_threads + 2,  # and those that look ahead, and carry out orders
                thread_name="pdkv-store",
            ),
            clock=config.clock,
        )
        self.num_failed_saves = 0  # jobs
        self._options = options
        self._cut = cut
        self._values = values
        self._coder = coder
        self._compute = ComputeClock(self.clock.now)
        self._hidden = HiddenTime(self._compute)
        self._near = NearValues(values.store, cut, BetweenTiers(values, self._each_buffer, self.clock))
        self._pace = Pace(self.clock.now)
        self._wake = notify
        self._block_size, self._row_bytes = config.layout.block_size, config.layout.row_bytes
        self._told_that_saves_fail = False  # whether the last one failed
        self._log_limit = LogLimit(QUIET_S)
        self._progress: dict[TransferKey, LoadProgress] = {}  # of loads in progress
        self._layer_loads: dict[TransferKey, LayerLoad] = {}  # of this step and, until they end, earlier ones
        self._step_loads: list[TransferKey] = []
        self._layer_deadline = 0.0
        self._ended = threading.Event()
        between = BetweenTiers(values, self._each_buffer, self.clock)
        self._orders = TierOrders(values.store, cut, between, self.clock)

    def _result_is_in(self) -> None:
        self._ended.set()
        self._wake()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Take the pool. Raises ConfigError for one without whole units."""
        try:
            self._pool = UnitPool(kv_cache)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._pool.compile_kernels()
        parts = [part.part for parts in (*self._cut.parts, self._cut.more_parts) for part in parts]
        per_value = max(self._cut.value_tokens) // HASH_BLOCK_SIZE
        self._forms = Forms(self._pool, self._coder, self._cut.forms)
        sizes = self._forms.all_sizes(parts)
        largest = max(body_bytes(per_value) for body_bytes in sizes)
        at_once = _VALUES_AT_ONCE if self._values.store.asks_key_by_key else 1
        wanted = self._options.staging_bytes or max(_STAGING_BYTES, at_once * largest)
        self._capacity = max(wanted, largest)  # of a buffer, in bytes of bodies
        has_tiers = len(self._values.store.parts()) > 1  # operators' orders have a separate thread
        threads = self._options.io_threads + self._options.save_threads + self._near.looks_ahead + has_tiers
        buffer_size = buffer_bytes(self._capacity, min(body_bytes(1) for body_bytes in sizes))
        self._values.store.lock_pages(streams_of(kv_cache.device).lock_pages)
        self._staging = StagingBuffers(threads, buffer_size, streams_of(kv_cache.device))
        if self._coder is not None:
            largest = per_value * max(self._pool.unit_bytes(part) for part in parts)
            self._image_staging = StagingBuffers(threads, largest, streams_of(kv_cache.device))
        own: list[Lane] = [("save", number) for number in range(self._options.save_threads)]
        self.start_threads([*own, AHEAD_LANE] if self._near.looks_ahead else own)

    def handshake(self) -> bytes:
        return msgspec.msgpack.encode(self._cut.cut)

    # --- the step thread ------------------------------------------------------------------------------------------

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        self._step_loads = []
        self._layer_deadline = self.clock.now() + self._options.layer_timeout_s
        for load in meta.loads:
            self._start_load(load, meta.earlier_steps or ON_HOST)
        for save in meta.saves:
            self._start_save(save, meta.earlier_steps or ON_HOST)
        for drop in meta.drops:
            if drop.given_up:
                self.drop(drop.key, "send")
            else:
                self.complete(drop.key, "send")
            if drop.tails:
                keys = [key for tail in drop.tails for key in self._cut.own_keys(tail)]
                keys += [tail.key + part.suffix for tail in drop.tails for part in self._cut.more_parts]
                tasks = [Task(_Delete(keys), self._save_lane(drop.key))] if keys else []
                self.submit(drop.batch, "send", tasks)
        if meta.ahead or meta.passed:
            self._near.submit(self, meta)
        for order in meta.orders:
            self._orders.submit(self, order)
        self._compute.start()

    def _start_load(self, load: StoreLoad, after: StepDone) -> None:
        jobs = list(self._pieces(load.values, split=load.layerwise, more=True))
        lefts = self._forms.left(jobs)
        orders = [_Read(load, pieces, after, left) for pieces, left in zip(jobs, lefts, strict=True)]
        self._progress[load.key] = LoadProgress(load, len(self._cut.parts[0]))
        if load.layerwise:
            num_jobs = [0] * self._cut.num_stages
            for order in orders:
                num_jobs[order.pieces[0].part.stage] += 1
            self._layer_loads[load.key] = LayerLoad(num_jobs, self.clock)
            self._step_loads.append(load.key)
        self.submit(load.key, "receive", [Task(order) for order in orders])

    def _start_save(self, save: StoreSave, after: StepDone) -> None:
        tasks: list[Task] = []
        if self._cut.owned(0):
            whole = self._cut.whole_of(save.values)
            for i, pieces in enumerate(self._chunks(whole)):
                tasks.append(Task(_Write(save, pieces, False, after), self._save_lane(save.batch, i)))
            if save.check:
                tasks.append(Task(_Write(save, save.check, True, after), self._save_lane(save.batch)))
            if len(whole) < len(save.values):  # in the lane in which they will be deleted
                tails = [value for value in save.values if not self._cut.is_whole(value)]
                terms = save.kv_terms or KVTerms(owner=0)
                terms = msgspec.structs.replace(terms, ttl_s=min(terms.ttl_s or TAIL_TTL_S, TAIL_TTL_S))
                ending = msgspec.structs.replace(save, kv_terms=terms)
                tasks.append(Task(_Write(ending, tails, False, after), self._save_lane(save.key)))
        batch = save.batch if save.is_handoff else None
        self.submit(save.key, "send", tasks, batch=batch, last=save.last or not save.is_handoff)

    def _chunks(self, values: Sequence[Value]) -> Iterator[Sequence[Value]]:
        """Groups of values of one KV group that fill a buffer with all parts that this rank writes."""
        for group, size in enumerate(self._cut.value_tokens):
            own = self._cut.of_group(values, group)
            units = size // HASH_BLOCK_SIZE
            parts = [part.part for part in (*self._cut.owned(group), *self._cut.more_parts)]
            value_bytes = sum(body_bytes(units) for body_bytes in self._forms.all_sizes(parts))
            per_job = max(self._capacity // value_bytes, 1)
            yield from (own[i : i + per_job] for i in range(0, len(own), per_job))

    def _save_lane(self, key: TransferKey, chunk: int = 0) -> Lane:
        number = crc32(key.transfer_id.encode()) + key.attempt + key.part + chunk
        return ("save", number % self._options.save_threads)

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait for a layer; loads of this step that are not complete at the step's deadline fail."""
        stage = self._cut.stage_that_begins_at(layer) if self._step_loads else None
        if stage is None:
            return
        self._compute.stop()
        self._wait_for_stage(stage)
        self._compute.start()

    def _wait_for_stage(self, stage: int) -> None:
        for key in self._step_loads:
            load = self._layer_loads[key]
            if not load.failed and not load.wait(stage, self._layer_deadline):
                load.fail()
                self.stop_jobs(lambda job, key=key: job.key == key, TransferTimeout.code)  # type: ignore[misc]

    def wait_for_save(self) -> None:
        """Report loads that a forward pass has waited for in its own step: the last job may be about to report."""
        self._compute.stop()
        for key in self._step_loads:
            while not self._layer_loads[key].failed and self._is_open(key):
                self._ended.clear()
                if self._is_open(key) and not self.clock.wait(self._ended, self._layer_deadline):
                    break
        self._step_loads = []
        self._layer_loads = {key: load for key, load in self._layer_loads.items() if self._is_open(key)}

    def _is_open(self, key: TransferKey) -> bool:
        return bool(self.open_jobs(key, "receive"))

    def shutdown(self) -> None:
        self._values.store.hang_up(for_good=True)  # nothing waits for a store that does not answer
        super().shutdown()

    def get_stats(self) -> Stats:
        num_bytes, seconds = self._values.meter.total
        read = ConnectorStats(read_bytes=num_bytes, read_seconds=seconds)
        own = sum_stats([super().get_stats(), {"": self._hidden.stats}, {"": read}])
        return {**own, **stats_of_tiers(self._values.store.count_tiers())}

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def run_job(self, job: Job, scratch: Any) -> int:
        match job.order:
            case _Read() as order:
                with self._hidden.measure("load"):
                    return self._read(job, order)
            case _Write() as order:
                with self._hidden.measure("save"):
                    return self._reported(lambda: self._write(job, order))
            case Ahead() as ahead:
                return self._near.bring(job, ahead)
            case Ordered() as ordered:
                return self._orders.run(job, ordered)
            case Passed(values):
                return self._near.let_go(values)
            case _Delete(keys):
                return self._reported(lambda: self._values.store.delete(keys) or 0)
        raise AssertionError(job.order)

    def _reported(self, save: Callable[[], int]) -> int:
        """Run a save; log the first failure after a success, and the first success after that, once a minute at most: a
        tenant's saves may all fail for lack of quota while those of others succeed.
        """
        try:
            num_bytes = save()
        except TransferCancelled:
            raise
        except TransferError as error:
            self.num_failed_saves += 1
            if not self._told_that_saves_fail and self._log_limit.passes():
                self._told_that_saves_fail = True
                logger.warning(
                    "KV is not saved (%s: %s); not reported again until a save succeeds, and not within %g s",
                    error.code, error, QUIET_S,
                )  # fmt: skip
            raise
        if self._told_that_saves_fail:
            logger.warning("KV is saved again, %d saves failed since the start", self.num_failed_saves)
        self._told_that_saves_fail = False
        return num_bytes

    def _read(self, job: Job, order: _Read) -> int:
        load = order.load
        layers = self._layer_loads.get(job.key) if load.layerwise else None
        progress = self._progress[job.key]
        num_bytes = 0
        places: _Places = {}  # partly written, but not filled

        def filled(slot: Slot) -> None:
            nonlocal num_bytes
            places.pop(slot.key, None)
            num_bytes += slot.data.nbytes
            if slot.part.may_lack:
                return
            has_end = load.kv_terms is not None and self._cut.is_whole(slot.value)  # a tail is never looked for later
            progress.filled(slot.value, self._values.end_of(slot) if has_end else 0)

        def use(slot: Slot) -> None:
            order.after.wait(job.remaining_s())
            self._fill_blocks(job, load, slot)
            filled(slot)

        try:
            pieces = self._choose(job, order, progress) if order.left else order.pieces
            with self._staging.take(job.remaining_s()) as buffer:
                slots = [slot for slot in lay_out(pieces, buffer) if progress.wants(slot.value)]
                if slots:
                    began = self.clock.now()
                    there = set[bytes]()
                    for slot in self._read_in_place(job, order, places, slots):
                        filled(slot)
                        there.add(slot.key)
                    if rest := [slot for slot in slots if slot.key not in there]:
                        job.check()
                        reading = self._values.get(rest, use, load.kv_terms)
                        missing = [slot.value for slot in reading.missing if not slot.part.may_lack]
                        progress.missed(missing, reading.num_damaged, reading.num_expired)
                    self._pace.note(num_bytes, self.clock.now() - began)
        except BaseException:
            if layers is not None:
                layers.fail()
            raise
        finally:  # no partial content is left in a block
            for piece in chain.from_iterable(places.values()):
                piece[:] = bytes(len(piece))
        if layers is not None:
            layers.done(order.pieces[0].part.stage)
        return num_bytes

    def _read_in_place(self, job: Job, order: _Read, places: _Places, slots: Sequence[Slot]) -> Iterator[Slot]:
        """Read values directly into their blocks where possible, and yield those that were read. `places` collects
        those that may have been written to.
        """
        if not self._pool.on_cpu and self._coder is None and order.load.kv_terms is None:
            yield from self._read_locked(job, order, slots)
        if self._coder is not None or not self._values.store.can_scatter:
            return
        found = {slot.key: place for slot in slots if (place := self._place_of(order.load, slot)) is not None}
        if not found:
            return
        order.after.wait(job.remaining_s())
        places.update(found)
        mine = [slot for slot in slots if slot.key in found]
        yield from compress(mine, self._values.get_scattered(mine, list(found.values()), order.load.kv_terms))

    def _read_locked(self, job: Job, order: _Read, slots: Sequence[Slot]) -> Iterator[Slot]:
        """Let the device copy values out of the store's page-locked memory, and yield those that it has copied."""
        for slot in slots:
            if (lent := self._values.lend(slot)) is not None:
                order.after.wait(job.remaining_s())
                self._scatter(order.load, slot, np.frombuffer(lent.view, np.uint8)[:-ENVELOPE_BYTES])
                if lent.is_there():
                    yield slot

    def _place_of(self, load: StoreLoad, slot: Slot) -> list[memoryview] | None:
        """The place of a value's body in the pool; None: not all of it has one, or it is in too many pieces."""
        value = slot.value
        if value.start < load.start or value.stop > load.stop:
            return None
        units = self._units(BlockSpan(load.start, load.block_tables[value.group]), value.start, value.stop)
        return self._pool.places(units, slot.part.part)

    def _choose(self, job: Job, order: _Read, progress: LoadProgress) -> list[Piece]:
        """The values in a form that can be loaded in time; none if there is no such form, and the rest is computed.

        All load threads are assumed to be busy and to share the network as they did for the last reads.
        """
        assert self._options.codec_deadline_s is not None
        left_s = job.transfer.started + self._options.codec_deadline_s - self.clock.now()
        pace = self._pace.bytes_per_s
        num_threads = min(self._options.io_threads, len(self.open_jobs(job.key, "receive")))
        form = choose_form(order.left, pace and pace * num_threads, left_s)
        if form is None and not order.load.is_handoff:
            progress.give_up(min(value.start for piece in order.pieces for value in piece.values))
            return []
        return self._forms.in_form(order.pieces, self._cut.forms[-1] if form is None else form)

    def _each_buffer(
        self, values: Sequence[Value], deadline: float, use: Callable[[list[Slot]], None], check: Callable[[], None]
    ) -> None:
        """As `EachBuffer`, for parts that this rank writes."""
        for pieces in self._pieces(values, owned=True):
            check()
            left_s = deadline - self.clock.now()
            if left_s <= 0:
                raise TransferTimeout("not all values were fetched in time")
            with self._staging.take(left_s) as buffer:
                use(lay_out(pieces, buffer))

    def _fill_blocks(self, job: Job, load: StoreLoad, slot: Slot) -> None:
        """Fill blocks. Raises KVCorrupted for a body that no codec has made; nothing is in the blocks then."""
        if self._coder is None:
            self._scatter(load, slot, slot.body)
            return
        part, num_units = slot.part.part, slot.value.num_units
        with self._image_staging.take(job.remaining_s()) as buffer:
            images = buffer[: num_units * self._pool.unit_bytes(part)]
            self._coder.decode(slot.body, slot.form, part, num_units, images)
            self._scatter(load, slot, images)

    def _scatter(self, load: StoreLoad, slot: Slot, images: Bytes) -> None:
        """Scatter the part in [load.start, load.stop): a value may begin earlier, in blocks that are hits."""
        value, part = slot.value, slot.part.part
        start, stop = max(value.start, load.start), min(value.stop, load.stop)
        if start < stop:
            units = self._units(BlockSpan(load.start, load.block_tables[value.group]), start, stop)
            unit_bytes = self._pool.unit_bytes(part)
            first = (start - value.start) // HASH_BLOCK_SIZE * unit_bytes
            self._pool.scatter(units, part, images[first : first + units.size * unit_bytes])

    def ended(self, transfer: Transfer, outcome: TransferOutcome) -> TransferOutcome:
        """The end of a load. One with a gap has failed; its progress and damaged values are reported."""
        if transfer.direction == "send":
            answer = self._orders.take_answer(transfer.key)
            num_damaged = answer.num_damaged + self._near.take_damaged(transfer.key)
            return outcome._replace(num_damaged=num_damaged, notes=answer.notes)
        progress = self._progress.pop(transfer.key, None)
        if progress is None:
            return outcome
        code = outcome.code or progress.code
        num_tokens = progress.num_tokens if code else 0
        return outcome._replace(
            code=code,
            num_tokens=num_tokens,
            num_damaged=progress.num_damaged,
            num_expired=progress.num_expired,
            ends_at=progress.ends_at,
        )

    def _write(self, job: Job, order: _Write) -> int:
        values, is_handoff = order.values, order.save.is_handoff
        if order.check:
            keys = [key for value in values for key in self._cut.own_keys(value)]
            look = self._values.store.contains_for_all if is_handoff else self._values.store.contains
            there = set(compress(keys, look(keys)))
            values = [value for value in values if not there.issuperset(self._cut.own_keys(value))]
        num_bytes = 0
        for pieces in self._pieces(values, owned=True, more=True):
            with self._staging.take(job.remaining_s()) as buffer:
                slots = lay_out(pieces, buffer)
                for slot in slots:
                    self._gather(job, order, slot)
                job.check()
                if replaced := [slot.key for slot in slots if slot.value.key in order.save.replaced]:
                    self._values.store.delete(replaced)
                self._values.put(slots, order.save.kv_terms, for_others=is_handoff)
                num_bytes += sum(slot.data.nbytes for slot in slots)
        return num_bytes

    def _gather(self, job: Job, order: _Write, slot: Slot) -> None:
        value, part = slot.value, slot.part.part
        if self._coder is None:
            self._gather_images(job, order, value, part, slot.body)
            return
        with self._image_staging.take(job.remaining_s()) as buffer:
            images = buffer[: value.num_units * self._pool.unit_bytes(part)]
            self._gather_images(job, order, value, part, images)
            self._coder.encode(images, slot.form, part, value.num_units, slot.body)

    def _gather_images(self, job: Job, order: _Write, value: Value, part: UnitPart, images: Bytes) -> None:
        units = self._units(order.save.spans[value.group], value.start, value.stop)
        self._pool.gather(units, part, images, after=order.after, timeout_s=job.remaining_s())
        num_used = value.num_tokens % HASH_BLOCK_SIZE
        if num_used:  # earlier content of the block after the tail stays there
            last = images[-self._pool.unit_bytes(part) :]
            last.reshape(-1, HASH_BLOCK_SIZE, self._row_bytes)[:, num_used:] = 0

    def _units(self, span: BlockSpan, start: int, stop: int) -> Ids:
        """The units that hold tokens [start, stop)."""
        size = self._block_size
        first, last = (start - span.first_token) // size, -(-(stop - span.first_token) // size)
        origin = span.first_token + first * size
        return unit_index(span.block_ids[first:last], size, start - origin, stop - origin)

    def _pieces(
        self, values: Sequence[Value], *, split: bool = False, owned: bool = False, more: bool = False
    ) -> Iterator[list[Piece]]:
        """Buffers' worth of all parts of the values; `owned`: of those that this rank writes, in all forms; `more`: and
        of those that values may lack.
        """
        pieces = [
            Piece(part, own, self._forms.body_bytes(part.part, form), form)
            for group, parts in enumerate(self._cut.parts)
            if (own := self._cut.of_group(values, group))
            for part in (*parts, *(self._cut.more_parts if more else ()))
            if part.owned or not owned
            for form in (self._cut.forms if owned else self._cut.forms[:1])
        ]
        return pack(pieces, self._capacity, split=split)
