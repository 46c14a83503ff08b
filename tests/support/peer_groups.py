"""Two engines of a model with KV groups that hand a request over, stepped by hand."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engines import at_rest

from pdkv.build_engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.wire.messages import EngineToRouter, KVGroup, Peers

WAIT_S = 30.0

FULL_AND_WINDOW = (KVGroup((0,)), KVGroup((1,), 6))
ALL_WINDOW = (KVGroup((0, 1), 6),)
TWO_WINDOWS = (KVGroup((1,), 3), KVGroup((0,), 9))


def layer_windows(groups: Sequence[KVGroup]) -> list[int]:
    """Of the stand-in's two layers."""
    return [next(group.window for group in groups if layer in group.layers) for layer in range(2)]


def meet(cores: Sequence[EngineCore]) -> None:
    """They know one another."""
    for core in cores:
        core.handle("r", Peers([other.card for other in cores]), 0.0)


def run_to_rest(cores: Sequence[EngineCore], others: Sequence[EngineCore] = ()) -> list[EngineToRouter]:
    """Step engines until none of `cores` has a request or news for its workers; returns their messages."""
    messages: list[EngineToRouter] = []
    deadline = time.monotonic() + WAIT_S
    while any(core.requests or core.external.has_news for core in cores):
        assert time.monotonic() < deadline, "a request does not end"
        for core in (*cores, *others):
            core.step(0.0)
            core.scheduler.kv.pool.check_integrity()
            sent = [m for _, batch in core.take_messages(0.0) for m in batch]
            messages += sent if core in cores else []
    return messages


def settle(core: EngineCore) -> None:
    """Step an engine until all its blocks are free or cached."""
    deadline = time.monotonic() + WAIT_S
    while not at_rest(core):
        assert time.monotonic() < deadline, core.scheduler.kv.pool.counts()
        core.step(0.0)


@contextmanager
def engines_of(model: Path, connector: str, options: Mapping[str, str]) -> Iterator[tuple[EngineCore, EngineCore]]:
    """A prefill and a decode engine of a model directory, in this process."""
    with ExitStack() as stack:
        made: list[EngineCore] = []
        for role in ("p", "d"):
            config = EngineConfig(model=model, device="cpu", threads=1, kv_cache_memory=4 << 20)
            handoff = HandoffConfig(connector=connector, connector_config=dict(options))
            name = f"{role}-{model.name}-{connector}"
            core = build_engine(config, handoff, name=name, epoch=f"{name}.0")
            stack.callback(core.shutdown)
            core.router_joined("r", "1")
            made.append(core)
        meet(made)
        yield made[0], made[1]
