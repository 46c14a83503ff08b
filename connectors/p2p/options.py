"""What `p2p` is told: --connector-config, and where the ranks of its peers are."""

import msgspec

from pdkv.connectors.p2p.wire import Address
from pdkv.connectors.peer.cards import Incarnation, PeerCards
from pdkv.errors import IncompatiblePeers, MalformedMessage
from pdkv.options import Options, option, seconds
from pdkv.wire.decoding import decode_total
from pdkv.wire.messages import EngineCard


class P2POptions(Options):
    """Options, with their defaults."""

    host: str = option("127.0.0.1", "address at which peers reach this host")
    timeout_s: float = seconds(20.0, "deadline of one batch to one rank")
    handshake_timeout_s: float = seconds(5.0, "deadline for two ranks to set up a link")
    idle_s: float = seconds(60.0, "a link without traffic closes after this time")
    max_groups: int = option(64, "most links of one rank in each direction", ge=1, le=4096)


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
