"""The peers' arenas that can be used, by card; each is mapped when it is first needed."""

import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from pdkv.connectors.arena.arena import ArenaAddress, PeerArena, open_peer_arena
from pdkv.connectors.arena.device_pool import PoolDevice
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.cards import Incarnation, PeerCards, decode_ranks
from pdkv.errors import IncompatiblePeers, PeerGone, StaleEpoch, TransferError
from pdkv.wire.kv import EngineCard

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_addresses = msgspec.msgpack.Decoder(ArenaAddress)


class PeerArenas(PeerCards):
    """The peers of one side of the connector. Thread-safe."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._addresses: dict[Incarnation, list[ArenaAddress]] = {}
        self._short: set[Incarnation] = set()  # for which this process lacked something at the last attempt
        self._open: dict[Incarnation, dict[int, PeerArena]] = {}  # by rank; stays alive while a copy uses it
        self._mapping = threading.Lock()  # for one pool at a time; not `_lock`, for which the step thread would wait

    def get(self, engine: str, epoch: str, rank: int = 0) -> PeerArena:
        """The arena of one rank of one incarnation.

        Raises:
            StaleEpoch: another incarnation of that engine is known, or found at the address.
            PeerGone: no such engine is known, or its process is gone.
            IncompatiblePeers: it is known but cannot be used.
            TransferError: this process cannot map it now, but may later.
        """
        peer = (engine, epoch)
        with self._lock:
            arena = self._open.get(peer, {}).get(rank)
            if arena is not None:
                return arena
            card = self._find(peer)
            try:
                arena = open_peer_arena(self._addresses[peer][rank], card)
            except (
                PeerGone,
                StaleEpoch,
                IncompatiblePeers,
            ) as error:  # permanent for the peer; other errors may be over soon
                self._errors[peer] = error.anew()
                logger.warning("no KV from engine %s: %s", engine, error)
                raise
            except TransferError as error:
                if peer not in self._short:
                    self._short.add(peer)
                    logger.warning("no KV from engine %s for now: %s", engine, error)
                raise
            self._short.discard(peer)
            self._open.setdefault(peer, {})[rank] = arena
            return arena

    def pool(self, engine: str, epoch: str, rank: int, device: PoolDevice) -> tuple[PeerArena, "torch.Tensor"]:
        """The arena and the pool of a rank that keeps its KV on a device; mapped for `device`.

        Raises as `get`.
        """
        arena = self.get(engine, epoch, rank)
        with self._mapping:
            if arena.pool is None:
                assert arena.address.pool is not None, "its card was accepted"
                try:
                    arena.pool = device.open(arena.address.pool, arena.shape.pool_bytes)
                except IncompatiblePeers as error:
                    with self._lock:  # from now on it is found by no reader
                        self._errors[engine, epoch] = error.anew()
                        self._open.pop((engine, epoch), None)
                    logger.warning("no KV from engine %s: %s", engine, error)
                    raise
            return arena, arena.pool

    def map_ahead(self) -> bool:
        """Map some more of a source's pool; False: nothing is left to do."""
        with self._lock:
            arenas = [arena for ranks in self._open.values() for arena in ranks.values()]
        return any(arena.map_ahead() for arena in arenas)

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        super()._accept(peer, card)
        addresses = decode_ranks(card, _addresses, "arena")
        on_device = self.config.device != "cpu"
        if any((address.pool is not None) != on_device for address in addresses):
            here, there = ("GPU", "host") if on_device else ("host", "GPU")
            raise IncompatiblePeers(f"engine {card.engine} keeps its KV in {there} memory, this one in {here} memory")
        self._addresses[peer] = addresses

    def _forget(self, peer: Incarnation) -> None:
        super()._forget(peer)
        self._addresses.pop(peer, None)
        self._short.discard(peer)
        self._open.pop(peer, None)
