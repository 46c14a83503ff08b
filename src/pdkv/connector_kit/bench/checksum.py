"""What digests cost: transfers whose KV is compared with what was sent, beside transfers without."""

from contextlib import ExitStack
from dataclasses import replace

import msgspec

from pdkv.connector_kit.bench.plan import Plan, open_setting
from pdkv.connector_kit.bench.spread import Spread
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.wire.kv import ChecksumMode

_MODES: tuple[ChecksumMode, ChecksumMode] = ("on", "off")


class ChecksumCost(msgspec.Struct, frozen=True, kw_only=True):
    """One length, in a pool of scattered blocks."""

    connector: str
    layout: str
    tokens: int
    rounds: int
    on_ms: Spread
    off_ms: Spread
    ratio: Spread  # with digests to without


def measure_checksum_cost(plan: Plan, num_tokens: int) -> ChecksumCost:
    """The same transfers between two pairs of engines by turns. Raises ConfigError or Violation."""
    took: dict[ChecksumMode, list[float]] = {mode: [] for mode in _MODES}
    with ExitStack() as stack:
        setting = stack.enter_context(open_setting(plan))
        worlds = {
            mode: stack.enter_context(BenchWorld(replace(setting, kv_checksum=mode), plan.producer, plan.consumer))
            for mode in _MODES
        }
        for world in worlds.values():
            world.scatter("aged")
            TimedTransfer(world, num_tokens).measure(compare=True)
        for turn in range(plan.repeats + 1):
            for mode in _MODES if turn % 2 else _MODES[::-1]:
                timing = TimedTransfer(worlds[mode], num_tokens).measure()
                if turn:  # both are warm
                    took[mode].append((timing.transfer_s + timing.scheduler_s) * 1e3)
    return ChecksumCost(
        connector=plan.connector,
        layout=plan.layout,
        tokens=num_tokens,
        rounds=plan.repeats,
        on_ms=Spread.of(took["on"]),
        off_ms=Spread.of(took["off"]),
        ratio=Spread.of(on / off for on, off in zip(took["on"], took["off"], strict=True)),
    )
