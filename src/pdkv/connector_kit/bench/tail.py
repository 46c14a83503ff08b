"""Measures what is left of a push when the forward pass ends."""

from statistics import median

import msgspec

from pdkv.connector_kit.bench.effects import Steps, come_to_rest
from pdkv.connector_kit.bench.plan import Plan, open_setting, plan_bytes, sized
from pdkv.connector_kit.bench.timed_rank import TimedRank
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.connector_kit.bench.turns import Spread
from pdkv.connector_kit.bench.yardsticks import open_bare
from pdkv.connector_kit.rig.world import NotApplicable, require

TOKENS = 2048
STEP_COUNTS = (1, 4)
"""Steps of a prompt: one, as by default, and four."""

PACE = 2300.0
"""Tokens per second of the forward pass, as for the mid layout on two threads."""

BARE_SHARE, SLACK_MS = 0.25, 2.0
"""The allowed tail: a share of the bare transfer, plus milliseconds."""


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
