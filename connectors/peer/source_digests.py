"""Digests of the content of an engine's blocks, for peers that read them: made after the steps, on a separate thread.

The scheduler side says which content is final (DigestOrder), in which generations. Readers wait for unfinished digests,
so nothing else waits for this thread, neither a step nor a hand-off.
"""

import logging
import queue
from collections.abc import Sequence
from threading import Event

import msgspec
import numpy as np

from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.base import BlockTables, ConfirmedRange, ScheduledRange
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.peer.checksums import is_checked
from pdkv.connectors.step_done import StepDone
from pdkv.connectors.transfer.digest import PoolDigests, Tokens, cut_tokens, unit_tokens
from pdkv.connectors.transfer.digest_table import DigestTable
from pdkv.connectors.transfer.planning import IdBytes, Ids, as_ids
from pdkv.errors import TransferTimeout
from pdkv.wire.kv import ChecksumMode, KVLayout

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 60.0


class DigestOrder(msgspec.Struct, frozen=True, array_like=True):
    """Make digests of tokens [start, stop) of these blocks, the first one of which holds token 0."""

    block_ids: Sequence[int]
    generations: IdBytes
    start: int
    stop: int


def digest_orders(
    told: Sequence[ConfirmedRange | ScheduledRange], table: BlockTable, mode: ChecksumMode, layout: KVLayout
) -> list[DigestOrder]:
    """The digests to make of tokens: for the ends of hand-offs with their tails, otherwise for whole hash blocks."""
    size, orders = unit_tokens(layout.block_size), []
    for tokens in told:
        request = tokens.request
        if mode != "on" and not (request.kv == "handoff" and is_checked(mode, request.transfer_id)):
            continue
        start, stop = tokens.start // size * size, tokens.stop
        is_last = isinstance(tokens, ConfirmedRange) and tokens.last
        stop = stop if is_last else stop // size * size
        if start < stop:
            orders += _of_tables(tokens.block_tables, table, start, stop, layout, is_last=is_last)
    return orders


def _of_tables(
    tables: BlockTables, table: BlockTable, begin: int, end: int, layout: KVLayout, *, is_last: bool
) -> list[DigestOrder]:
    """One order for each KV group; blocks that a window has given up come first, and have none. A state's page is
    digested whole, once no further token changes it.
    """
    orders, size = [], layout.block_size
    for group, block_ids in enumerate(tables):
        start, stop = begin, end
        if layout.groups and layout.groups[group].state:
            start, stop = start // size * size, (-(-stop // size) if is_last else stop // size) * size
        first, last = start // size, -(-stop // size)
        blocks = list(block_ids[first:last])
        while blocks and blocks[0] < 0:
            first, blocks = first + 1, blocks[1:]
        if blocks:
            generations = table.generations_of(blocks).tobytes()
            orders.append(DigestOrder(blocks, generations, max(start - first * size, 0), stop - first * size))
    return orders


class SourceDigests:
    """The digests of one rank. Other threads may write digests into the table, too."""

    def __init__(self, pool: PoolDigests, table: DigestTable) -> None:
        self.table = table
        self._pool = pool
        self._orders: queue.SimpleQueue[tuple[Sequence[DigestOrder], StepDone] | None] = queue.SimpleQueue()
        self._thread = ServiceThread(self._run, lambda: self._orders.put(None), "pdkv-digest")
        self._thread.start()

    def put(self, orders: Sequence[DigestOrder], after: StepDone) -> None:
        """Queue orders, on the step thread. `after`: the last step that wrote their blocks."""
        self._orders.put((orders, after))

    def close(self) -> None:
        """Idempotent."""
        self._thread.stop()

    def _run(self, stopping: Event) -> None:
        while (news := self._orders.get()) is not None and not stopping.is_set():
            self.make(*news)

    def make(self, orders: Sequence[DigestOrder], after: StepDone) -> None:
        """Make digests now."""
        try:
            after.wait(STEP_TIMEOUT_S)
            if self._pool.on_device:  # which is asked, and waited for, once
                self._make(orders)
            else:
                for order in orders:
                    self._make([order])
        except TransferTimeout as error:  # a reader finds no digest, and reports that
            logger.warning("KV without digests: %s", error)
        except Exception:
            logger.exception("KV without digests")

    def _make(self, orders: Sequence[DigestOrder]) -> None:
        tokens, generations = _newest(*zip(*map(self._tokens_of, orders), strict=True))
        new = self.table.counts(tokens.units, generations) < tokens.counts
        if new.any():
            tokens, generations = tokens.at(new), generations[new]
            digests = self._pool.digests(tokens, self._pool.whole)
            self.table.write(tokens.units, generations, tokens.counts, digests)

    def _tokens_of(self, order: DigestOrder) -> tuple[Tokens, Ids]:
        """The tokens of an order, and the generation of each unit."""
        size = self._pool.layout.block_size
        tokens = cut_tokens(order.block_ids, size, order.start, order.stop, first=0)
        index = np.arange(order.start // self._pool.unit_tokens, -(-order.stop // self._pool.unit_tokens))
        return tokens, as_ids(order.generations)[index * self._pool.unit_tokens // size]


def _newest(tokens: Sequence[Tokens], generations: Sequence[Ids]) -> tuple[Tokens, Ids]:
    """Several orders merged into one, with each unit once: in its last generation, with the most tokens."""
    joined, of_each = Tokens(*map(np.concatenate, zip(*tokens, strict=True))), np.concatenate(generations)
    order = np.lexsort((joined.counts, of_each, joined.units))
    units = joined.units[order]
    last = order[np.append(units[1:] != units[:-1], np.ones(min(units.size, 1), dtype=np.bool_))]
    return joined.at(last), of_each[last]
