"""KV events over real sockets, from a publisher that loses, repeats, begins again and lies."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio
from coroutines import Turns

from pdkv.router.engines import foreign_cache, foreign_events
from pdkv.router.engines.foreign_cache import ForeignCache
from pdkv.router.engines.foreign_events import EventFollower
from pdkv.router.engines.foreign_kinds import Source
from pdkv.wire.messages import CacheCleared, KVEvent

event_loop = uvloop.new_event_loop  # the router's kind

END = (-1).to_bytes(8, "big", signed=True)


def batch(block: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [block], "parent_block_hash": None, "block_size": 16}
    return msgspec.msgpack.encode([0.0, [event | {"token_ids": [block] * 16}], 0])


class Publisher:
    """As vLLM's; `kept` is what it repeats."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.events, self.replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.source = Source(*(f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}" for s in self._sockets))
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []

    @property
    def _sockets(self) -> Sequence[zmq.asyncio.Socket]:
        return self.events, self.replay

    async def publish(self, number: int, payload: bytes | None = None, *, lost: bool = False) -> None:
        payload = batch(number) if payload is None else payload
        self.kept.append((number, payload))
        if not lost:
            await self.events.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def serve(self) -> None:
        while True:
            peer, _, first = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in list(self.kept):
                if number >= self.asked[-1]:
                    await self.replay.send_multipart([peer, b"", b"kv", number.to_bytes(8, "big"), payload])
            await self.replay.send_multipart([peer, b"", b"", END, b""])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


class Rig:
    def __init__(self, publisher: Publisher, follower: EventFollower, cache: ForeignCache) -> None:
        self.publisher, self.follower, self.cache = publisher, follower, cache
        self.changed = asyncio.Event()

    def tell(self, _: Sequence[KVEvent]) -> None:
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def follow(*, replays: bool = True, before: int = 0, max_keys: int = 1000) -> AsyncIterator[Rig]:
    with zmq.asyncio.Context() as context:
        publisher = Publisher(context)
        for number in range(before):
            await publisher.publish(number)
        source = publisher.source if replays else publisher.source._replace(replay="")
        cache = ForeignCache(lambda _: b"r" * 16, max_keys)
        follower = EventFollower("v", source, cache, lambda changes: rig.tell(changes))
        rig = Rig(publisher, follower, cache)
        tasks = [asyncio.create_task(publisher.serve()), asyncio.create_task(follower.run(zmq.Context(context)))]
        try:
            await publisher.events.recv()  # the subscription
            await rig.until(lambda: cache.num_keys == before * replays)
            yield rig
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            publisher.close()


async def test_what_was_cached_before_is_asked_for_and_so_is_what_was_missed() -> None:
    async with follow(before=3) as rig:
        await rig.publisher.publish(3)
        await rig.publisher.publish(4, lost=True)
        await rig.publisher.publish(5)
        await rig.until(lambda: rig.cache.num_keys == 6)
        assert rig.publisher.asked == [0, 4]
        assert rig.follower.num_gaps == 0


@pytest.mark.parametrize("numbers", [(0, 1, 3), (0, 1, 2, 0)], ids=["a gap", "begins again"])
async def test_a_publisher_that_left_something_out_or_begins_again_has_an_empty_cache(numbers: Sequence[int]) -> None:
    async with follow(replays=False) as rig:
        for number in numbers:
            await rig.publisher.publish(number)
        await rig.until(lambda: rig.follower.num_gaps == 1)
        await rig.until(lambda: rig.cache.num_keys == 1)


@pytest.mark.parametrize("frames", [[b"kv"], [b"kv", b"1", b""], [b"kv", END, b""], [b"kv", b"\xff" * 8, b"x"]])
async def test_what_is_no_batch_is_counted(frames: list[bytes]) -> None:
    async with follow(before=1) as rig:
        await rig.publisher.events.send_multipart(frames)
        await rig.publisher.publish(1)
        await rig.until(lambda: rig.cache.num_keys == 2)
        assert rig.follower.num_dropped == 1


@pytest.mark.parametrize("payload", [b"\xc1", b"\xc1" * (foreign_events.INLINE_BYTES + 1)])
async def test_a_batch_that_cannot_be_read_empties_the_cache(payload: bytes) -> None:
    async with follow(before=1) as rig:
        await rig.publisher.publish(1, payload)
        await rig.publisher.publish(2)
        await rig.until(lambda: rig.follower.num_dropped == 1 and rig.cache.num_keys == 1)


async def test_a_batch_that_is_too_large_is_missed() -> None:
    """The connection is made anew."""
    async with follow(replays=False) as rig:
        await rig.publisher.publish(0)
        await rig.until(lambda: rig.cache.num_keys == 1)
        await rig.publisher.publish(1, bytes(foreign_events.MAX_BATCH_BYTES + 1))
        await rig.publisher.events.recv()
        await rig.publisher.events.recv()
        await rig.publisher.publish(2)
        await rig.until(lambda: rig.follower.num_gaps == 1 and rig.cache.num_keys == 1)


async def test_others_have_their_turn_between_two_repeated_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, told = Turns(), list[int]()

    def tell(rig: Rig, _: Sequence[KVEvent]) -> None:
        told.append(turns.number)
        rig.changed.set()

    monkeypatch.setattr(Rig, "tell", tell)
    async with turns, follow(before=100):
        pass
    assert len(set(told[1:])) == 100


async def test_a_batch_that_a_thread_reads_when_the_connection_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for again: new blocks would stay untold, and gone ones would never be taken back."""
    begun, goes_on, take = threading.Event(), threading.Event(), ForeignCache.take

    def take_late(cache: ForeignCache, payload: bytes) -> list[KVEvent]:
        begun.set()
        assert goes_on.wait(60.0)
        return take(cache, payload)

    monkeypatch.setattr(foreign_events, "INLINE_BYTES", 0)
    monkeypatch.setattr(ForeignCache, "take", take_late)
    async with follow(replays=False) as rig:
        await rig.publisher.publish(0)
        await asyncio.to_thread(begun.wait, 60.0)
        rig.changed.clear()
        asyncio.get_running_loop().call_soon(goes_on.set)  # it is cancelled first
    assert rig.changed.is_set()
    assert rig.cache.num_keys == 1


async def test_what_is_said_again_is_not_older_than_the_loss_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread goes through the cache; it is emptied when that is done."""
    begun, goes_on, cut = threading.Event(), threading.Event(), foreign_cache._cut
    told: list[KVEvent] = []

    def cut_late(keys: bytes) -> Iterator[bytes]:
        begun.set()
        assert goes_on.wait(60.0)
        return cut(keys)

    cache = ForeignCache(lambda _: b"r" * 16, 1000)
    for block in range(2):
        cache.take(batch(block))
    follower = EventFollower("v", Source("tcp://x", ""), cache, told.extend)
    monkeypatch.setattr(foreign_cache, "_cut", cut_late)
    saying = asyncio.create_task(follower.resync())
    await asyncio.to_thread(begun.wait, 60.0)
    losing = asyncio.create_task(follower._forget("lost"))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(saying, losing)
    assert told[-1] == CacheCleared()


async def test_one_that_never_repeats_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_events, "REPLAY_S", 0.05)

    async def mute(self: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Publisher, "serve", mute)
    async with follow() as rig:
        for number in (0, 2):
            await rig.publisher.publish(number)
        await rig.until(lambda: rig.follower.num_gaps == 1 and rig.cache.num_keys == 1)
