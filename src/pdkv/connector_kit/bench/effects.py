"""A connector's effect on steps during a slow transfer, and what is left of a push when the forward pass ends."""

from statistics import mean, median

import msgspec

from pdkv.connector_kit.bench.plan import Plan, open_setting, plan_bytes, sized
from pdkv.connector_kit.bench.timed_rank import TimedRank
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.connector_kit.bench.turns import Spread
from pdkv.connector_kit.bench.yardsticks import open_bare
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.world import NotApplicable, require

THROTTLED_TO = 0.1
"""Share of the pace at which the forward pass makes KV."""

TAIL_TOKENS = 2048
STEP_COUNTS = (1, 4)
"""Steps of a prompt: one, as by default, and four."""

PACE = 2300.0
"""Tokens per second of the forward pass, as for the mid layout on two threads."""

BARE_SHARE, SLACK_MS = 0.25, 2.0
"""The allowed tail: a share of the bare transfer, plus milliseconds."""


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill steps during a transfer that is throttled to THROTTLED_TO of their pace."""

    connector: str
    layout: str
    chunk: int
    transport_mb_s: float  # of one rank
    idle_step_ms: float  # the same steps with an idle connector
    step_ms: float
    slowdown: float  # 0.1: a tenth longer


class PushTail(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in a number of steps of the forward pass."""

    connector: str
    layout: str
    tokens: int
    steps: int
    rounds: int
    tail_ms: Spread  # from the end of the step with the last chunk to the reader's report
    bare_ms: Spread  # all of the bytes on the bare transport, in one piece
    ratio_to_allowed: Spread  # relative to BARE_SHARE of the bare transfer plus SLACK_MS


class Steps(TimedTransfer):
    """A prompt with timed chunks."""

    def step(self, start: int, *, is_idle: bool = False) -> float:
        """Seconds of the step thread for one chunk. `is_idle`: the connector is not told of it."""
        stop = min(start + self.chunk, self.num_tokens)
        self.writer.take_cost()
        if is_idle:
            tokens = p.TokenRange(list(self.sender.text), start, stop, self.sender.block_tables)
            span = self.writer.run_timed(msgspec.structs.replace(self.producer.plan(), writes=[tokens]))
        else:
            span = self.writer.run_timed(self.producer.plan((self.sender, start, stop)))
            self.computed(stop)
        return span.ended - span.began + self.writer.take_cost()

    def tail(self) -> float:
        """Seconds from the end of the last chunk's step until the reader has all of the prompt."""
        start = self.starts[-1]
        awaits_early = self.reader.hosts[0].pid != self.writer.hosts[0].pid  # one process does one thing at a time
        if awaits_early:
            self.reader.await_ends([self.key])
        computed = self.writer.run_timed(self.producer.plan((self.sender, start, self.num_tokens)))
        self.computed(self.num_tokens)
        self.hand_off()
        self.writer.step()
        if not awaits_early:
            self.reader.await_ends([self.key])
        return max(self.reader.take_span().ended - computed.ended, 0.0)

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
    seconds = mean([prompt.step(start, is_idle=True) for start in prompt.starts])
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


def measure_push_tail(
    plan: Plan, num_tokens: int, *, step_counts: tuple[int, ...] = STEP_COUNTS, pace: float = PACE
) -> list[PushTail]:
    """Measure how much of a push is left when the forward pass has ended, for each number of steps, in turns.

    Raises:
        NotApplicable: the connector does not push, or its bare transport is not known.
        Violation: a push fails.
    """
    shapes = [sized(shape, num_tokens, plan.region_bytes) for shape in (plan.producer, plan.consumer)]
    with open_setting(plan) as setting, BenchWorld(setting, *shapes) as world:
        if world.writer.card.kind != "push":
            raise NotApplicable(f"{plan.connector} does not push")
        bare = open_bare(plan, setting, plan_bytes(plan, num_tokens))
        if bare is None:
            raise NotApplicable(f"no bare transport is known for {plan.connector}")
        world.scatter("aged")
        TimedTransfer(world, num_tokens).measure()
        took: dict[int, list[tuple[float, float]]] = {count: [] for count in step_counts}
        with bare:
            bare.seconds(False)
            for _ in range(plan.repeats):
                for count in step_counts:
                    tail = _tail_s(world, num_tokens, count, num_tokens / pace / count / plan.producer.num_layers)
                    took[count].append((tail * 1e3, median(bare.seconds(False) for _ in range(3)) * 1e3))
    return [
        PushTail(
            connector=plan.connector,
            layout=plan.layout,
            tokens=num_tokens,
            steps=count,
            rounds=len(rounds),
            tail_ms=Spread.of(tail for tail, _ in rounds),
            bare_ms=Spread.of(whole for _, whole in rounds),
            ratio_to_allowed=Spread.of(tail / (BARE_SHARE * whole + SLACK_MS) for tail, whole in rounds),
        )
        for count, rounds in took.items()
    ]


def _tail_s(world: BenchWorld, num_tokens: int, num_steps: int, layer_s: float) -> float:
    world.writer.ask_all(TimedRank.forward, layer_s)
    prompt = Steps(world, num_tokens, chunk=-(-num_tokens // num_steps))
    prompt.expect()
    prompt.begin_prefill()
    for start in prompt.starts[:-1]:
        prompt.step(start)
    tail = prompt.tail()
    require(not prompt.wait().code, f"{prompt.describe()} failed: {prompt.wait().code}")
    world.until(lambda: prompt.key in world.writer.sent, "the sending ends")
    prompt.end()
    come_to_rest(world)
    return tail
