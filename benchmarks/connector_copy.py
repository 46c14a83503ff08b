"""Bandwidth of a load over `shared_memory`: 4k tokens of paged KV out of another process's arena, against memcpy.

The whole path of a load is timed, from the step thread's order to its result: queue, copy, generations, notification.
The yardstick is one thread's memcpy of the same bytes, warm, in the same run. Both rotate through memory larger than
the last-level cache where the load itself is smaller.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.pull import BlockLoad, PullMetadata
from pdkv.connectors.shared_arena import Arena
from pdkv.connectors.shared_memory_worker import SharedMemoryWorker
from pdkv.messages import EngineCard, KVLayout

MODELS = {
    "tiny": KVLayout(num_layers=4, num_kv_heads=4, head_size=32, block_size=16, dtype="bfloat16", dtype_bytes=2),
    "small": KVLayout(num_layers=8, num_kv_heads=4, head_size=64, block_size=16, dtype="bfloat16", dtype_bytes=2),
    "mid": KVLayout(num_layers=16, num_kv_heads=8, head_size=64, block_size=16, dtype="bfloat16", dtype_bytes=2),
}
BEYOND_CACHE_BYTES = 128 << 20
TIMEOUT_S = 60.0


def own_arena(layout: KVLayout, num_blocks: int) -> None:
    """The other process: an arena full of data until standard input ends."""
    arena = Arena(engine="owner", epoch="1", layout=layout, num_blocks=num_blocks)
    arena.allocate_data()
    arena.data()[:] = np.arange(num_blocks, dtype=np.uint8)[:, None]
    sys.stdout.buffer.write(msgspec.msgpack.encode(arena.address).hex().encode() + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    arena.close()


class Reader:
    """The worker side of an engine, and the arena that it loads into."""

    def __init__(self, layout: KVLayout, num_blocks: int, blob: bytes) -> None:
        self.layout = layout
        self.arena = Arena(engine="reader", epoch="1", layout=layout, num_blocks=num_blocks)
        self.arena.allocate_data()
        self.arena.data()[:] = 0
        self._done = threading.Event()
        config = ConnectorConfig(engine="reader", epoch="1", layout=layout, num_blocks=num_blocks)
        self.worker = SharedMemoryWorker(config, self.arena, self._done.set, io_threads=1, load_timeout_s=TIMEOUT_S)
        card = EngineCard(
            engine="owner", epoch="1", role="any", pid=0, connector="shared_memory", kind="pull",
            content_addressed=True, orders=[], model="", layout=layout, hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=num_blocks, max_model_len=0, max_num_seqs=0, rank_blobs=[blob],
        )  # fmt: skip
        self.worker.update_peers([card], [])
        self._number = 0

    def load(self, source: Sequence[int], destination: Sequence[int], *, busy: bool) -> None:
        """One load; `busy`: this thread computes in Python meanwhile, as a step thread may."""
        self._number += 1
        self._done.clear()
        size = self.layout.block_size
        load = BlockLoad(
            (str(self._number), 1), "owner", "1", 0, len(source) * size, size, source, [0] * len(source), destination
        )
        self.worker.start_load_kv(PullMetadata(step_id=self._number, loads=[load]))
        while busy and not self._done.is_set():
            sum(range(200))
        if not self._done.wait(TIMEOUT_S):
            raise TimeoutError("the load does not end")
        failed = self.worker.get_finished().failed_receiving
        if failed:
            raise RuntimeError(f"the load failed: {failed}")

    def close(self) -> None:
        """Give everything back."""
        self.worker.shutdown()
        self.arena.close()


def block_ids(pattern: str, num_blocks: int, count: int, turn: int) -> tuple[list[int], list[int]]:
    """Source and destination blocks of one load; turns use other blocks."""
    first = turn * count % (num_blocks - count + 1)
    run = list(range(first, first + count))
    spread = np.random.default_rng(turn).permutation(num_blocks)
    source, destination = spread[:count].tolist(), spread[::-1][:count].tolist()
    return (run if pattern == "adjacent" else source), (destination if pattern.startswith("scattered") else run)


def seconds_each(action: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and least seconds of `action(turn)`, after one round to warm up."""
    times = []
    for turn in range(2 * repeats):
        start = time.perf_counter()
        action(turn)
        times.append(time.perf_counter() - start)
    return median(times[repeats:]), min(times[repeats:])


def measure(model: str, num_tokens: int, repeats: int) -> list[dict[str, object]]:
    """All patterns for one model's layout."""
    layout = MODELS[model]
    count = -(-num_tokens // layout.block_size)
    size = count * layout.block_bytes
    num_blocks = max(2 * count, BEYOND_CACHE_BYTES // layout.block_bytes)
    command = [sys.executable, __file__, "--own", msgspec.json.encode(layout).decode(), str(num_blocks)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if owner.stdout is None:
        raise RuntimeError("no pipe")
    reader = Reader(layout, num_blocks, bytes.fromhex(owner.stdout.readline()))
    rows: list[dict[str, object]] = []
    try:
        other = np.ones((num_blocks, layout.block_bytes), np.uint8)
        data = reader.arena.data()

        def memcpy(turn: int) -> None:
            first = turn * count % (num_blocks - count + 1)
            data[first : first + count] = other[first : first + count]

        for pattern in ("adjacent", "into adjacent", "scattered", "scattered, busy"):
            yardstick, best_yardstick = seconds_each(memcpy, repeats)

            turns = [block_ids(pattern, num_blocks, count, turn) for turn in range(2 * repeats)]

            def load(
                turn: int, turns: list[tuple[list[int], list[int]]] = turns, busy: bool = "busy" in pattern
            ) -> None:
                reader.load(*turns[turn], busy=busy)

            seconds, best = seconds_each(load, repeats)
            rows.append({
                "model": model, "block_bytes": layout.block_bytes, "num_tokens": num_tokens, "pattern": pattern,
                "bytes": size, "ms": seconds * 1e3, "gb_per_s": size / seconds / 1e9,
                "memcpy_gb_per_s": size / yardstick / 1e9, "ratio": yardstick / seconds,
                "best_ratio": best_yardstick / best,  # on a shared machine: less of others' time in it
            })  # fmt: skip
    finally:
        reader.close()
        owner.communicate()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="whose KV layout")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per load")
    parser.add_argument("--repeats", type=int, default=15, help="loads per pattern")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--own", nargs=2, metavar=("LAYOUT", "BLOCKS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.own:
        own_arena(msgspec.json.decode(options.own[0], type=KVLayout), int(options.own[1]))
        return 0
    models = list(MODELS) if options.model == "all" else [options.model]
    rows = [row for model in models for row in measure(model, options.tokens, options.repeats)]
    if options.json:
        print(json.dumps({"benchmark": "connector_copy", "connector": "shared_memory", "results": rows}, indent=2))
        return 0
    print(f"{'model':6} {'blocks':>16} {'ms':>8} {'GB/s':>7} {'memcpy':>7} {'ratio':>6} {'best':>6}")
    for row in rows:
        print(
            f"{row['model']:6} {row['pattern']:>16} {row['ms']:8.2f} {row['gb_per_s']:7.2f} "
            f"{row['memcpy_gb_per_s']:7.2f} {row['ratio']:6.2f} {row['best_ratio']:6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
