"""Bandwidth and latency of a connector by request length, beside memcpy and the bare transport in the same rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from pdkv.connector_kit.bench.pieces import planned_pieces, stored_pieces
from pdkv.connector_kit.bench.plan import Plan, open_setting, plan_bytes, store_values
from pdkv.connector_kit.bench.spread import Spread
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer, Timing
from pdkv.connector_kit.bench.yardsticks import Memcpy, open_bare
from pdkv.connector_kit.rig.world import Setting


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One length and pattern. Ratios are taken in each round. None: there is nothing to compare with."""

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
    producer_step_ms: Spread  # CPU time of the connector's calls on the step thread, the prompt's steps included
    consumer_step_ms: Spread
    gb_s: Spread
    memcpy_gb_s: Spread
    ratio_to_memcpy: Spread
    raw_gb_s: Spread | None  # the bare transport, in one piece
    ratio_to_raw: Spread | None
    per_piece_gb_s: Spread | None  # the bare transport in pieces, by default one per (layer, K or V, block)
    ratio_to_per_piece: Spread | None
    save_gb_s: Spread | None  # store: into it


class Round(NamedTuple):
    """One transfer, and the seconds that each yardstick took just before or after it."""

    timing: Timing
    yardsticks: Mapping[str, float]  # memcpy; raw and per_piece, where there is a bare transport

    @property
    def seconds(self) -> float:
        """All of the transfer."""
        return self.timing.transfer_s + self.timing.scheduler_s


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
    """A row for each pattern."""
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
            rounds: list[Round] = []
            for turn in range(plan.repeats + 1):
                transfer = TimedTransfer(world, num_tokens)
                took = _take_turns(turn, transfer, yardsticks)
                if turn:  # all of them are warm
                    rounds.append(took)
            yield _row(plan, pattern, num_tokens, size, _pieces(plan, transfer, num_tokens), rounds)


def _take_turns(turn: int, transfer: TimedTransfer, yardsticks: Mapping[str, Callable[[], float]]) -> Round:
    """What is compared meets the same weather, and follows each of the others in turn."""
    timings: list[Timing] = []
    took: dict[str, float] = {}
    names = ["", *yardsticks]
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        if name:
            took[name] = yardsticks[name]()
        else:
            timings.append(transfer.measure())
    return Round(timings[0], took)


def _pieces(plan: Plan, transfer: TimedTransfer, num_tokens: int) -> int:
    if transfer.producer.card.kind == "store":
        return stored_pieces(num_tokens, *store_values(plan, plan.options))
    return planned_pieces(plan.producer, plan.consumer, num_tokens, *transfer.tables)


def _row(plan: Plan, pattern: str, tokens: int, size: int, pieces: int, rounds: Sequence[Round]) -> Row:
    timings = [each.timing for each in rounds]
    saves = [timing.save_s for timing in timings if timing.save_s]

    def gb_s(seconds: Sequence[float]) -> Spread | None:
        return Spread.of(size / each / 1e9 for each in seconds) if seconds else None

    def of(name: str) -> list[float]:
        return [each.yardsticks[name] for each in rounds if name in each.yardsticks]

    def ratio(name: str) -> Spread | None:
        return Spread.of(s / each.seconds for s, each in zip(of(name), rounds, strict=True)) if of(name) else None

    return Row(
        connector=plan.connector,
        layout=plan.layout,
        pattern=pattern,
        tp=[plan.producer.tp, plan.consumer.tp],
        tokens=tokens,
        bytes=size,
        pieces=pieces,
        rounds=len(rounds),
        ms=Spread.of(each.seconds * 1e3 for each in rounds),
        scheduler_ms=Spread.of(timing.scheduler_s * 1e3 for timing in timings),
        producer_step_ms=Spread.of(timing.producer_step_s * 1e3 for timing in timings),
        consumer_step_ms=Spread.of(timing.consumer_step_s * 1e3 for timing in timings),
        gb_s=_there(gb_s([each.seconds for each in rounds])),
        memcpy_gb_s=_there(gb_s(of("memcpy"))),
        ratio_to_memcpy=_there(ratio("memcpy")),
        raw_gb_s=gb_s(of("raw")),
        ratio_to_raw=ratio("raw"),
        per_piece_gb_s=gb_s(of("per_piece")),
        ratio_to_per_piece=ratio("per_piece"),
        save_gb_s=gb_s(saves),
    )


def _there(spread: Spread | None) -> Spread:
    assert spread is not None, "there is at least one round"
    return spread
