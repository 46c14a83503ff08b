"""Bare NIXL: one READ of registered memory; in pieces, one descriptor for each."""

import threading

import msgspec
import numpy as np

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.connector_kit.rig import protocol as p
from pdkv.connectors.nixl.agent import Memory, NixlAgent

_LOOK_S = 0.001


class _Address(msgspec.Struct, frozen=True):
    agent: str
    metadata: bytes
    memory: Memory


class NixlRead(BareTransport):
    """Reads by NIXL, with the path chosen by UCX, as for the connector."""

    def __init__(self, spec: p.BareSpec) -> None:
        super().__init__(spec)
        self._agent = NixlAgent(f"bare-{'source' if spec.address is None else 'reader'}")
        self._region = self.new_region()
        self._memory = self._agent.register(Memory(self._region.ctypes.data, self._region.nbytes))
        self._peer: _Address | None = None
        self._ending = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def offer(self) -> bytes:
        self._listener.start()
        return msgspec.msgpack.encode(_Address(self._agent.name, self._agent.metadata(), self._memory))

    def connect(self, address: bytes) -> None:
        self._peer = msgspec.msgpack.decode(address, type=_Address)
        self._agent.add_peer(self._peer.agent, self._peer.metadata)

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        assert self._peer is not None
        sources, targets, size = np.zeros(1, np.int64), np.zeros(1, np.int64), self.num_bytes
        if in_pieces:
            sources, targets, size = self.source_offsets, self.target_offsets, self.piece_bytes
        local = self._memory.pieces(targets + self.slot(), size)
        remote = self._peer.memory.pieces(sources + self.slot(), size)
        self._agent.read(self._peer.agent, local, remote, deadline=MONOTONIC.now() + timeout_s)

    def close(self) -> None:
        self._ending.set()
        if self._listener.is_alive():
            self._listener.join()
        self._agent.close()

    def _listen(self) -> None:
        """Receive messages: the first connection needs the peer's help."""
        while not self._ending.wait(_LOOK_S):
            for _ in self._agent.receive():
                pass
