"""Measures bandwidth and latency of a connector by request length, with memcpy and the bare transport in the same
rounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from pdkv.connector_kit.bench.plan import Plan, open_setting, plan_bytes, store_values
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer, Timing
from pdkv.connector_kit.bench.turns import Spread, take_turns
from pdkv.connector_kit.bench.yardsticks import Memcpy, open_bare
from pdkv.connector_kit.rig.world import Setting, Shape
from pdkv.connectors.transfer.planning import as_ids, blocks_of, reader_parts, run_starts


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one length and pattern. Ratios are taken in each round; None: not compared."""

    connector: str
    layout: str
    pattern: str
    tp: list[int]  # ranks of the producer and of the consumer
    tokens: int
    bytes: int  # of all of the consumer's ranks
    pieces: int  # of memory, after merging
    rounds: int
    ms: Spread
    scheduler_ms: Spread  # of it, allocation and metadata
    producer_step_ms: Spread  # CPU time of the connector's calls on the step thread, including the prompt's steps
    consumer_step_ms: Spread
    gb_s: Spread
    memcpy_gb_s: Spread
    ratio_to_memcpy: Spread
    raw_gb_s: Spread | None  # the bare transport, in one piece
    ratio_to_raw: Spread | None
    per_piece_gb_s: Spread | None  # the bare transport in pieces, by default one per (layer, K or V, block)
    ratio_to_per_piece: Spread | None
    save_gb_s: Spread | None  # store: into it


def measure(plan: Plan, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """Measure all lengths in all patterns; the first load of each is compared with what was sent, and not counted.

    Raises:
        ConfigError: unknown connector, option or shape.
        Violation: a load fails, or delivers wrong content.
    """
    rows = []
    with open_setting(plan) as setting, BenchWorld(setting, plan.producer, plan.consumer) as world:
        for num_tokens in plan.tokens:
            for row in _measure_length(plan, setting, world, num_tokens):
                rows.append(row)
                on_row(row)
    return rows


def measure_in_turns(plans: Mapping[str, Plan], num_tokens: int) -> dict[str, list[float]]:
    """Milliseconds of transfers of `num_tokens` tokens, by plan name.

    Each plan has its own engines, and the plans take turns. The first transfer of each is compared with what was sent;
    the first plan gives the number of repetitions.

    Raises:
        ConfigError: unknown connector, option or shape.
        Violation: a load fails, or delivers wrong content.
    """
    with ExitStack() as stack:
        work: dict[str, Callable[[], Timing]] = {}
        for name, plan in plans.items():
            setting = stack.enter_context(open_setting(plan))
            world = stack.enter_context(BenchWorld(setting, plan.producer, plan.consumer))
            world.scatter("aged")
            TimedTransfer(world, num_tokens).measure(compare=True)
            work[name] = lambda world=world: TimedTransfer(world, num_tokens).measure()  # type: ignore[misc]
        timings = take_turns(work, next(iter(plans.values())).repeats)
    return {name: [each.seconds * 1e3 for each in took] for name, took in timings.items()}


def _measure_length(plan: Plan, setting: Setting, world: BenchWorld, num_tokens: int) -> Iterator[Row]:
    """Measure one length: a row for each pattern."""
    size = plan_bytes(plan, num_tokens)
    memcpy = Memcpy(size, plan.region_bytes)
    yardsticks: dict[str, Callable[[], float]] = {"memcpy": memcpy.seconds}
    with ExitStack() as stack:
        bare = open_bare(plan, setting, size) if plan.bare else None
        if bare is not None:
            stack.enter_context(bare)
            yardsticks |= {"raw": lambda: bare.seconds(False), "per_piece": lambda: bare.seconds(True)}
        for pattern in plan.patterns:
            world.scatter(pattern)
            TimedTransfer(world, num_tokens).measure(compare=True)
            transfers: list[TimedTransfer] = []
            own = partial(_measure_next, world, num_tokens, transfers)
            took: dict[str, list[Any]] = take_turns({"": own, **yardsticks}, plan.repeats)
            timings: list[Timing] = took.pop("")
            yield _row(plan, pattern, num_tokens, size, _pieces(plan, transfers[-1], num_tokens), timings, took)


def _measure_next(world: BenchWorld, num_tokens: int, transfers: list[TimedTransfer]) -> Timing:
    transfers.append(TimedTransfer(world, num_tokens))
    return transfers[-1].measure()


def _pieces(plan: Plan, transfer: TimedTransfer, num_tokens: int) -> int:
    if transfer.producer.card.kind == "store":
        tokens, parts = store_values(plan, plan.options)
        return -(-num_tokens // tokens) * parts
    return planned_pieces(plan.producer, plan.consumer, num_tokens, *transfer.tables)


def planned_pieces(
    producer: Shape, consumer: Shape, num_tokens: int, source: Sequence[int], target: Sequence[int]
) -> int:
    """Pieces that are contiguous on both sides, over all of the consumer's ranks.

    Args:
        source, target: block tables; the first blocks hold token 0.
    """
    heads = producer.num_heads
    same_heads = producer.layout().num_kv_heads == consumer.layout().num_kv_heads
    if producer.block_size == consumer.block_size:
        count = len(blocks_of(0, num_tokens, consumer.block_size))
        if same_heads:
            return run_starts(as_ids(source[:count]), as_ids(target[:count])).size * consumer.tp
        per_part = 1  # a block's tokens of adjacent heads are contiguous
        segments = count
    else:
        per_part = 0
        segments = len({token for shape in (producer, consumer) for token in range(0, num_tokens, shape.block_size)})
    parts = [
        part for rank in range(consumer.tp) for part in reader_parts(rank, consumer.tp, producer.tp, heads)
    ]  # fmt: skip
    runs = sum(per_part or part.num_heads for part in parts)
    return segments * producer.num_layers * producer.sides * runs


def _row(
    plan: Plan,
    pattern: str,
    tokens: int,
    size: int,
    pieces: int,
    timings: Sequence[Timing],
    yardsticks: Mapping[str, Sequence[float]],
) -> Row:
    """`timings`: of each round; `yardsticks`: seconds of memcpy and, where there is a bare transport, of that."""
    seconds = [timing.seconds for timing in timings]

    def gb_s(took: Sequence[float]) -> Spread:
        return Spread.of(size / each / 1e9 for each in took)

    bare = {name: gb_s(yardsticks[name]) for name in ("raw", "per_piece") if name in yardsticks}
    ratios = {name: Spread.of_ratios(took, seconds) for name, took in yardsticks.items()}
    saves = [timing.save_s for timing in timings if timing.save_s]
    return Row(
        connector=plan.connector,
        layout=plan.layout,
        pattern=pattern,
        tp=[plan.producer.tp, plan.consumer.tp],
        tokens=tokens,
        bytes=size,
        pieces=pieces,
        rounds=len(timings),
        ms=Spread.of(each * 1e3 for each in seconds),
        scheduler_ms=Spread.of(timing.scheduler_s * 1e3 for timing in timings),
        producer_step_ms=Spread.of(timing.producer_step_s * 1e3 for timing in timings),
        consumer_step_ms=Spread.of(timing.consumer_step_s * 1e3 for timing in timings),
        gb_s=gb_s(seconds),
        memcpy_gb_s=gb_s(yardsticks["memcpy"]),
        ratio_to_memcpy=ratios["memcpy"],
        raw_gb_s=bare.get("raw"),
        ratio_to_raw=ratios.get("raw"),
        per_piece_gb_s=bare.get("per_piece"),
        ratio_to_per_piece=ratios.get("per_piece"),
        save_gb_s=gb_s(saves) if saves else None,
    )
