"""The launcher's side of an engine in an actor, with Ray replaced by what it would say."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from pdkv.config import EngineConfig
from pdkv.errors import ConfigError, StartupError
from pdkv.launch.ray_actor import Event, Exited, LogLines, Started, StartFailed
from pdkv.launch.ray_cluster import RayChild, resources
from pdkv.launch.specs import Identified, encode
from pdkv.launch.starter import Children


class Actor:
    """Says what it is given to say, then nothing, or that it is lost."""

    def __init__(self, *events: Event | Exception) -> None:
        self.events = events
        self.killed = 0

    async def say(self) -> AsyncIterator["asyncio.Future[bytes]"]:
        for event in self.events:
            answer = asyncio.get_running_loop().create_future()
            if isinstance(event, Exception):
                answer.set_exception(event)
            else:
                answer.set_result(encode(event))
            yield answer
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(actor: Actor) -> None:
        actor.killed += 1

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=kill))


def follow(actor: Actor, identities: list[str] | None = None) -> RayChild:
    child = RayChild("decode-0", actor)
    children = Children(
        20.0, lambda *_: None, lambda _, model: (identities if identities is not None else []).append(model)
    )
    child.follow(actor.say(), children)
    return child


async def test_an_engine_is_ready_where_it_says_and_ends_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    identities: list[str] = []
    actor = Actor(Identified("A"), LogLines("a line"), Started(17, "tcp://h:1"), Exited(3))
    child = follow(actor, identities)
    await child.ready
    assert (child.pid, child.endpoint, identities) == (17, "tcp://h:1", ["A"])
    assert await child.wait() == 3
    assert actor.killed == 1, "nothing of it is left"
    assert "a line\n" in capfd.readouterr().err


async def test_a_lost_node_is_a_dead_engine() -> None:
    actor = Actor(Started(17, "tcp://h:1"), RuntimeError("its node has died"))
    assert await follow(actor).wait() == -signal.SIGKILL
    assert actor.killed == 1, "it may still run, where Ray cannot see it"


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (StartFailed("dtype is wrong", config=True), ConfigError, "dtype is wrong"),
        (StartFailed("no memory", config=False), StartupError, "decode-0: no memory"),
        (RuntimeError("trace\nNo module named 'pdkv'"), StartupError, "decode-0: No module named 'pdkv'"),
        (Exited(1), StartupError, "decode-0 died before it was ready"),
    ],
)
async def test_a_failed_start_says_why(event: Event | Exception, kind: type[Exception], text: str) -> None:
    child = follow(Actor(event))
    with pytest.raises(kind, match=text):
        await child.ready
    await child.wait()


async def test_who_does_not_say_that_it_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.launch.ray_cluster._GONE_S", 0.01)
    child = follow(Actor(Started(17, "tcp://h:1")))
    await child.ready
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


def test_an_engine_asks_for_its_threads_and_devices() -> None:
    assert resources(EngineConfig(device="cpu", tp=2, threads=3)) == {"CPU": 6.0}
    assert resources(EngineConfig(device="cuda", tp=2)) == {"CPU": 2.0, "GPU": 2.0}
