"""A bare bucket: obstore's GET of values as large as the connector's; in pieces, one value for each."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import msgspec
import obstore

from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.kv_store.object_store import ObjectStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.registry import open_store

T = TypeVar("T")


class ObjectGet(BareTransport):
    """One copy of the bytes in the bucket."""

    _AT_A_TIME: ClassVar[int] = StoreOptions().pipeline

    def offer(self) -> bytes:
        self._connect()
        self._names = [f"pdkv-bench-{os.getpid()}-{kind}" for kind in ("value", "piece")]
        for name, size in zip(self._names, self._sizes(), strict=True):
            put = partial(self._put, value=bytes(size))
            self._run([partial(put, f"{name}-{number}") for number in range(self.num_bytes // size)])
        return msgspec.msgpack.encode(self._names)

    def connect(self, address: bytes) -> None:
        self._connect()
        self._names = msgspec.msgpack.decode(address, type=list[str])

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        size, name = self._sizes()[in_pieces], self._names[in_pieces]
        sizes = self._run([partial(self._get, f"{name}-{number}") for number in range(self.num_bytes // size)])
        if sum(sizes) != self.num_bytes // size * size:
            raise EOFError("values are missing")

    def close(self) -> None:
        if self.spec.address is None:
            for name, size in zip(self._names, self._sizes(), strict=True):
                obstore.delete(self._bucket, [f"{name}-{number}" for number in range(self.num_bytes // size)])

    async def _put(self, name: str, value: bytes) -> None:
        await obstore.put_async(self._bucket, name, value)

    async def _get(self, name: str) -> int:
        result = await obstore.get_async(self._bucket, name)
        return len(await result.bytes_async())

    def _run(self, requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        async def gather() -> list[T]:
            turns = asyncio.Semaphore(self._AT_A_TIME)

            async def take_turn(request: Callable[[], Awaitable[T]]) -> T:
                async with turns:
                    return await request()

            return await asyncio.gather(*map(take_turn, requests))

        return asyncio.run(gather())

    def _sizes(self) -> tuple[int, int]:
        return min(self.spec.value_bytes, self.num_bytes), self.piece_bytes

    def _connect(self) -> None:
        store = open_store(self.spec.options["url"].partition(",")[0])
        assert isinstance(store, ObjectStore)
        self._bucket = store.bucket
