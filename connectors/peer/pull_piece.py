"""The part of a pull that one job reads, in the peer's block numbers and in this rank's."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdkv.connectors.peer.pull_scheduler import BlockLoad
from pdkv.connectors.step_done import StepDone
from pdkv.connectors.transfer.digest import Tokens, cut_tokens, unit_tokens
from pdkv.connectors.transfer.planning import HeadPart, Ids, as_ids, unit_index
from pdkv.connectors.transfer.pool_copy import Pieces, block_pieces, unit_pieces
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import KVNotFound
from pdkv.wire.kv import EngineCard, KVLayout


class PullPiece(NamedTuple):
    """Some heads of a load, read from one rank of the peer by one job."""

    load: BlockLoad
    card: EngineCard
    heads: HeadPart
    after: StepDone  # the last step of the own blocks' previous owner

    @property
    def peer_rank(self) -> tuple[str, str, int]:
        """(engine, epoch, rank) of the source."""
        return self.load.engine, self.load.epoch, self.heads.peer_rank

    @property
    def blocks(self) -> Ids:
        """The peer's block of each source entry."""
        return as_ids(self.load.source) // (self.card.layout.block_size // self.load.unit)

    def source_units(self) -> Ids:
        """The peer's units with the tokens, in their order: see `UnitPool`.

        Raises:
            KVNotFound: they are not whole units of the named blocks.
        """
        return _units(self.load.source, self.load.unit, self.load)

    def own_units(self, layout: KVLayout) -> Ids:
        """This rank's units for the same tokens. Raises KVNotFound as `source_units`."""
        return _units(self.load.block_ids, layout.block_size, self.load)

    def own_part(self, layout: KVLayout) -> UnitPart:
        """The piece's heads in all layers that both have, in this rank's numbering; the peer's equivalent is
        `peer_part`.
        """
        stop = layout.layers_shared_with(self.card.layout)
        return UnitPart(self.heads.first, self.heads.first + self.heads.num_heads, 0, stop)

    def peer_part(self, layout: KVLayout) -> UnitPart:
        """The same heads in the numbering of the peer's rank; an image of a unit has the same bytes on both sides."""
        first = self.heads.peer_first
        return self.own_part(layout)._replace(head_start=first, head_stop=first + self.heads.num_heads)

    def digested_part(self, layout: KVLayout) -> UnitPart:
        """The layers with digests, which a drafter's KV does not have."""
        return self.own_part(layout)._replace(layer_stop=layout.model_layers)

    def pieces(self, layout: KVLayout) -> Pieces:
        """The pieces to copy out of the peer's pool, if that is mapped. Raises KVNotFound as `source_units`."""
        load, peer = self.load, self.card.layout
        if layout == peer and load.unit == layout.block_size and load.start % layout.block_size == 0:
            return block_pieces(layout, as_ids(load.source), as_ids(load.block_ids), range(layout.num_layers))
        theirs, ours = self.source_units(), self.own_units(layout)
        return unit_pieces(layout, peer, theirs, self.heads.peer_first, ours, self.own_part(layout))

    def digested(self, block_ids: Sequence[int], entry_tokens: int) -> tuple[Tokens, Ids]:
        """The load's tokens in these entries of `entry_tokens` each, cut at hash blocks.

        Returns:
            The tokens, and the index of each hash block's entry.
        """
        load, size = self.load, unit_tokens(entry_tokens)
        per_entry = entry_tokens // size
        if load.filled:
            places = np.arange(per_entry, dtype=np.int64)
            counts = np.clip(as_ids(load.filled)[:, None] - places * size, 0, size)
            units = as_ids(block_ids)[:, None] * per_entry + places
            entries = np.broadcast_to(np.arange(len(units))[:, None], units.shape)
            used = counts > 0
            return Tokens(units[used], np.zeros(int(used.sum()), dtype=np.int64), counts[used]), entries[used]
        tokens = cut_tokens(block_ids, entry_tokens, load.start, load.stop, first=load.start)
        positions = np.arange(load.start // size, -(-load.stop // size), dtype=np.int64)
        return tokens, positions // per_entry - load.start // entry_tokens


def _units(entries: Sequence[int], entry_tokens: int, load: BlockLoad) -> Ids:
    """Units of a load's tokens; `entries` have `entry_tokens` tokens each, and the first one holds token `start`."""
    first = load.start // entry_tokens * entry_tokens
    try:
        return unit_index(as_ids(entries), entry_tokens, load.start - first, load.stop - first)
    except ValueError as error:
        raise KVNotFound(str(error), key=load.key) from None
