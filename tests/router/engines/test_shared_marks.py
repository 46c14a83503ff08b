"""Marks of engines travel between routers through a real Redis, and its death harms nothing."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

import pytest
from scripted_engine import make_card
from store_servers import RedisServer

from pdkv.errors import ConfigError
from pdkv.router.engines import shared_marks
from pdkv.router.engines.breakers import MIN_EVENTS
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.foreign_marks import ForeignMarks, Subject
from pdkv.router.engines.shared_marks import CHANNEL, SharedMarks, own_marks
from pdkv.wire.messages import Beat

D0: Subject = (("decode-0", "e0"),)
PAIR: Subject = (("prefill-0", "e0"), ("decode-0", "e0"))


class Router:
    """A fleet of four engines whose marks are shared."""

    def __init__(self, name: str, url: str) -> None:
        self.fleet = Fleet()
        for role in ("prefill", "decode"):
            for i in range(2):
                self.fleet.add(f"{role}-{i}", role)
                self.fleet.came_up(f"{role}-{i}", make_card(f"{role}-{i}", role, beats="ipc:///b"))
        self.changed = asyncio.Event()
        self.marks = SharedMarks(url, name, self._hear)

    def _hear(self, subject: Subject, reason: str) -> None:
        self.fleet.hearsay.hear(subject, reason)
        self.changed.set()

    def say(self, now: float = 0.0) -> None:
        self.marks.update(own_marks(self.fleet, now))

    def decodes(self, now: float = 0.0) -> list[str]:
        return [e.name for e in self.fleet.candidates("decode", now)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(shared_marks, "REPEAT_S", 0.05)
    monkeypatch.setattr(shared_marks, "_RETRY_S", 0.05)
    with RedisServer() as redis:
        yield redis


def run(server: RedisServer, body: Callable[[Router, Router], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            routers = [Router(name, server.url) for name in ("first", "second")]
            for router in routers:
                router.marks.start()
            try:
                await body(*routers)
            finally:
                for router in routers:
                    await router.marks.close()

    asyncio.run(main())


def test_what_one_router_finds_out_the_other_knows_until_it_ends(server: RedisServer) -> None:
    async def body(first: Router, second: Router) -> None:
        suspect = first.fleet.engines["decode-0"]
        suspect.health.beat(Beat("e0", 9.0, 0.1))
        first.say()
        await second.until(lambda: second.decodes() == ["decode-1"])
        assert second.fleet.suspects == {}, "it is passed over, and keeps its requests"
        suspect.health.beat(Beat("e0", 0.0))
        first.say()
        await second.until(lambda: second.decodes() == ["decode-0", "decode-1"])
        for _ in range(MIN_EVENTS):
            suspect.breaker.failed(0.0)
        first.fleet.pairs.loaded("prefill-0", "decode-1", False, 0.0)
        first.say()
        await second.until(lambda: second.decodes() == ["decode-1"])
        assert second.fleet.avoided_pairs(0.0) == {("prefill-0", "decode-1")}
        assert own_marks(second.fleet, 0.0) == {}, "hearsay is not told on"

    run(server, body)


def test_a_mark_is_told_when_it_is_made_and_when_it_ends_not_when_it_is_repeated(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers look for marks ten times a second (TICK_S): with this, another one knows within 0.2 s."""
    monkeypatch.setattr(shared_marks, "REPEAT_S", 3600.0)

    async def body(first: Router, second: Router) -> None:
        while (await first.marks._redis.pubsub_numsub(CHANNEL))[0][1] < 2:
            await asyncio.sleep(0.01)
        suspect = first.fleet.engines["decode-0"]
        for beat, others in ((Beat("e0", 9.0, 0.1), ["decode-1"]), (Beat("e0", 0.0), ["decode-0", "decode-1"])):
            suspect.health.beat(beat)
            first.say()
            await second.until(lambda others=others: second.decodes() == others)  # type: ignore[misc]

    run(server, body)


