"""The path by which this rank reads each peer's pool: a mapped arena, or NIXL over UCX.

The first one that both sides offer and that works is chosen when the peer is met; the option `path` restricts it to
one.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

from pdkv.connectors.arena.arena import PeerArena, open_peer_arena
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import Path, RankBlob
from pdkv.errors import IncompatiblePeers, PdkvError, PeerGone, StaleEpoch
from pdkv.host.host_id import host_id

logger = logging.getLogger(__name__)


class PeerPaths:
    """The paths of one rank. Thread-safe."""

    def __init__(self, peers: NixlPeers, offered: Sequence[Path]) -> None:
        """`offered`: the paths by which peers may read this rank's pool."""
        self._peers = peers
        self._offered = offered
        self._lock = threading.Lock()  # guards the following
        self._found: dict[str, tuple[RankBlob, PeerArena | PdkvError | None]] = {}  # by agent; None: UCX

    def source(self, blob: RankBlob) -> PeerArena | None:
        """A peer's memory, mapped; None: it is read by NIXL.

        Raises:
            PeerGone: the peer is not known (any more).
            IncompatiblePeers: no path leads there.
            TransferError: this process currently lacks a resource for it, such as memory.
        """
        agent = blob.agent
        with self._lock:
            known, found = self._found.get(agent, (None, None))
            if known != blob:
                found = self._find(blob)
        if isinstance(found, PdkvError):
            raise found.anew()
        return found

    def in_use(self) -> list[tuple[str, str]]:
        """(engine, path) of each rank of a peer that has been met."""
        with self._lock:
            return [(agent.rsplit("/", 2)[0], _name(found)) for agent, (_, found) in self._found.items()]

    def map_ahead(self) -> bool:
        """Do a little work that makes later copies faster; False: nothing is left to do."""
        with self._lock:
            arenas = [found for _, found in self._found.values() if isinstance(found, PeerArena)]
        return any(arena.map_ahead() for arena in arenas)

    def forget(self, blobs: Iterable[RankBlob]) -> None:
        """Forget these peers. A running copy keeps its source."""
        with self._lock:
            for blob in blobs:
                if self._found.get(blob.agent, (None, None))[0] == blob and self._peers.agent(blob.agent) != blob:
                    del self._found[blob.agent]

    def close(self) -> None:
        """Forget all. Idempotent."""
        with self._lock:
            self._found.clear()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _find(self, blob: RankBlob) -> PeerArena | PdkvError | None:
        """Find the path, for as long as the peer is known. Raises temporary errors as `source`."""
        if self._peers.agent(blob.agent) != blob:
            raise PeerGone(f"agent {blob.agent} is not known")
        found: PeerArena | PdkvError | None
        try:
            found = self._open(blob)
        except (PeerGone, IncompatiblePeers) as error:
            found = error.anew()
            logger.warning("no KV from agent %s: %s", blob.agent, error)
        else:
            logger.info("KV of agent %s is read by path %s", blob.agent, _name(found))
        self._found[blob.agent] = (blob, found)
        return found

    def _open(self, blob: RankBlob) -> PeerArena | None:
        """As `source`, by the first path that works."""
        here, reason = blob.host == host_id(), ""
        paths = [path for path in self._offered if path in blob.paths and (here or path == "ucx")]
        if "arena" in paths:
            try:
                if blob.arena is None:
                    raise IncompatiblePeers(f"agent {blob.agent} names no arena")
                return open_peer_arena(blob.arena, self._peers.card_of(blob))
            except (PeerGone, StaleEpoch, IncompatiblePeers, PermissionError) as error:  # that will not change
                logger.debug("agent %s by path arena: %s", blob.agent, error)
                if isinstance(error, PeerGone) and "ucx" not in paths:
                    raise PeerGone(f"agent {blob.agent} is gone: {error}") from error
                reason = f"; {error}"
        if "ucx" in paths:
            return None
        raise IncompatiblePeers(
            f"engine {self._peers.config.engine} reads by {' or '.join(self._offered)}, agent {blob.agent} "
            f"{'on this host' if here else 'on another host'} is read by {' or '.join(blob.paths)}"
            f"{reason}: set their option path to one that works"
        )


def _name(found: PeerArena | PdkvError | None) -> str:
    if found is None:
        return "ucx"
    return "arena" if isinstance(found, PeerArena) else "none"
