"""What `p2p` is told: --connector-config, and where the ranks of its peers are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from pdkv.connectors.base import parse_options
from pdkv.connectors.p2p.wire import Address
from pdkv.connectors.peer.cards import Incarnation, PeerCards
from pdkv.errors import IncompatiblePeers, MalformedMessage
from pdkv.option_types import parse_count, parse_seconds
from pdkv.wire.decoding import decode_total
from pdkv.wire.messages import EngineCard


@dataclass(frozen=True, kw_only=True)
class P2POptions:
    """Options, with their defaults."""

    host: str = "127.0.0.1"  # the address at which peers reach this host
    timeout_s: float = 20.0  # deadline of one batch to one rank
    handshake_timeout_s: float = 5.0
    idle_s: float = 60.0  # a link without traffic closes after so long
    max_groups: int = 64  # links of this rank in each direction

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "P2POptions":
        """Raises ConfigError for an unknown option or value."""
        return cls(**parse_options(options, _CONVERTERS))


_CONVERTERS: Mapping[str, Callable[[str], object]] = {
    "host": str,
    "timeout_s": parse_seconds,
    "handshake_timeout_s": parse_seconds,
    "idle_s": parse_seconds,
    "max_groups": parse_count,
}
_addresses = msgspec.msgpack.Decoder(Address)


class P2PPeers(PeerCards):
    """Peers with the addresses of their ranks."""

    def address(self, card: EngineCard, rank: int) -> Address:
        """Where one rank listens.

        Raises:
            IncompatiblePeers: the card does not say.
        """
        try:
            return decode_total(_addresses, card.rank_blobs[rank])
        except (IndexError, MalformedMessage) as error:
            raise IncompatiblePeers(
                f"engine {card.engine} (connector {card.connector}): its card names no address of rank {rank}: {error}"
            ) from error

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        super()._accept(peer, card)
        for rank in range(card.tp):
            self.address(card, rank)
