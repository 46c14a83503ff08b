"""What the checksum of stored values costs: hits with it and without, in turns, in one process.

    python -m benchmarks.checksums redis
    python -m benchmarks.checksums file --sign

A hit is timed from the step that begins the load until all of it is in its blocks; `mid` layout, blocks in no order.
The processor time is this process's, of all threads: it says more on a machine that has other things to do.
"""

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch
import xxhash

from benchmarks.redis_server import redis_server
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.store.envelope import Check, Sealer
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.connectors.store.plan import BlockSpan, StoreCut, StoreLoad, StoreMetadata, StoreSave
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.store.worker import StoreWorker
from pdkv.kv_store.base import Buffer, KVStore, Scattered
from pdkv.kv_store.registry import open_store
from pdkv.wire.kv import KVLayout

MID = KVLayout(16, 8, 64, HASH_BLOCK_SIZE, "bfloat16", 2)
WAIT_S = 60.0


class Took(NamedTuple):
    """One hit, in seconds."""

    wall: float
    processor: float


class NoCheck(Check):
    """Believes what it gets."""

    def arrived(self, stop: int) -> None:
        pass

    def is_whole(self) -> bool:
        return True


class Unchecked(Sealer):
    """Envelopes that nobody computes or looks at."""

    def seal(self, key: bytes, value: Buffer, expires_at: int = 0) -> None:
        pass

    def check(self, key: bytes, value: Scattered) -> Check:
        return NoCheck(xxhash.xxh3_128(), value, lambda digest, expires_at: digest, is_signed=False)


class Reader:
    """One engine's worker side over a store."""

    def __init__(self, store: KVStore, sealer: Sealer, pool: torch.Tensor) -> None:
        options = StoreConnectorOptions(transfer_timeout_s=WAIT_S)
        config = ConnectorConfig(engine="e", epoch="1", layout=MID, num_blocks=len(pool))
        self.cut = StoreCut(config, tokens_per_value=options.tokens_per_value, layer_groups=1)
        self._ended = threading.Semaphore(0)
        self.worker = StoreWorker(config, options, self.cut, SealedValues(store, sealer), self._ended.release)
        self.worker.register_kv_caches(pool)
        self._step = 0

    def run(self, *, loads: Sequence[StoreLoad] = (), saves: Sequence[StoreSave] = ()) -> Took:
        """One step's transfers, each of which succeeds."""
        self._step += 1
        began, processor = time.perf_counter(), time.process_time()
        self.worker.start_load_kv(StoreMetadata(step_id=self._step, loads=list(loads), saves=list(saves)))
        while not (results := self.worker.get_finished()):
            assert self._ended.acquire(timeout=WAIT_S)
        took = Took(time.perf_counter() - began, time.process_time() - processor)
        assert not results.failed_receiving
        assert not results.failed_sending
        return took


def measure(url: str, num_tokens: int, rounds: int, secret: bytes | None) -> tuple[list[Took], list[Took]]:
    """Each hit, with and without."""
    num_blocks = num_tokens // HASH_BLOCK_SIZE
    pool = torch.randn(2 * num_blocks, MID.num_layers, 2, MID.num_kv_heads, HASH_BLOCK_SIZE, MID.head_size).bfloat16()
    rng = random.Random(0)
    blocks = rng.sample(range(2 * num_blocks), num_blocks)
    keys = [rng.randbytes(16) for _ in range(num_blocks)]
    with open_store(url) as store:
        readers = [Reader(store, sealer, pool) for sealer in (Sealer(secret), Unchecked())]
        values = readers[0].cut.whole_values(keys, 0, num_tokens)
        readers[0].run(
            saves=[StoreSave(TransferKey("save", 1), TransferKey("save", 1), values, [], [BlockSpan(0, blocks)], True)]
        )
        hits: tuple[list[Took], list[Took]] = ([], [])
        for number in range(2 * (rounds + 1)):
            which = (number + number // 2) % 2  # on, off, off, on: neither is always the second one
            load = StoreLoad(
                TransferKey(f"load-{number}", 1), values, 0, num_tokens, [rng.sample(range(2 * num_blocks), num_blocks)]
            )
            took = readers[which].run(loads=[load])
            if number >= 2:
                hits[which].append(took)
        for reader in readers:
            reader.worker.shutdown()
    return hits


@contextlib.contextmanager
def place(kind: str) -> Iterator[str]:
    """A URL of an empty store."""
    if kind == "redis":
        with redis_server() as url:
            yield url
    else:
        with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as directory:
            yield f"file://{directory}/kv"


def main() -> None:
    """Print medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", choices=("redis", "file"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sign", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with place(given.store) as url:
        checked, unchecked = measure(url, given.tokens, given.rounds, b"0123456789abcdef" if given.sign else None)
    print(f"{given.tokens * MID.token_bytes / 2**20:.0f} MiB a hit, {len(checked)} pairs; in brackets the quartiles")
    for kind in Took._fields:
        on, off = ([getattr(took, kind) for took in hits] for hits in (checked, unchecked))
        costs = [with_it / without - 1 for with_it, without in zip(on, off, strict=True)]
        print(f"{kind:9} with {_in_ms(on)}, without {_in_ms(off)}: {median(costs):.1%} ({_quartiles(costs, 100)})")


def _in_ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.2f} ms ({_quartiles(seconds, 1e3)})"


def _quartiles(values: Sequence[float], scale: float) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low * scale:.2f} to {high * scale:.2f}"


if __name__ == "__main__":
    main()
