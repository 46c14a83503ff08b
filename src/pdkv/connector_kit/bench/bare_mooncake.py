"""A bare Mooncake store: its own client in this process, batch_get_into of values as large as the connector's."""

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.errors import ConfigError


class MooncakeGet(BareTransport):
    """One copy of the bytes in the store; in pieces, one value for each. Memory is registered before the clock."""

    def offer(self) -> bytes:
        self._setup()
        self._names = [f"pdkv-bench-{os.getpid()}-{kind}" for kind in ("value", "piece")]
        for in_pieces in (False, True):
            names, addresses, sizes = self._batch(in_pieces)
            codes = self._client.batch_put_from(names, addresses, sizes)
            if any(codes):
                raise OSError(f"Mooncake did not take the values: {sorted(set(codes))}")
        return msgspec.msgpack.encode(self._names)

    def connect(self, address: bytes) -> None:
        self._setup()
        self._names = msgspec.msgpack.decode(address, type=list[str])

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        names, addresses, sizes = self._batch(in_pieces)
        if self._client.batch_get_into(names, addresses, sizes) != sizes:
            raise EOFError("values are missing")

    def close(self) -> None:
        if self.spec.address is None:
            for in_pieces in (False, True):
                self._client.batch_remove(self._batch(in_pieces)[0], True)
        self._client.unregister_buffer(self._memory.ctypes.data)
        self._client.close()

    def _batch(self, in_pieces: bool) -> tuple[Sequence[str], Sequence[int], Sequence[int]]:
        """Names, places in this turn's slot, and sizes."""
        size = self.piece_bytes if in_pieces else min(self.spec.value_bytes, self.num_bytes)
        count, base = self.num_bytes // size, self._memory.ctypes.data + (self.slot() if self.turn >= 0 else 0)
        names = [f"{self._names[in_pieces]}-{number}" for number in range(count)]
        return names, [base + number * size for number in range(count)], [size] * count

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
