"""What is ordered of the thread that makes digests."""

from push_rig import view

from pdkv.connectors.base import ConfirmedRange
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.source_digests import digest_orders


def test_the_whole_blocks_of_all_requests_are_one_order() -> None:
    """Each order costs the step thread and the digests' thread as much as a hundred blocks do."""
    told = [
        ConfirmedRange(view(f"t{i}", kv="local", num_tokens=40), 16, 40, [[i, i + 3]], last=False) for i in range(3)
    ]
    told.append(ConfirmedRange(view("t3", kv="handoff", num_tokens=40), 0, 40, [[7, 8, 9]], last=True))
    orders = digest_orders(told, LocalBlockTable(10), "on", 16)
    assert [(list(o.block_ids), o.start, o.stop) for o in orders] == [([7, 8, 9], 0, 40), ([3, 4, 5], 0, 48)]
