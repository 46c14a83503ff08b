"""The peers with which KV can be exchanged. Each card is checked once, on arrival, and removed by incarnation."""

import logging
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.transfer.planning import check_ranks, rank_heads
from pdkv.errors import IncompatiblePeers, MalformedMessage, PdkvError, PeerGone, StaleEpoch
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard

logger = logging.getLogger(__name__)

Incarnation = tuple[str, str]
"""(engine, epoch)."""

Blob = TypeVar("Blob")


def check_compatible(config: ConnectorConfig, card: EngineCard) -> None:
    """Check that this engine and another one can exchange KV; block sizes and numbers of ranks may differ.

    Raises:
        IncompatiblePeers: they cannot; the message has both sides' values.
    """
    own_version, version = config.plan.wire_version, card.wire_versions.get(card.connector)
    if own_version and version not in (None, own_version):
        raise IncompatiblePeers(
            f"connector {card.connector} speaks version {own_version} in engine {config.engine} but version {version} "
            f"in engine {card.engine} (pdkv {card.version or '?'}): run the same pdkv on both"
        )
    own, peer = config.layout, card.layout
    pairs: list[tuple[str, object, object]] = [
        ("KV layout", own.identity, peer.identity),
        ("KV heads", own.kv_heads_of_all_ranks, peer.kv_heads_of_all_ranks),
        ("bytes per value", own.dtype_bytes, peer.dtype_bytes),
        ("hash block size", HASH_BLOCK_SIZE, card.hash_block_size),
        ("pipeline parallel stages", 1, card.pp),
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
        check_ranks(config.tp, card.tp, own.kv_heads_of_all_ranks)
    except IncompatiblePeers as error:
        raise IncompatiblePeers(f"engine {config.engine} and engine {card.engine}: {error}") from None
    expected = len(rank_heads(0, card.tp, own.kv_heads_of_all_ranks))
    if peer.num_kv_heads != expected:
        raise IncompatiblePeers(
            f"engine {card.engine} says {peer.num_kv_heads} KV heads a rank, but {card.tp} ranks have {expected}"
        )


def decode_ranks(card: EngineCard, decoder: msgspec.msgpack.Decoder[Blob], what: str) -> list[Blob]:
    """The parts of a card, by rank. Raises IncompatiblePeers if they are not the `what` that the connector needs."""
    who = f"engine {card.engine} (connector {card.connector}): its card names no {what}"
    try:
        ranks = [decode_total(decoder, blob) for blob in card.rank_blobs]
    except MalformedMessage as error:
        raise IncompatiblePeers(f"{who}: {error}") from error
    if len(ranks) != card.tp:
        raise IncompatiblePeers(f"{who}: it describes {len(ranks)} of {card.tp} ranks")
    return ranks


class PeerCards:
    """The peers of one side of a connector. Thread-safe."""

    def __init__(self, config: ConnectorConfig) -> None:
        self.config = config
        self._lock = threading.Lock()  # guards the following, in subclasses, too
        self._cards: dict[Incarnation, EngineCard] = {}
        self._errors: dict[Incarnation, PdkvError] = {}

    def replace(self, cards: Sequence[EngineCard]) -> None:
        """Make these the only known peers."""
        known = {(card.engine, card.epoch): card for card in cards}
        with self._lock:
            gone = [peer for peer in self._cards if peer not in known]
        for peer in gone:
            self.remove(*peer)
        for card in known.values():
            self.add(card)

    def add(self, card: EngineCard) -> None:
        """Add a peer. An incompatible one is logged once and never used."""
        peer = (card.engine, card.epoch)
        if card.engine == self.config.engine:
            return
        with self._lock:
            if self._cards.get(peer) == card:
                return
            self._forget(peer)
            self._cards[peer] = card
            try:
                self._accept(peer, card)
            except IncompatiblePeers as error:
                self._errors[peer] = error.anew()
                logger.warning("no KV from engine %s: %s", card.engine, error)

    def remove(self, engine: str, epoch: str) -> None:
        """Forget one incarnation of a peer."""
        with self._lock:
            self._forget((engine, epoch))

    def incarnations(self) -> list[Incarnation]:
        """The (engine, epoch) of all peers that are not known to be unusable."""
        with self._lock:
            return [peer for peer in self._cards if peer not in self._errors]

    def card(self, engine: str, epoch: str) -> EngineCard:
        """The card of one incarnation.

        Raises:
            StaleEpoch: another incarnation of that engine is known.
            PeerGone: no such engine is known.
            IncompatiblePeers: it is known but cannot be used.
        """
        with self._lock:
            return self._find((engine, epoch))

    def knows(self, engine: str, epoch: str) -> bool:
        """Whether `card` would return one."""
        with self._lock:
            return (engine, epoch) in self._cards and (engine, epoch) not in self._errors

    def clear(self) -> None:
        """Forget all peers. Idempotent."""
        with self._lock:
            for peer in list(self._cards):
                self._forget(peer)

    # --- under the lock -------------------------------------------------------------------------------------------

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        """Check a new card; subclasses extract what they need. Raises IncompatiblePeers."""
        check_compatible(self.config, card)

    def _forget(self, peer: Incarnation) -> None:
        self._cards.pop(peer, None)
        self._errors.pop(peer, None)

    def _find(self, peer: Incarnation) -> EngineCard:
        engine, epoch = peer
        if peer in self._errors:
            raise self._errors[peer].anew()
        if peer not in self._cards:
            if any(name == engine for name, _ in self._cards):
                raise StaleEpoch(f"engine {engine} now has another epoch than {epoch}")
            raise PeerGone(f"engine {engine} is not known")
        return self._cards[peer]
