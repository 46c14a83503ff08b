"""From the command to the first healthy answer, beside the time of `import torch`."""

import statistics
import subprocess
import sys
import time

from benchmarks import servers
from benchmarks.claims.rows import Row

RUNS = 3


def import_torch_s() -> float:
    """Seconds of a Python process that imports torch and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def run() -> list[Row]:
    """2P4D of the embedded model."""
    imports, starts = [], []
    for _ in range(RUNS):
        imports.append(import_torch_s())
        with servers.pdkv(None, prefill=2, decode=4) as server:
            starts.append(server.start_s)
    torch_s, start_s = statistics.median(imports), statistics.median(starts)
    note = f"ready after {start_s:.2f} s, import torch {torch_s:.2f} s"
    return [Row("2P4D ready / import torch", "embedded model", start_s / torch_s, "x", "<= 4", note)]
