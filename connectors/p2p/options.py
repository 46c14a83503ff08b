"""The configuration of `p2p`: --connector-config, and the addresses of peers' ranks."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdkv.base.options import Options, Seconds, option
from pdkv.connectors.p2p.wire import Address
from pdkv.connectors.peer.cards import Incarnation, PeerCards, decode_ranks
from pdkv.errors import TransferError
from pdkv.wire.kv import EngineCard


class P2POptions(Options):
    """Options, with their defaults."""

    host: str = option("127.0.0.1", "address at which peers reach this host")
    sockets: Literal["auto", "unix", "tcp"] = option(
        "auto", "how to reach peers; auto: unix sockets if they run on this host as this user, else TCP"
    )
    timeout_s: Seconds = option(20.0, "deadline for sending one batch to one rank")
    handshake_timeout_s: Seconds = option(5.0, "deadline for two ranks to set up a link")
    idle_s: Seconds = option(60.0, "idle time after which a link is closed")
    max_links: Annotated[int, Meta(ge=1, le=4096)] = option(64, "maximum number of links of one rank in each direction")

    def unix_name(self, peer: Address, own: Address) -> str:
        """The unix socket at which to reach a peer; empty: use TCP.

        Raises:
            TransferError: only unix sockets may be used, but there is none.
        """
        is_here = bool(peer.host_id) and peer.host_id == own.host_id
        if self.sockets == "unix" and not is_here:
            raise TransferError(f"sockets=unix, but the peer at {peer.host} runs on another host or as another user")
        return peer.unix_name if is_here and self.sockets != "tcp" else ""


_ADDRESSES = msgspec.msgpack.Decoder(Address)


class P2PPeers(PeerCards):
    """Peers with the addresses of their ranks."""

    def address(self, card: EngineCard, rank: int) -> Address:
        """The address of one rank. Raises IncompatiblePeers if the card does not name those of all ranks."""
        return decode_ranks(card, _ADDRESSES, "address")[rank]

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        super()._accept(peer, card)
        decode_ranks(card, _ADDRESSES, "address")
