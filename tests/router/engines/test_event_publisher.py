"""What engines have cached, as others see it: by vLLM's own definitions of its events."""

import asyncio
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio

from pdkv.errors import ConfigError
from pdkv.router.engines import event_publisher
from pdkv.router.engines.event_publisher import EventPublisher
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvent

event_loop = uvloop.new_event_loop  # the router's kind

KEY = ClusterKey(b"e" * 32)
EVENTS: Sequence[KVEvent] = (CacheCleared(), BlockStored([b"a" * 16, b"b" * 16], b"p" * 16), BlockRemoved([b"a" * 16]))


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """These five are vLLM 0.32's, of distributed/kv_events.py."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):  # type: ignore[call-arg]
    pass


class Stored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class Removed(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[Stored | Removed | AllBlocksCleared]


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


async def subscribed(context: zmq.asyncio.Context, publisher: EventPublisher, key: ClusterKey | None) -> Any:
    """A subscriber, once everything is to be told to it."""
    told = asyncio.Event()
    publisher.begin(told.set)
    socket = context.socket(zmq.SUB)
    if key is not None:
        key.present(socket)
    socket.subscribe(b"")
    socket.connect(publisher.endpoint)
    await told.wait()
    return socket


@pytest.mark.parametrize("is_remote", [False, True])
async def test_events_are_those_of_vllm_with_keys_and_without_tokens(tmp_path: Path, is_remote: bool) -> None:
    endpoint, key = ("tcp://127.0.0.1:0", KEY) if is_remote else (f"ipc://{tmp_path}/events", None)
    with closing(EventPublisher(endpoint, key)) as publisher, zmq.asyncio.Context() as context:
        socket = await subscribed(context, publisher, key)
        publisher.publish("engine-0", EVENTS)
        publisher.publish("engine-1", EVENTS[:1])
        publisher.forget("engine-0")
        publisher.publish("engine-2", EVENTS[:1])
        batches = [await socket.recv_multipart() for _ in range(3)]
        socket.close(linger=0)
    (topic, number, payload), (_, next_number, second), (_, _, third) = batches
    assert (topic, number, next_number) == (b"", bytes(8), (1).to_bytes(8, "big"))
    batch = decode(payload)
    assert batch.events == [
        AllBlocksCleared(),
        Stored([b"a" * 16, b"b" * 16], b"p" * 16, [], 16, None, "GPU", None),
        Removed([b"a" * 16], "GPU"),
    ]
    ranks = [decode(each).data_parallel_rank for each in (payload, second, third)]
    assert ranks == [0, 1, 0], "the rank of one that was removed is free"


async def test_a_subscriber_without_the_key_hears_nothing() -> None:
    with closing(EventPublisher("tcp://127.0.0.1:0", KEY)) as publisher, zmq.asyncio.Context() as context:
        friend = await subscribed(context, publisher, KEY)
        strangers = [context.socket(zmq.SUB) for _ in range(2)]
        ClusterKey(b"f" * 32).present(strangers[0])
        for stranger in strangers:
            stranger.subscribe(b"")
            stranger.connect(publisher.endpoint)
        for _ in range(20):
            publisher.publish("engine-0", EVENTS)
            await friend.recv_multipart()
            await asyncio.sleep(0.01)
        assert not any([await stranger.poll(0) for stranger in strangers])
        for socket in (friend, *strangers):
            socket.close(linger=0)


async def test_subscribers_who_come_and_go_have_engines_tell_all_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "PAUSE_S", 1000.0)
    num_told = 0

    def tell() -> None:
        nonlocal num_told
        num_told += 1

    with closing(EventPublisher(f"ipc://{tmp_path}/events", None)) as publisher, zmq.asyncio.Context() as context:
        (await subscribed(context, publisher, None)).close(linger=0)
        publisher.begin(tell)
        for _ in range(5):
            socket = context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(publisher.endpoint)
            await asyncio.sleep(0.01)
            socket.close(linger=0)
    assert num_told == 0


def test_only_its_user_can_open_a_socket_file_and_what_cannot_be_bound_is_an_error(tmp_path: Path) -> None:
    with closing(EventPublisher(f"ipc://{tmp_path}/events", None)):
        assert stat.S_IMODE(os.stat(tmp_path / "events").st_mode) & 0o077 == 0
        with pytest.raises(ConfigError, match="cannot publish KV events at ipc:///no/folder/x"):
            EventPublisher("ipc:///no/folder/x", None)


def test_a_path_of_others_is_left_alone_and_its_own_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("precious")
    publisher = EventPublisher(f"ipc://{tmp_path}/events", None)
    for name in ("notes", "events"):
        with pytest.raises(ConfigError, match=f"{name}: something else has this path"):
            EventPublisher(f"ipc://{tmp_path}/{name}", None)
    publisher.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "events"))
    EventPublisher(f"ipc://{tmp_path}/events", None).close()
