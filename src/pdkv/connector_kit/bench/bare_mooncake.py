"""A bare Mooncake store: its own client in this process, batch_get_into of values as large as the connector's."""

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.errors import ConfigError

_VALUES_PER_CALL = 256
"""The client's TCP queue refuses more than 4,096 requests, and then waits for a minute."""


class MooncakeGet(BareTransport):
    """One copy of the bytes in the store; in pieces, one value for each. Memory is registered before the clock."""

    def offer(self) -> bytes:
        self._setup()
        self._names = [f"pdkv-bench-{os.getpid()}-{kind}" for kind in ("value", "piece")]
        for in_pieces in (False, True):
            for names, addresses, sizes in self._batches(in_pieces):
                codes = self._client.batch_put_from(names, addresses, sizes)
                if any(codes):
                    raise OSError(f"Mooncake did not accept the values: {sorted(set(codes))}")
        return msgspec.msgpack.encode(self._names)

    def connect(self, address: bytes) -> None:
        self._setup()
        self._names = msgspec.msgpack.decode(address, type=list[str])

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        for names, addresses, sizes in self._batches(in_pieces):
            if self._client.batch_get_into(names, addresses, sizes) != sizes:
                raise EOFError("values are missing")

    def close(self) -> None:
        if self.spec.address is None:
            for in_pieces in (False, True):
                for names, _, _ in self._batches(in_pieces):
                    self._client.batch_remove(names, True)
        self._client.unregister_buffer(self._memory.ctypes.data)
        self._client.close()

    def _batches(self, in_pieces: bool) -> Iterator[tuple[list[str], list[int], list[int]]]:
        """Names, places in this turn's slot, and sizes of each call."""
        size = self.piece_bytes if in_pieces else min(self.spec.value_bytes, self.num_bytes)
        base = self._memory.ctypes.data + (self.slot() if self.turn >= 0 else 0)
        count = self.num_bytes // size
        for start in range(0, count, _VALUES_PER_CALL):
            numbers = range(start, min(start + _VALUES_PER_CALL, count))
            names = [f"{self._names[in_pieces]}-{number}" for number in numbers]
            yield names, [base + number * size for number in numbers], [size] * len(numbers)

    def _setup(self) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(f"the library of mooncake cannot be loaded: {error}") from None
        self._client: Any = MooncakeDistributedStore()
        master = urlsplit(self.spec.options["url"].partition(",")[0]).netloc
        code = self._client.setup({
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": "0",
            "local_buffer_size": "0",
            "protocol": "tcp",
            "master_server_addr": master,
        })  # fmt: skip
        if code:
            raise OSError(f"Mooncake's master at {master} does not answer: {code}")
        self._memory = self.new_region()
        self._client.register_buffer(self._memory.ctypes.data, self._memory.nbytes)
