"""A peer process for shared_memory/test_processes.py: owns an arena and writes it until it is told to stop or killed.

Arguments: engine name, epoch, the layout as JSON, number of blocks, "hold" or "churn". It prints its address and, when
its standard input ends, leaves. Block content is a function of a counter, as is its key: see `content` and `key`.
"""

import base64
import hashlib
import select
import sys

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.connectors.arena.arena import Arena
from pdkv.connectors.arena.block_table import SharedBlockTable
from pdkv.wire.kv import KVLayout


def key(number: int) -> bytes:
    """The key of content `number`."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def write(row: npt.NDArray[np.uint8], number: int) -> None:
    """Write content `number`: every 8-byte word is the number."""
    row.view(np.int64)[:] = number


def churn(arena: Arena, table: SharedBlockTable, num_blocks: int) -> None:
    """Reuse and fill block after block for ever, as a busy engine does; the newest number is in block 0."""
    data = arena.data()
    latest = data[0].view(np.int64)
    number = num_blocks - 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        block_id = 1 + number % (num_blocks - 1)
        table.reuse(block_id)
        write(data[block_id], number)
        table.publish(block_id, [key(number)])
        latest[0] = number


def main() -> None:
    """Own an arena."""
    name, epoch, layout, blocks, mode = sys.argv[1:]
    num_blocks = int(blocks)
    arena = Arena(engine=name, epoch=epoch, layout=msgspec.json.decode(layout, type=KVLayout), num_blocks=num_blocks)
    arena.allocate_data()
    table = SharedBlockTable(arena.table_arrays, arena.shape.table)
    write(arena.data()[0], num_blocks - 1)
    for block_id in range(1, num_blocks):
        write(arena.data()[block_id], block_id)
        table.publish(block_id, [key(block_id)])
    print(base64.b64encode(msgspec.msgpack.encode(arena.address)).decode(), flush=True)
    if mode == "churn":
        churn(arena, table, num_blocks)
    else:
        sys.stdin.read()
    table.close()
    arena.close()


if __name__ == "__main__":
    main()
