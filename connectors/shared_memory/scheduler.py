"""The scheduler side of `shared_memory`: finds KV in peers' arenas, and names blocks and generations for hand-offs."""

from collections.abc import Sequence

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.arena.arena import PeerArena
from pdkv.connectors.arena.block_table import SharedBlockTable, Words, key_words
from pdkv.connectors.arena.peers import PeerArenas
from pdkv.connectors.base import ConnectorConfig, RequestView, Shown
from pdkv.connectors.peer.pull_scheduler import Match, PullScheduler
from pdkv.connectors.shared_memory.options import SharedMemoryOptions
from pdkv.connectors.transfer.planning import whole_blocks
from pdkv.errors import PdkvError
from pdkv.wire.kv import EngineCard


class SharedMemoryScheduler(PullScheduler):
    """Finds KV in peers' arenas and names blocks for hand-offs. Reads shared memory, but never waits for it."""

    shown = Shown.ALL

    def __init__(
        self, config: ConnectorConfig, table: SharedBlockTable, options: SharedMemoryOptions, peers: PeerArenas
    ) -> None:
        super().__init__(config, table, peers)
        self._options = options
        self._arenas = peers

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        super().update_peers(cards)
        for peer in self._arenas.incarnations():  # now, so that open descriptors do not depend on the traffic
            self._open(*peer)

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        peer = self._open(engine, epoch)
        return None if peer is None else peer.header.layout.block_size

    def _open(self, engine: str, epoch: str) -> PeerArena | None:
        try:
            return self._arenas.get(engine, epoch)
        except PdkvError:  # already logged when it was found out; here it means that nothing can be read there
            return None

    def match_content(self, request: RequestView, start: int) -> Match | None:
        """The longest chain of whole blocks after `start` that one peer has."""
        stop = request.num_wanted // self.block_size * self.block_size
        shortest = max(self._options.min_hit_tokens, self.block_size)
        if not self._options.content_lookup or start % self.block_size or stop - start < shortest:
            return None
        keys = request.block_keys[start // HASH_BLOCK_SIZE : stop // HASH_BLOCK_SIZE]
        probe = -(-shortest // HASH_BLOCK_SIZE) - 1  # a chain without this key is too short: most peers end here
        if len(keys) <= probe:
            return None
        words: Words | None = None
        best: Match | None = None
        for engine, epoch in self._arenas.incarnations():
            peer = self._open(engine, epoch)
            if peer is None or not peer.table.may_have(keys[probe]):
                continue
            words = key_words(keys) if words is None else words
            found = peer.table.find_chain(words)
            end = start + len(found.units) * HASH_BLOCK_SIZE // self.block_size * self.block_size
            if end - start >= shortest and (best is None or end > best.stop):
                count = (end - start) // HASH_BLOCK_SIZE
                best = Match(
                    engine, epoch, start, end, HASH_BLOCK_SIZE,
                    found.units[:count], found.generations[:count], is_handoff=False,
                )  # fmt: skip
                best = _in_whole_blocks(best, peer.header.layout.block_size)
        return best


def _in_whole_blocks(match: Match, block_size: int) -> Match:
    """Name the peer's blocks instead of their hash blocks, if they are used from their beginning and in order."""
    per_block = block_size // HASH_BLOCK_SIZE
    blocks = whole_blocks(match.source, per_block)
    if blocks is None or match.start % block_size:
        return match
    return match._replace(unit=block_size, source=blocks, generations=match.generations[::per_block])
