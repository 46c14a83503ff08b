"""The path by which this rank reads each peer's pool: a mapped arena, copies between processes, or NIXL over UCX.

The first one that both sides offer and that works is chosen when the peer is met; the option `path` restricts it to
one.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

from pdkv.connectors.arena.arena import open_peer_arena
from pdkv.connectors.arena.sources import MappedSource, PoolSource, ProcessSource, Span
from pdkv.connectors.nixl.agent import Memory
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import Path, RankBlob
from pdkv.errors import IncompatiblePeers, PdkvError, PeerGone, StaleEpoch, TransferError
from pdkv.host.host_id import host_id
from pdkv.host.process_memory import ProcessMemory

logger = logging.getLogger(__name__)


class PeerPaths:
    """The paths of one rank. Thread-safe."""

    def __init__(self, peers: NixlPeers, offered: Sequence[Path]) -> None:
        """`offered`: the paths by which peers may read this rank's pool."""
        self._peers = peers
        self._offered = offered
        self._lock = threading.Lock()  # guards the following
        self._found: dict[str, tuple[RankBlob, PoolSource | PdkvError | None]] = {}  # by agent; None: UCX

    def source(self, blob: RankBlob) -> PoolSource | None:
        """The source of a peer's memory; None: it is read by NIXL.

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
            sources = [source for _, source in self._found.values() if isinstance(source, PoolSource)]
        return any(source.map_ahead() for source in sources)

    def forget(self, blobs: Iterable[RankBlob]) -> None:
        """Forget these peers. A running copy keeps its source."""
        with self._lock:
            for blob in blobs:
                if self._found.get(blob.agent, (None, None))[0] == blob and self._peers.agent(blob.agent) != blob:
                    self._drop(blob.agent)

    def close(self) -> None:
        """Forget all. Idempotent."""
        with self._lock:
            for agent in list(self._found):
                self._drop(agent)

    # --- under the lock -------------------------------------------------------------------------------------------

    def _drop(self, agent: str) -> None:
        _, found = self._found.pop(agent)
        if isinstance(found, PoolSource):
            found.close()

    def _find(self, blob: RankBlob) -> PoolSource | PdkvError | None:
        """Find the path, for as long as the peer is known. Raises temporary errors as `source`."""
        if self._peers.agent(blob.agent) != blob:
            raise PeerGone(f"agent {blob.agent} is not known")
        if blob.agent in self._found:
            self._drop(blob.agent)
        found: PoolSource | PdkvError | None
        try:
            found = self._open(blob)
        except (PeerGone, IncompatiblePeers) as error:
            found = error.anew()
            logger.warning("no KV from agent %s: %s", blob.agent, error)
        else:
            logger.info("KV of agent %s is read by path %s", blob.agent, _name(found))
        self._found[blob.agent] = (blob, found)
        return found

    def _open(self, blob: RankBlob) -> PoolSource | None:
        """Open a source by the first path that works. Raises PeerGone, IncompatiblePeers or a TransferError."""
        here = blob.host == host_id()
        paths = [path for path in self._offered if path in blob.paths and (here or path == "ucx")]
        reasons: list[Exception] = []
        for path in paths:
            if path == "ucx":
                return None
            try:
                return self._map(blob) if path == "arena" else self._open_process(blob)
            except (PeerGone, StaleEpoch, IncompatiblePeers, PermissionError) as error:  # that will not change
                reasons.append(error)
                logger.debug("agent %s by path %s: %s", blob.agent, path, error)
        if reasons and all(isinstance(reason, PeerGone) for reason in reasons):
            raise PeerGone(f"agent {blob.agent} is gone: {reasons[0]}")
        raise IncompatiblePeers(
            f"engine {self._peers.config.engine} reads by {' or '.join(self._offered)}, agent {blob.agent} "
            f"{'on this host' if here else 'on another host'} is read by {' or '.join(blob.paths)}"
            f"{''.join(f'; {reason}' for reason in reasons)}: set their option path to one that works"
        )

    def _map(self, blob: RankBlob) -> PoolSource:
        if blob.arena is None:
            raise IncompatiblePeers(f"agent {blob.agent} names no arena")
        return MappedSource(open_peer_arena(blob.arena, self._peers.card_of(blob)))

    def _open_process(self, blob: RankBlob) -> PoolSource:
        bell = blob.doorbell
        try:
            memory = ProcessMemory(bell.pid, bell.start_time)
        except ProcessLookupError as error:  # or another pid namespace
            raise PeerGone(f"process {bell.pid} is not visible from here: {error}") from error
        except (OSError, OverflowError) as error:
            raise TransferError(f"process {bell.pid} cannot be watched: {error}") from error
        source = ProcessSource(
            memory,
            pool=_span(blob.pool),
            generations=None if blob.generations is None else _span(blob.generations),
            words=_span(blob.permits),
            digests=None if blob.digests is None else _span(blob.digests),
            row_words=1 + self._peers.card_of(blob).layout.num_kv_heads,
            nonce=blob.nonce,
            name=f"agent {blob.agent}",
        )
        try:
            source.word(0)
        except TransferError as error:
            source.close()
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from None
            raise
        return source


def _name(found: PoolSource | PdkvError | None) -> str:
    if found is None:
        return "ucx"
    return found.path if isinstance(found, PoolSource) else "none"


def _span(memory: Memory) -> Span:
    return Span(memory.address, memory.size)
