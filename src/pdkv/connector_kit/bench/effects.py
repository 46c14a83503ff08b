"""A connector's effect on steps during a slow transfer."""

from dataclasses import replace
from statistics import mean, median

import msgspec

from pdkv.connector_kit.bench.plan import Plan, open_setting, sized
from pdkv.connector_kit.bench.timed_rank import TimedRank
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.connector_kit.rig import protocol as p

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
        return span.ended - span.began + self.writer.take_cost()

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
        return span.ended - span.began + self.writer.take_cost()

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
