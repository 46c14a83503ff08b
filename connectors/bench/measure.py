"""Bandwidth and latency of a connector by request length, each beside memcpy and the bare transport in the same run."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from pdkv.connectors.bench.bare import bare_of
from pdkv.connectors.bench.books import PATTERNS
from pdkv.connectors.bench.layouts import parse_layout
from pdkv.connectors.bench.pieces import planned_pieces, stored_pieces
from pdkv.connectors.bench.transfer import BenchWorld, TimedTransfer, Timing
from pdkv.connectors.conformance import protocol as p
from pdkv.connectors.conformance.processes import HostProcess, Zygote
from pdkv.connectors.conformance.profiles import profile_of
from pdkv.connectors.conformance.world import NotApplicable, Setting, Shape
from pdkv.connectors.registry import connector_target, load_connector
from pdkv.connectors.store_options import TransferOptions

TIMEOUT_S = 120.0

BEYOND_CACHE_BYTES = 128 << 20
"""Pools and yardsticks are larger than the last-level cache."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One length and pattern. Times are medians; None: the transport has nothing to compare with."""

    connector: str
    layout: str
    pattern: str
    tp: list[int]  # ranks of the producer and of the consumer
    tokens: int
    bytes: int  # of all of the consumer's ranks
    pieces: int  # of memory, after merging
    ms: float
    scheduler_ms: float  # of it, allocation and metadata
    gb_s: float
    memcpy_gb_s: float
    ratio_to_memcpy: float
    raw_gb_s: float | None  # the bare transport, in one piece
    ratio_to_raw: float | None
    per_piece_gb_s: float | None  # the bare transport, one piece per (layer, K or V, block)
    ratio_to_per_piece: float | None
    save_gb_s: float | None  # store: into it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    connector: str  # a registry name or "module:Class"
    options: Mapping[str, str]
    layout: str
    producer: Shape
    consumer: Shape
    tokens: Sequence[int]
    patterns: Sequence[str] = ("aged", "contiguous")
    repeats: int = 7
    piece_bytes: int = 0  # of the bare transport in pieces; 0: one per (layer, K or V, block)
    one_process: bool = False  # both engines in one process, for stores that are one's own
    region_bytes: int = BEYOND_CACHE_BYTES  # of memory that is used in turns


def make_plan(
    connector: str,
    *,
    options: Mapping[str, str],
    layout: str,
    tokens: Sequence[int],
    tp_pair: tuple[int, int] = (1, 1),
    block_sizes: tuple[int, int] = (16, 16),
    repeats: int = 7,
    patterns: Sequence[str] = (),
    piece_bytes: int = 0,
    one_process: bool = False,
    region_bytes: int = BEYOND_CACHE_BYTES,
) -> Plan:
    """A plan whose pools are large enough. Raises ConfigError for a layout that is none."""
    producer, consumer = (
        sized(parse_layout(layout, tp=tp, block_size=size), max(tokens), region_bytes)
        for tp, size in zip(tp_pair, block_sizes, strict=True)
    )
    return Plan(
        connector=connector, options=options, layout=layout, producer=producer, consumer=consumer, tokens=tokens,
        patterns=patterns or tuple(PATTERNS), repeats=repeats, piece_bytes=piece_bytes, one_process=one_process,
        region_bytes=region_bytes,
    )  # fmt: skip


class Sample(NamedTuple):
    """One turn; 0: there is no bare transport."""

    timing: Timing
    memcpy_s: float
    raw_s: float
    per_piece_s: float


