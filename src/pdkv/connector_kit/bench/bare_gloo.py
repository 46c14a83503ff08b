"""Bare Gloo: a send and a receive in a group of two; in pieces, one message for each."""

from collections import deque
from datetime import timedelta
from typing import Any

import msgspec

from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.connector_kit.rig import protocol as p

_CONNECT_S = 30.0
_HOST = "127.0.0.1"


class GlooSend(BareTransport):
    """The side that gets the data says when it is ready: its clock starts then."""

    def __init__(self, spec: p.OpenBare) -> None:
        import torch

        super().__init__(spec)
        self._store: Any = None
        self._group: Any = None
        self._peer = 0
        self._posted: deque[Any] = deque()
        self._number = 0
        self._tensor = torch.from_numpy(self.new_region())
        self._ready = torch.zeros(1, dtype=torch.uint8)

    def offer(self) -> bytes:
        self._open(is_master=True, port=0)
        return msgspec.msgpack.encode(self._store.port)

    def connect(self, address: bytes) -> None:
        self._open(is_master=False, port=msgspec.msgpack.decode(address, type=int))

    def send(self, in_pieces: bool, timeout_s: float) -> None:
        self._meet(rank=0)
        self._post(self._group.recv, self._ready)
        self._wait(timeout_s)
        for first in self.source_offsets.tolist() if in_pieces else [0]:
            self._post(self._group.send, self._piece(first, in_pieces))
        self._wait(timeout_s)

    def prepare(self) -> None:
        self._meet(rank=1)

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        self._post(self._group.send, self._ready)
        for first in self.target_offsets.tolist() if in_pieces else [0]:
            self._post(self._group.recv, self._piece(first, in_pieces))
        self._wait(timeout_s)

    def close(self) -> None:
        self._group = self._store = None

    def _open(self, *, is_master: bool, port: int) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        timeout = timedelta(seconds=_CONNECT_S)
        self._store = distributed.TCPStore(_HOST, port, is_master=is_master, wait_for_workers=False, timeout=timeout)

    def _meet(self, *, rank: int) -> None:
        """Both sides are here: the first move makes the group."""
        from torch.distributed import ProcessGroupGloo

        if self._group is not None:
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=_CONNECT_S)
        self._peer = 1 - rank
        self._group = gloo(self._store, rank, 2, options)

    def _post(self, operation: Any, tensor: Any) -> None:
        self._posted.append((operation([tensor], self._peer, self._number), tensor))
        self._number += 1

    def _wait(self, timeout_s: float) -> None:
        while self._posted:
            self._posted.popleft()[0].wait(timedelta(seconds=timeout_s))

    def _piece(self, first: int, in_pieces: bool) -> Any:
        start = self.slot() + first
        return self._tensor[start : start + (self.piece_bytes if in_pieces else self.num_bytes)]
