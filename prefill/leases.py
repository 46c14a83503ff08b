"""Leases: handed-off KV is kept until its reader releases it, its deadline passes or its router leaves."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.connectors.base import BlockTables, TransferKey
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.request import Request, held_blocks


@dataclass(slots=True)
class Lease:
    """One leased hand-off. It has no blocks if the connector has already copied the KV out."""

    request: Request
    block_tables: BlockTables  # as the request had them at its end
    block_ids: Sequence[int]  # all that are held
    deadline: float
    until_release: bool = False  # not even the end of its transfer ends it
    is_answered: bool = False  # the reader of the last ticket was told how its sending ended


class LeaseTable:
    """The leases of one engine by transfer. Ending one twice is harmless."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._leases: dict[TransferKey, Lease] = {}
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: TransferKey) -> Lease | None:
        """The live lease of a transfer."""
        return self._leases.get(key)

    def grant(
        self, request: Request, block_tables: BlockTables, deadline: float, *, until_release: bool = False
    ) -> None:
        """Keep the blocks for the transfer's reader."""
        block_ids = list(held_blocks(block_tables))
        self._pool.hold(block_ids, Holder.LEASE)
        tables = [list(table) for table in block_tables]
        self._leases[request.transfer_key] = Lease(request, tables, block_ids, deadline, until_release)
        self.num_blocks += len(block_ids)

    def end(self, key: TransferKey) -> Lease | None:
        """End a lease; None: there is none (any more)."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._pool.release(lease.block_ids, Holder.LEASE)
            self.num_blocks -= len(lease.block_ids)
        return lease

    def of_request(self, request_id: str, attempt: int) -> Lease | None:
        """The live lease of a request's attempt."""
        for lease in self._leases.values():
            if lease.request.key == (request_id, attempt):
                return lease
        return None

    def of_router(self, router_id: str) -> list[TransferKey]:
        """Leases of one router's requests."""
        return [key for key, lease in self._leases.items() if lease.request.router_id == router_id]

    def expired(self, now: float) -> list[TransferKey]:
        """Leases whose deadline has passed."""
        return [key for key, lease in self._leases.items() if lease.deadline <= now]

    def next_deadline(self) -> float | None:
        """The earliest deadline."""
        return min((lease.deadline for lease in self._leases.values()), default=None)
