"""Compiled kernels at every level that this host has, each over its bound, against the shares that are stored for it.

    python -m benchmarks.levels            make bench-quick: fails where a share is below BELOW of the stored one
    python -m benchmarks.levels --store    keep what is measured as this processor's

Processor time of one thread, in turns: others may use the machine. Bounds are measured beside: memory read in one
stream, memcpy, multiplications in registers. Needs a C compiler.
"""

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.linears import COLD_BYTES, PEAK_OF, PEAK_ROUNDS, PEAKS, Limits
from benchmarks.support import support_module
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.host.processor import instruction_set
from pdkv.kernels import digest, host
from pdkv.kernels.compiled import levels
from pdkv.kernels.linear import PackedWeight
from pdkv.models.eight_bits import quantize_int8

STORED = Path(__file__).parent / "results" / "levels.json"
BELOW = 0.8
"""So much of a stored share is allowed: medians of two runs differed by up to a tenth on a machine that others used."""

KV_BYTES = 128 << 20
ROUNDS = 7
Work = Callable[[], object]


def _digests(source: np.ndarray, target: np.ndarray, block: int) -> dict[str, Work]:
    """Digests of blocks in no order, alone and with a copy. A block has 32 rows."""
    count, row = KV_BYTES // block, block // 32
    offsets = np.random.default_rng(0).permutation(count).astype(np.int64) * block
    rows, result = host.Rows(32, row, row, 1, row, row, row), np.zeros((count, 1), dtype=np.uint64)
    seeds = digest.seeds_of(range(16), range(1))
    places = np.sort(offsets)
    size = f"{block >> 10} KiB"
    return {
        f"digest, blocks of {size} / read": lambda: digest.add_digests(result, seeds, source, offsets, rows),
        f"copy with digest, blocks of {size} / memcpy": lambda: digest.add_digests(
            result, seeds, source, offsets, rows, target=target, target_offsets=places
        ),
    }


def _attention(num_sequences: int, context: int) -> dict[str, Work]:
    """Single queries of 32 heads, of 8 KV heads of 128 numbers, in float32: what is read is COLD_BYTES and more."""
    heads, kv_heads, size, block = 32, 8, 128, 16
    blocks = num_sequences * context // block
    pool, qkv = torch.randn(blocks, 2, kv_heads, block, size), torch.randn(num_sequences, (heads + 2 * kv_heads) * size)
    out = torch.empty(num_sequences, heads * size)
    rows = np.arange(num_sequences, dtype=np.int64)
    arrays = {
        "q_rows": rows, "out_rows": rows, "seq_lens": np.full_like(rows, context), "hidden": np.zeros_like(rows),
        "first_blocks": rows * (context // block), "block_tables": np.random.default_rng(0).permutation(blocks),
    }  # fmt: skip
    args = host.AttentionArgs(
        keys=pool.data_ptr(), values=pool[0, 1].data_ptr(), qkv=qkv.data_ptr(), out=out.data_ptr(), n=num_sequences,
        heads=heads, kv_heads=kv_heads, head_size=size, block_size=block, block_stride=pool.stride(0),
        row_stride=qkv.stride(0), dtype=0, num_threads=1, scale=size**-0.5,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )  # fmt: skip
    kept = (pool, qkv, out, arrays)
    return {"attention, 4 queries a KV head, float32 / read": lambda: (kept, host.attend(args))}


def _linears() -> dict[str, Work]:
    """Rows by weights of 1,024 inputs and outputs; COLD_BYTES of them for one row, one of them for 64."""
    work: dict[str, Work] = {}
    kinds = {"float32": torch.float32, "weights of bfloat16": torch.bfloat16, "weights of int8": torch.int8}
    for name, dtype in kinds.items():
        count = COLD_BYTES // (1024 * 1024 * dtype.itemsize)
        weight = torch.randn(1024, 1024)
        packed = [
            PackedWeight(quantize_int8(weight) if dtype == torch.int8 else weight.to(dtype), None, torch.float32)
            for _ in range(count)
        ]
        one, many = torch.randn(1, 1024), torch.randn(64, 1024)
        work[f"linear, {name}, 1 row / read"] = lambda p=packed, x=one: [each.multiply(x, None, 1) for each in p]
        work[f"linear, {name}, 64 rows / peak"] = lambda p=packed, x=many: p[0].multiply(x, None, 1)
    return work


def measure(limits: Limits) -> dict[str, dict[str, float]]:
    """{level: {kernel / bound: share}}."""
    source, target = (np.zeros(KV_BYTES + 4096, dtype=np.uint8) for _ in range(2))
    source, target = (each[-each.ctypes.data % 4096 :][:KV_BYTES] for each in (source, target))
    source[:], target[:] = 7, 1  # pages of their own
    kernels = [_digests(source, target, 512 << 10), _digests(source, target, 16 << 10), _attention(16, 1024)]
    found = {}
    for isa in levels():
        with support_module("isas").kernels_of(isa):
            work = {name: run for each in (*kernels, _linears()) for name, run in each.items()}
            bounds: dict[str, Work] = {
                "read": lambda: limits.read(1),
                "memcpy": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, KV_BYTES),
            }
            if peak := PEAK_OF.get(isa):
                peak = peak.removesuffix("_bf16")
                bounds["peak"] = lambda peak=peak: limits.compute(peak, 1)
            else:
                work = {name: run for name, run in work.items() if not name.endswith("/ peak")}
            times = {
                name: each.median for name, each in times_in_turns(bounds | work, ROUNDS, time.thread_time).items()
            }
        amounts = {"read": COLD_BYTES, "memcpy": KV_BYTES, "peak": PEAK_ROUNDS * np.prod(PEAKS[peak or "avx2"])}
        moved = {"digest": KV_BYTES, "copy": KV_BYTES, "attent": 16 * 1024 * 8 * 128 * 8}
        found[isa] = {
            name: round(float(_amount(name, moved) / times[name] / (amounts[bound] / times[bound])), 2)
            for name in work
            for bound in (name.rpartition("/ ")[2],)
        }
    return found


def _amount(name: str, moved: dict[str, int]) -> int:
    if name.startswith("linear"):
        return 64 * 1024 * 1024 if name.endswith("peak") else COLD_BYTES
    return next(amount for kernel, amount in moved.items() if name.startswith(kernel))


def main() -> int:
    """Print a table; 1: a share is too far below the stored one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found = measure(Limits(Path(folder)))
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    before, worse = stored.get(instruction_set(), {}), False
    print(f"| kernel / bound | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for name in next(iter(found.values()), {}) | found.get(max(found, default=""), {}):
        shares = []
        for isa, own in found.items():
            is_low = own.get(name, 1.0) < BELOW * before.get(isa, {}).get(name, 0.0)
            worse |= is_low
            shares.append(f"{own.get(name, '')}{f' (was {before[isa][name]})' if is_low else ''}")
        print(f"| {name} | {' | '.join(shares)} |")
    if not before:
        print(f"nothing is stored for {instruction_set()}, so nothing was compared: --store keeps these")
    if options.store:
        STORED.write_text(json.dumps(stored | {instruction_set(): found}, indent=1) + "\n")
    return int(worse and not options.store)


if __name__ == "__main__":
    raise SystemExit(main())
