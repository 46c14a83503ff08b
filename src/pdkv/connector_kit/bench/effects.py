"""A connector's effect on steps: during a slow transfer, and by the scheduler side's calls."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median

import msgspec

from pdkv.connector_kit.bench.plan import Plan, open_setting, sized
from pdkv.connector_kit.bench.timed_rank import TimedRank
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.handover import new_name, new_text
from pdkv.connector_kit.rig.request import Request

THROTTLED_TO = 0.1
"""Share of the pace at which the forward pass makes KV."""


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill steps during a transfer that is throttled to THROTTLED_TO of their pace."""

    connector: str
    layout: str
    chunk: int
    transport_mb_s: float  # of one rank
    idle_step_ms: float  # the same steps with an idle connector
    step_ms: float
    slowdown: float  # 0.1: a tenth longer


class SchedulerCost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of the scheduler side for one request."""

    connector: str
    cached_blocks: int  # with content that others have
    handoff_us: float
    lookup_us: float | None  # content that no engine has; None: it finds nothing by content


class Steps(TimedTransfer):
    """A prompt with timed chunks."""

    def step(self, start: int) -> float:
        """Seconds of the step thread for one chunk."""
        stop = min(start + self.chunk, self.num_tokens)
        self.writer.take_cost()
        span = self.writer.run_timed(self.producer.plan((self.sender, start, stop)))
        self.sender.num_confirmed = stop
        if stop < self.num_tokens:
            self.producer.confirm(self.sender)
        return span.ended - span.began + self.writer.take_cost().wall_s

    def tail(self) -> float:
        """Seconds from the end of the last chunk's step until the reader has all of the prompt."""
        start = self.starts[-1]
        awaits_early = self.reader.hosts[0].pid != self.writer.hosts[0].pid  # one process does one thing at a time
        if awaits_early:
            self.reader.await_ends([self.key])
        computed = self.writer.run_timed(self.producer.plan((self.sender, start, self.num_tokens)))
        self.sender.num_confirmed = self.num_tokens
        self.hand_off()
        self.writer.step()
        if not awaits_early:
            self.reader.await_ends([self.key])
        return max(self.reader.take_span().ended - computed.ended, 0.0)

    def idle_step(self, start: int) -> float:
        """As `step`, for a request that the connector is not told of."""
        stop = min(start + self.chunk, self.num_tokens)
        tokens = p.TokenRange(list(self.sender.text), start, stop, self.sender.block_tables)
        self.writer.take_cost()
        span = self.writer.run_timed(replace(self.producer.plan(), writes=[tokens]))
        return span.ended - span.began + self.writer.take_cost().wall_s

    @property
    def starts(self) -> range:
        """First tokens of the chunks."""
        return range(0, self.num_tokens, self.chunk)

    def expect(self) -> None:
        """Push: wait until the reader is ready, and the writer knows."""
        for step in (self.find, self.allocate, self.start, self.bring_ticket):
            step()


def measure_slowdown(
    plan: Plan, *, chunk: int = 512, num_steps: int = 6, step_s: float = 0.1, rounds: int = 3
) -> Slowdown:
    """Measure steps during saves (push, store) or while a peer loads (pull), against steps without transfers.

    The forward pass computes for about `step_s`; all I/O threads are throttled. Raises ConfigError or Violation.
    """
    tokens = chunk * num_steps
    shapes = [sized(shape, 2 * tokens, plan.region_bytes) for shape in (plan.producer, plan.consumer)]
    rank_bytes = chunk * shapes[0].layout().token_bytes
    rate = THROTTLED_TO * rank_bytes / step_s
    idle: list[float] = []
    busy: list[float] = []
    with open_setting(plan) as setting, BenchWorld(setting, *shapes) as world:
        world.scatter("aged")
        TimedTransfer(world, chunk).measure()
        world.writer.ask_all(TimedRank.forward, step_s / plan.producer.num_layers)
        for _ in range(rounds):
            idle.append(_idle_round(world, tokens, chunk))
            busy.append(_busy_round(world, tokens, chunk, rate))
    return Slowdown(
        connector=plan.connector,
        layout=plan.layout,
        chunk=chunk,
        transport_mb_s=rate / 1e6,
        idle_step_ms=median(idle) * 1e3,
        step_ms=median(busy) * 1e3,
        slowdown=median(b / i for b, i in zip(busy, idle, strict=True)) - 1,
    )


def _idle_round(world: BenchWorld, tokens: int, chunk: int) -> float:
    prompt = Steps(world, tokens, chunk=chunk)
    prompt.begin_prefill()
    seconds = mean([prompt.idle_step(start) for start in prompt.starts])
    prompt.abort()
    come_to_rest(world)
    return seconds


def _busy_round(world: BenchWorld, tokens: int, chunk: int, rate: float) -> float:
    """One round: the previous prompt is being loaded (pull, store), or the prompt's own chunks are sent (push)."""
    before, prompt = TimedTransfer(world, tokens), Steps(world, tokens, chunk=chunk)
    if prompt.is_push:
        _throttle(world, rate)
        prompt.expect()
    else:
        before.prefill()
        before.find()
        before.allocate()
        _throttle(world, rate)
        before.start()
    prompt.begin_prefill()
    seconds = mean([prompt.step(start) for start in prompt.starts])
    _throttle(world, 0.0)
    for transfer in (prompt, before):
        transfer.abort()
    come_to_rest(world)
    return seconds


def _throttle(world: BenchWorld, rate: float) -> None:
    for engine in (world.writer, world.reader):
        engine.ask_all(TimedRank.throttle, rate)


def come_to_rest(world: BenchWorld) -> None:
    """Wait until neither engine has anything to do."""
    world.until(lambda: world.writer.is_idle and world.reader.is_idle, "both sides come to rest")


def measure_scheduler_cost(
    plan: Plan, num_cached: Sequence[int], *, num_tokens: int = 1024, repeats: int = 15
) -> list[SchedulerCost]:
    """Measure hand-offs and lookups by content, with an ascending number of other prompts' blocks cached at the
    peer.
    """
    tokens = num_cached[-1] * plan.producer.block_size + 2 * repeats * num_tokens
    shapes = [sized(shape, tokens, plan.region_bytes) for shape in (plan.producer, plan.consumer)]
    costs = []
    with open_setting(plan) as setting, BenchWorld(setting, *shapes) as world:
        world.scatter("contiguous")
        per_prompt = num_tokens // shapes[0].block_size
        cached = 0
        for wanted in num_cached:
            while cached < wanted:
                TimedTransfer(world, num_tokens).measure()
                cached += per_prompt
            timings = [TimedTransfer(world, num_tokens).measure() for _ in range(repeats)]
            cached += repeats * per_prompt
            lookups = [_lookup_s(world, num_tokens) for _ in range(repeats)]
            found = world.reader.card.content_addressed
            costs.append(SchedulerCost(
                connector=plan.connector,
                cached_blocks=cached,
                handoff_us=median(timing.scheduler_cpu_s for timing in timings) * 1e6,
                lookup_us=median(lookups) * 1e6 if found else None,
            ))  # fmt: skip
    return costs


def _lookup_s(world: BenchWorld, num_tokens: int) -> float:
    """Seconds that the scheduler side takes to look for content that no engine has."""
    reader = world.reader
    request = Request(
        new_text(num_tokens), num_tokens, kv="local", transfer_id=new_name(), attempt=0, layout=reader.layout
    )
    reader.take_cost()
    reader.ask(TimedRank.match, request.view(), 0)
    seconds = reader.take_cost().cpu_s
    reader.tell_aborted(request.transfer_key)
    reader.step()
    return seconds