class Memcpy:
    """One thread's copy of as many bytes, warm, out of memory larger than the last-level cache."""

    def __init__(self, num_bytes: int, region_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_slots = max(2, -(-region_bytes // num_bytes))
        self._source = np.ones((self._num_slots, num_bytes), np.uint8)
        self._target = np.ones((self._num_slots, num_bytes), np.uint8)
        self._turn = 0

    def seconds(self) -> float:
        """Of one copy."""
        slot = self._turn = (self._turn + 1) % self._num_slots
        start = time.perf_counter()
        self._target[slot] = self._source[slot]
        return time.perf_counter() - start


class Bare:
    """Two processes around a bare transport."""

    def __init__(self, zygote: Zygote, spec: p.OpenBare) -> None:
        self._source, self._reader = zygote.fork(), zygote.fork()
        address = self._open(self._source, spec)
        self._open(self._reader, msgspec.structs.replace(spec, address=address))

    def seconds(self, in_pieces: bool) -> float:
        """Of one move."""
        command = p.MoveBare(in_pieces, TIMEOUT_S)
        for host in (self._source, self._reader):
            host.send("bare", command)
        self._source.receive(p.Seconds, TIMEOUT_S)
        return self._reader.receive(p.Seconds, TIMEOUT_S).seconds

    def close(self) -> None:
        """End both; whatever happened, none is left."""
        for host in (self._reader, self._source):
            try:
                host.ask("bare", p.Close(), p.Done, TIMEOUT_S)
                host.exit(TIMEOUT_S)
            finally:
                host.kill()

    def _open(self, host: HostProcess, spec: p.OpenBare) -> bytes:
        return host.ask("bare", spec, p.Address, TIMEOUT_S).address


def measure(plan: Plan, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """All lengths in all patterns; each one's first load is compared with what was sent, and not counted.

    Raises:
        ConfigError: no such connector, option or shape.
        Violation: a load fails, or brings something else.
    """
    rows = []
    with open_setting(plan) as setting, BenchWorld(setting, plan.producer, plan.consumer) as world:
        for num_tokens in plan.tokens:
            for row in _measure_length(plan, setting, world, num_tokens):
                rows.append(row)
                on_row(row)
    return rows


@contextmanager
def open_setting(plan: Plan) -> Iterator[Setting]:
    """Processes for worlds of the plan's connector, with private places for what it keeps."""
    target = connector_target(plan.connector)
    options = {**profile_of(target, plan.options).options, **plan.options}
    flags = load_connector(plan.connector).for_options(options)
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as directory, Zygote(Path(directory)) as zygote:
        yield Setting(
            zygote=zygote,
            directory=Path(directory),
            connector=plan.connector,
            options=options,
            one_process=flags.one_process or plan.one_process,
            timeout_s=TIMEOUT_S,
        )


def sized(shape: Shape, tokens: int, region_bytes: int = BEYOND_CACHE_BYTES) -> Shape:
    """The shape with a pool for two requests of so many tokens, and of so many bytes."""
    block_bytes = shape.layout().block_bytes
    num_blocks = max(2 * -(-tokens // shape.block_size) + 16, region_bytes // block_bytes)
    return replace(shape, num_blocks=num_blocks)


def _measure_length(plan: Plan, setting: Setting, world: BenchWorld, num_tokens: int) -> Iterator[Row]:
    """A row for each pattern. What is compared takes turns, so that it meets the same weather."""
    size = plan_bytes(plan, num_tokens)
    memcpy = Memcpy(size, plan.region_bytes)
    bare = _open_bare(plan, setting, size)
    try:
        for pattern in plan.patterns:
            world.scatter(pattern)
            TimedTransfer(world, num_tokens).measure(compare=True)
            samples: list[Sample] = []
            for turn in range(plan.repeats + 1):
                transfer = TimedTransfer(world, num_tokens)
                timing = transfer.measure()
                raw, in_pieces = (bare.seconds(False), bare.seconds(True)) if bare is not None else (0.0, 0.0)
                if turn:
                    samples.append(Sample(timing, memcpy.seconds(), raw, in_pieces))
            yield _row(plan, pattern, num_tokens, size, _pieces(plan, transfer, num_tokens), samples)
    finally:
        if bare is not None:
            bare.close()


def measure_bare(plan: Plan, setting: Setting, num_tokens: int, repeats: int) -> float:
    """Median seconds of the bare transport for so many tokens, in one piece. Raises NotApplicable without one."""
    bare = _open_bare(plan, setting, plan_bytes(plan, num_tokens))
    if bare is None:
        raise NotApplicable(f"no bare transport is known for {plan.connector}")
    try:
        return median([bare.seconds(False) for _ in range(repeats + 1)][1:])
    finally:
        bare.close()


def plan_bytes(plan: Plan, num_tokens: int) -> int:
    """KV of so many tokens on all of the consumer's ranks, in whole blocks."""
    layout = plan.consumer.layout()
    return -(-num_tokens // layout.block_size) * layout.block_bytes * plan.consumer.tp


def _open_bare(plan: Plan, setting: Setting, size: int) -> Bare | None:
    target = bare_of(connector_target(plan.connector), load_connector(plan.connector), setting.options)
    if target is None:
        return None
    shape, consumer = plan.consumer, plan.consumer.layout()
    heads = min(plan.producer.layout().num_kv_heads, consumer.num_kv_heads)
    piece_bytes = plan.piece_bytes or heads * shape.block_size * shape.head_size * shape.dtype_bytes
    values = store_values(setting.options)
    value_bytes = values * consumer.block_bytes // consumer.block_size * shape.tp
    options = {**setting.options, "directory": str(setting.directory)}
    spec = p.OpenBare(target, size, piece_bytes, min(value_bytes, size), plan.region_bytes, options)
    return Bare(setting.zygote, spec)


def store_values(options: Mapping[str, str]) -> int:
    """Tokens per value of a store connector with these options."""
    return int(options.get("tokens_per_value", TransferOptions().tokens_per_value))


def _pieces(plan: Plan, transfer: TimedTransfer, num_tokens: int) -> int:
    if transfer.producer.built.kind == "store":
        return stored_pieces(num_tokens, store_values(plan.options))
    return planned_pieces(plan.producer, plan.consumer, num_tokens, *transfer.tables)


def _row(plan: Plan, pattern: str, tokens: int, size: int, pieces: int, samples: Sequence[Sample]) -> Row:
    timings = [sample.timing for sample in samples]
    seconds = median(timing.transfer_s + timing.scheduler_s for timing in timings)
    memcpy = median(sample.memcpy_s for sample in samples)
    raw = median(sample.raw_s for sample in samples)
    in_pieces = median(sample.per_piece_s for sample in samples)
    saves = [timing.save_s for timing in timings if timing.save_s]
    return Row(
        connector=plan.connector,
        layout=plan.layout,
        pattern=pattern,
        tp=[plan.producer.tp, plan.consumer.tp],
        tokens=tokens,
        bytes=size,
        pieces=pieces,
        ms=seconds * 1e3,
        scheduler_ms=median(timing.scheduler_s for timing in timings) * 1e3,
        gb_s=size / seconds / 1e9,
        memcpy_gb_s=size / memcpy / 1e9,
        ratio_to_memcpy=memcpy / seconds,
        raw_gb_s=size / raw / 1e9 if raw else None,
        ratio_to_raw=raw / seconds if raw else None,
        per_piece_gb_s=size / in_pieces / 1e9 if in_pieces else None,
        ratio_to_per_piece=in_pieces / seconds if in_pieces else None,
        save_gb_s=size / median(saves) / 1e9 if saves else None,
    )
