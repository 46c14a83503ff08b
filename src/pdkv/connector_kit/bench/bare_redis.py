"""Bare Redis: redis-py's pipelined GET of values as large as the connector's; in pieces, one value for each."""

import os

import msgspec

from pdkv.connector_kit.bench.bare import BareTransport

_BATCH = 512  # values stored at a time


class RedisGet(BareTransport):
    """One copy of the bytes in the server; the client gets them as redis-py returns them."""

    def offer(self) -> bytes:
        self._connect()
        self._names = [f"pdkv-bench:{os.getpid()}:{kind}" for kind in ("value", "piece")]
        for name, size in zip(self._names, self._sizes(), strict=True):
            value = bytes(size)
            for first in range(0, self.num_bytes // size, _BATCH):
                pipeline = self._client.pipeline(transaction=False)
                for number in range(first, min(first + _BATCH, self.num_bytes // size)):
                    pipeline.set(f"{name}:{number}", value)
                pipeline.execute()
        return msgspec.msgpack.encode(self._names)

    def connect(self, address: bytes) -> None:
        self._connect()
        self._names = msgspec.msgpack.decode(address, type=list[str])

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        size = self._sizes()[in_pieces]
        pipeline = self._client.pipeline(transaction=False)
        for number in range(self.num_bytes // size):
            pipeline.get(f"{self._names[in_pieces]}:{number}")
        values = pipeline.execute()
        if sum(len(value or b"") for value in values) != self.num_bytes // size * size:
            raise EOFError("values are missing")

    def close(self) -> None:
        if self.spec.address is None:
            for name, size in zip(self._names, self._sizes(), strict=True):
                self._client.delete(*(f"{name}:{number}" for number in range(self.num_bytes // size)))
        self._client.close()

    def _sizes(self) -> tuple[int, int]:
        return min(self.spec.value_bytes, self.num_bytes), self.piece_bytes

    def _connect(self) -> None:
        import redis

        url = self.spec.options["url"].partition(",")[0].removeprefix("redis+")
        self._client = redis.Redis.from_url(url)
