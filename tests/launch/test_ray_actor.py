"""An engine in an actor, without Ray: what the actor says of it, and that nothing of it is left."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.launch import ray_actor, starter
from pdkv.launch.children import Child
from pdkv.launch.ray_actor import EngineActor, Exited, LogLines, Order, Started, StartFailed, decode_event, settle
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.specs import EngineSpec, Progress, encode

KEY = "k" * 64


def order(connector: str = "p2p", **config: object) -> Order:
    config = {"kv_cache_memory": 8 << 20, "threads": 1, **config}
    spec = EngineSpec(
        name="decode-0", role="decode", epoch="", config=EngineConfig(**config),
        handoff=HandoffConfig(connector=connector, connector_config={}),
        connector=NO_PLAN, endpoint="", num_engines=2, start_timeout_s=20.0,
    )  # fmt: skip
    return Order(spec, TiersConfig(), KEY)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch, fake_child: Callable[[str, int, str], Child]) -> list[EngineSpec]:
    """The specs of the engines that are started, as stand-ins that die with the process that started them."""
    started: list[EngineSpec] = []

    def spawn_engine(spec: EngineSpec, ack_fd: int, lifeline_fd: int, rank_fds: Sequence[int]) -> Child:
        started.append(spec)
        os.write(2, b"a line\nand half")
        return fake_child(spec.process_name, ack_fd, "refuse" if spec.config.max_num_seqs == 7 else "serve")

    monkeypatch.setattr(starter, "spawn_engine", spawn_engine)
    monkeypatch.setattr(ray_actor, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_actor, "configure_logging", lambda *_: None)
    return started


async def test_an_actor_tells_of_its_engine_until_its_end(specs: list[EngineSpec]) -> None:
    actor = EngineActor()
    events, key = [], ""
    async for data in actor.run(encode(order())):
        events.append(decode_event(data))
        if isinstance(events[-1], Started):
            assert specs[0].cluster_key_file is not None
            key = specs[0].cluster_key_file.read_text()
            assert specs[0].cluster_key_file.stat().st_mode & 0o777 == 0o600
            await actor.signal(signal.SIGTERM)
    started = next(event for event in events if isinstance(event, Started))
    assert started.pid > 0
    assert started.endpoint == specs[0].endpoint
    assert Progress("half") in events
    assert LogLines("a line") in events
    assert events[-1] == Exited(-signal.SIGTERM)
    assert key == KEY
    assert specs[0].run_dir is not None
    assert not specs[0].run_dir.exists()


async def test_a_failed_start_is_told_as_it_was(specs: list[EngineSpec]) -> None:
    events = [decode_event(data) async for data in EngineActor().run(encode(order(max_num_seqs=7)))]
    assert [e for e in events if isinstance(e, StartFailed)] == [StartFailed("dtype is wrong", config=True)]
    assert events[-1] == Exited(1)


@pytest.mark.parametrize("connector", ["p2p", "store"])
def test_an_engine_is_reached_at_its_node(connector: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = order(connector)
    if connector == "store":
        given.spec.handoff.connector_config["url"] = f"file://{tmp_path}"  # type: ignore[index]
    with RunDirectory() as run_dir:
        spec = settle(given, run_dir, "127.0.0.1")
    assert spec.endpoint.startswith("tcp://127.0.0.1:2") or spec.endpoint.startswith("tcp://127.0.0.1:3")
    assert spec.connector.options.get("host") == ("127.0.0.1" if connector == "p2p" else None)


def test_a_cancelled_actor_leaves_no_engine(specs: list[EngineSpec]) -> None:
    """As when its node is told to end it in order; killed, the lifeline ends the engine."""

    async def begin() -> int:
        async for data in EngineActor().run(encode(order())):
            if isinstance(event := decode_event(data), Started):
                return event.pid
        raise AssertionError("it did not start")

    pid = asyncio.run(begin())  # the loop's end cancels what is left in it
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
