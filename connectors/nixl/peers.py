"""The peers of one rank of the `nixl` connector: cards, and the parts of their ranks."""

import os
from collections.abc import Sequence

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.nixl.agent import TRANSPORTS
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.wire import BLOB_VERSION, BLOBS, RankBlob
from pdkv.connectors.peer.cards import Incarnation, PeerCards, decode_ranks
from pdkv.errors import IncompatiblePeers, PeerGone
from pdkv.host.host_id import host_id
from pdkv.wire.kv import EngineCard


def agent_name(engine: str, epoch: str, rank: int) -> str:
    """The name of a rank's agent, different for each incarnation."""
    return f"{engine}/{epoch}/{rank}"


class NixlPeers(PeerCards):
    """Cards whose ranks can be reached by NIXL. Thread-safe."""

    def __init__(self, config: ConnectorConfig, options: NixlOptions) -> None:
        super().__init__(config)
        self._mode = options.mode
        self._paths = options.paths
        self._ranks: dict[Incarnation, list[RankBlob]] = {}
        self._agents: dict[str, RankBlob] = {}

    def rank(self, engine: str, epoch: str, rank: int) -> RankBlob:
        """How to reach one rank. Raises the same as `card`."""
        with self._lock:
            self._find((engine, epoch))
            return self._ranks[engine, epoch][rank]

    def agent(self, name: str) -> RankBlob | None:
        """The rank that an agent belongs to; None: no known rank."""
        with self._lock:
            return self._agents.get(name)

    def card_of(self, blob: RankBlob) -> EngineCard:
        """The card that a rank's part belongs to. Raises PeerGone if it is not known (any more)."""
        with self._lock:
            for peer, ranks in self._ranks.items():
                if blob in ranks:
                    return self._find(peer)
        raise PeerGone(f"agent {blob.agent} is not known")

    def ranks_of(self, engine: str, epoch: str) -> list[RankBlob]:
        """The ranks of a known incarnation."""
        with self._lock:
            return list(self._ranks.get((engine, epoch), []))

    def agents_of(self, engine: str, epoch: str) -> list[str]:
        """The agents of a known incarnation's ranks."""
        return [blob.agent for blob in self.ranks_of(engine, epoch)]

    # --- under the lock -------------------------------------------------------------------------------------------

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        super()._accept(peer, card)
        ranks = decode_ranks(card, BLOBS, "NIXL agent")
        self._check(card, ranks)
        self._ranks[peer] = ranks
        self._agents.update((blob.agent, blob) for blob in ranks)

    def _forget(self, peer: Incarnation) -> None:
        super()._forget(peer)
        for blob in self._ranks.pop(peer, ()):
            self._agents.pop(blob.agent, None)

    def _check(self, card: EngineCard, ranks: Sequence[RankBlob]) -> None:
        """Check a card. Raises IncompatiblePeers."""
        own = self.config.engine
        for rank, blob in enumerate(ranks):
            pairs: list[tuple[str, object, object]] = [
                ("version of the nixl connector", BLOB_VERSION, blob.version),
                ("mode of the nixl connector", self._mode, blob.mode),
                ("name of its agent", agent_name(card.engine, card.epoch, rank), blob.agent),
                ("bytes per block", card.layout.block_bytes, blob.block_bytes),
                ("bytes of its pool", card.num_blocks * blob.block_bytes, blob.pool.size),
            ]
            if blob.generations is not None:
                pairs.append(("bytes of its generations", card.num_blocks * 8, blob.generations.size))
            for what, expected, said in pairs:
                if expected != said:
                    raise IncompatiblePeers(
                        f"{what} differs: {expected!r} is expected by engine {own}, engine {card.engine} has {said!r}"
                    )
            paths = [path for path in self._paths if path in blob.paths]
            if not paths:
                raise IncompatiblePeers(
                    f"engine {own} reads by path {' or '.join(self._paths)}, but engine {card.engine} can be read by "
                    f"path {' or '.join(blob.paths) or 'none'}: set their option path to one that both have"
                )
            if blob.host == host_id():
                continue
            if "ucx" not in paths:
                raise IncompatiblePeers(
                    f"engine {card.engine} is on another host ({blob.host}, here {host_id()}), which path "
                    f"{' or '.join(paths)} cannot reach: use path=ucx"
                )
            if os.environ.get("UCX_TLS", TRANSPORTS) == TRANSPORTS:
                raise IncompatiblePeers(
                    f"engine {card.engine} is on another host ({blob.host}, here {host_id()}): set UCX_TLS to "
                    f"transports that connect them, such as rc or tcp; it is {TRANSPORTS}"
                )