def test_what_a_redis_that_hangs_holds_up_is_nothing_but_marks(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it takes connections and answers nothing."""
    monkeypatch.setattr(shared_marks, "_TIMEOUT_S", 0.1)

    async def body(first: Router, second: Router) -> None:
        with server.stopped():
            first.fleet.engines["decode-0"].health.beat(Beat("e0", 9.0, 0.1))
            first.say()
            while not first.marks.num_failures:
                await asyncio.sleep(0.01)
            assert first.decodes() == ["decode-1"]
        await second.until(lambda: second.decodes() == ["decode-1"])

    run(server, body)


def test_an_engine_of_the_same_name_in_another_launch_is_another_one(server: RedisServer) -> None:
    async def body(first: Router, second: Router) -> None:
        second.fleet.went_down("decode-0", 0.0)
        second.fleet.came_up("decode-0", make_card("decode-0", "decode", epoch="e1"))
        first.fleet.engines["decode-0"].health.beat(Beat("e0", 9.0, 0.1))
        first.say()
        await second.until(second.changed.is_set)
        assert second.decodes() == ["decode-0", "decode-1"]

    run(server, body)


def test_redis_may_die_and_come_back(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    def logged(words: str) -> int:
        return sum(f"marks are {words}" in record.getMessage() for record in caplog.records)

    async def body(first: Router, second: Router) -> None:
        first.fleet.engines["decode-0"].health.beat(Beat("e0", 9.0, 0.1))
        server.kill()
        first.say()
        while first.marks.num_failures < 4 or not second.marks.num_failures:
            await asyncio.sleep(0.01)
        assert first.decodes() == ["decode-1"]
        assert second.decodes() == ["decode-0", "decode-1"]
        server.start()
        await second.until(lambda: second.decodes() == ["decode-1"])
        while logged("shared again") < 2:  # each hears and tells on its own
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO):
        run(server, body)
    assert logged("not shared now") == 2, "once per router"
    assert logged("shared again") == 2


def test_closing_ends_what_the_client_has_not_cancelled(server: RedisServer) -> None:
    """What is under way is sometimes done with all the same (`asyncio.wait_for` of Python 3.11)."""

    async def body(first: Router, second: Router) -> None:
        published = asyncio.Event()

        async def publish(channel: str, message: bytes) -> None:
            if not published.is_set():
                published.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

        first.marks._redis.publish = publish
        first.fleet.engines["decode-0"].health.beat(Beat("e0", 9.0, 0.1))
        first.say()
        await published.wait()
        async with asyncio.timeout(5):
            await first.marks.close()

    run(server, body)


def test_messages_that_make_no_sense_are_counted_and_dropped(server: RedisServer) -> None:
    async def body(first: Router, second: Router) -> None:
        for data in (b"", b"\xc1", b"\x90", b"\x82\xa6router\xa1x\xa5marks\x92\x01\x02", b"x" * (2 << 20)):
            while await first.marks._redis.publish(CHANNEL, data) != 2:
                await asyncio.sleep(0.01)  # somebody has yet to subscribe
        first.fleet.engines["decode-0"].health.beat(Beat("e0", 9.0, 0.1))
        first.say()
        await second.until(lambda: second.decodes() == ["decode-1"])
        assert second.marks.num_dropped >= 5
        assert second.marks.num_failures == 0

    run(server, body)


def test_a_mark_ends_by_itself() -> None:
    hearsay = ForeignMarks(3)
    card = make_card("decode-0", "decode")
    hearsay.hear(D0, "silent")
    hearsay.hear(PAIR, "fails")
    for _ in range(2):
        hearsay.tick()
    hearsay.hear(PAIR, "fails")
    assert hearsay.engines([card]) == {"decode-0"}
    hearsay.tick()
    assert hearsay.engines([card]) == frozenset()
    assert hearsay.pairs([card]) == frozenset(), "its prefill engine is not there"
    assert hearsay.pairs([card, make_card("prefill-0", "prefill")]) == {("prefill-0", "decode-0")}


def test_what_is_no_url_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"--redis http://\*\*\*@host is no URL of a Redis server") as raised:
        SharedMarks("http://user:secret@host", "r", lambda subject, reason: None)
    assert "secret" not in str(raised.value)
