"""Which peers' arenas can be used: cards in, mappings out, opened when they are asked for first."""

import logging
import threading
from collections.abc import Sequence

import msgspec

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.shared_arena import ArenaAddress, PeerArena, open_peer_arena
from pdkv.errors import IncompatiblePeers, PdkvError, PeerGone, StaleEpoch
from pdkv.messages import EngineCard

logger = logging.getLogger(__name__)

Incarnation = tuple[str, str]
"""(engine, epoch)."""


def check_compatible(config: ConnectorConfig, card: EngineCard) -> ArenaAddress:
    """Check that this engine can read that one's KV; block sizes may differ. Returns where its arena is.

    Raises:
        IncompatiblePeers: they cannot exchange KV; the message has both sides' values.
    """
    own, peer = config.layout, card.layout
    pairs: list[tuple[str, object, object]] = [
        ("KV layout", own.identity, peer.identity),
        ("KV heads", own.num_kv_heads, peer.num_kv_heads),
        ("bytes per value", own.dtype_bytes, peer.dtype_bytes),
        ("hash block size", HASH_BLOCK_SIZE, card.hash_block_size),
        ("tensor and pipeline parallel ranks", (1, 1), (card.tp, card.pp)),
    ]
    if config.model:
        pairs.append(("model", config.model, card.model))
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise IncompatiblePeers(
                f"{what} differs: {ours!r} in engine {config.engine}, {theirs!r} in engine {card.engine}"
            )
    if peer.block_size % HASH_BLOCK_SIZE or peer.block_size < HASH_BLOCK_SIZE:
        raise IncompatiblePeers(f"engine {card.engine} has blocks of {peer.block_size} tokens")
    try:
        return msgspec.msgpack.decode(card.rank_blobs[0], type=ArenaAddress)
    except (IndexError, msgspec.DecodeError) as error:
        raise IncompatiblePeers(
            f"engine {card.engine} (connector {card.connector}): its card names no arena: {error}"
        ) from error


class PeerArenas:
    """The peers of one side of the connector. Thread-safe."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._cards: dict[Incarnation, EngineCard] = {}
        self._usable: dict[Incarnation, ArenaAddress] = {}
        self._open: dict[Incarnation, PeerArena] = {}
        self._errors: dict[Incarnation, PdkvError] = {}

    def replace(self, cards: Sequence[EngineCard]) -> None:
        """These peers are known and no others."""
        known = {(card.engine, card.epoch): card for card in cards}
        with self._lock:
            gone = [peer for peer in self._cards if peer not in known]
            new = [card for peer, card in known.items() if self._cards.get(peer) != card]
        for engine, epoch in gone:
            self.remove(engine, epoch)
        for card in new:
            self.add(card)

    def add(self, card: EngineCard) -> None:
        """A peer appeared. One that is not compatible is logged once and never used."""
        if card.engine == self._config.engine:
            return
        peer = (card.engine, card.epoch)
        with self._lock:
            if self._cards.get(peer) == card:
                return
            self._cards[peer] = card
            self._open.pop(peer, None)
            self._errors.pop(peer, None)
            try:
                self._usable[peer] = check_compatible(self._config, card)
            except IncompatiblePeers as error:
                self._usable.pop(peer, None)
                self._errors[peer] = error
                logger.warning("no KV from engine %s: %s", card.engine, error)

    def remove(self, engine: str, epoch: str) -> None:
        """A peer's incarnation is gone: drop its mapping, which lives on only while a copy uses it."""
        peer = (engine, epoch)
        with self._lock:
            for known in (self._cards, self._usable, self._open, self._errors):
                known.pop(peer, None)

    def incarnations(self) -> list[Incarnation]:
        """Peers that may be usable."""
        with self._lock:
            return [peer for peer in self._usable if peer not in self._errors]

    def get(self, engine: str, epoch: str) -> PeerArena:
        """The arena of one incarnation.

        Raises:
            StaleEpoch: another incarnation of that engine is known, or lies behind the address.
            PeerGone: no such engine is known, or its process is gone.
            IncompatiblePeers: it is known and cannot be used.
        """
        peer = (engine, epoch)
        with self._lock:
            arena = self._open.get(peer)
            if arena is not None:
                return arena
            if peer in self._errors:
                raise self._errors[peer].with_traceback(None)
            if peer not in self._usable:
                if any(name == engine for name, _ in self._cards):
                    raise StaleEpoch(f"engine {engine} has another epoch than {epoch} now")
                raise PeerGone(f"engine {engine} is not known")
            try:
                arena = open_peer_arena(self._usable[peer], engine=engine, epoch=epoch)
            except PdkvError as error:
                self._errors[peer] = error
                logger.warning("no KV from engine %s: %s", engine, error)
                raise
            self._open[peer] = arena
            return arena

    def map_ahead(self) -> bool:
        """Map some more of a source's pool; False: nothing is left to do."""
        with self._lock:
            arenas = [arena for arena in self._open.values() if arena.is_source]
        return any(arena.map_ahead() for arena in arenas)

    def clear(self) -> None:
        """Forget all peers. Idempotent."""
        with self._lock:
            for known in (self._cards, self._usable, self._open, self._errors):
                known.clear()
