"""The table of digests."""

import numpy as np

from pdkv.connectors.transfer.digest_table import DigestTable, table_bytes


def test_a_late_order_finds_nothing_to_do_where_later_content_is_digested() -> None:
    """Its digest would take the place of the later one, whose readers would find none."""
    table = DigestTable(memoryview(bytearray(table_bytes(1, 1))), 1, 1)
    units, whole = np.zeros(1, np.int64), np.full(1, 16)
    table.write(units, np.full(1, 5), whole, np.full((1, 1), 7, np.uint64))
    assert [table.counts(units, np.full(1, generation)).item() for generation in (4, 5, 6)] == [16, 16, 0]
    assert [table.read(units, np.full(1, generation)).counts.item() for generation in (4, 5, 6)] == [0, 16, 0]
