"""Bandwidth and latency of a connector by request length, each beside memcpy and the bare transport in the same run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import msgspec

from pdkv.connector_kit.bench.pieces import planned_pieces, stored_pieces
from pdkv.connector_kit.bench.plan import Plan, open_setting, plan_bytes, store_values
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer, Timing
from pdkv.connector_kit.bench.yardsticks import Memcpy, open_bare
from pdkv.connector_kit.rig.world import Setting


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


class Sample(NamedTuple):
    """One turn; 0: there is no bare transport."""

    timing: Timing
    memcpy_s: float
    raw_s: float
    per_piece_s: float


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


def _measure_length(plan: Plan, setting: Setting, world: BenchWorld, num_tokens: int) -> Iterator[Row]:
    """A row for each pattern. What is compared takes turns, so that it meets the same weather."""
    size = plan_bytes(plan, num_tokens)
    memcpy = Memcpy(size, plan.region_bytes)
    with ExitStack() as stack:
        bare = open_bare(plan, setting, size) if plan.bare else None
        if bare is not None:
            stack.enter_context(bare)
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


def _pieces(plan: Plan, transfer: TimedTransfer, num_tokens: int) -> int:
    if transfer.producer.built.kind == "store":
        return stored_pieces(num_tokens, *store_values(plan, plan.options))
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
