"""`pd launch --prefill 2 --decode 4` with the embedded model until its first healthy answer, against `import torch`."""

import subprocess
import sys
import time
from statistics import median

from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv

LIMIT = 4.0


def run(context: Context) -> list[Claim]:
    """One claim; imports and launches take turns."""
    rounds = 1 if context.quick else 5
    _import_torch()  # the page cache is warm for both
    imports, launches = [], []
    for _ in range(rounds):
        imports.append(_import_torch())
        with pdkv(None, prefill=2, decode=4) as server:
            launches.append(server.start_s)
    ready, base = median(launches), median(imports)
    return [Claim("2P4D ready", ready / base, LIMIT, "lower", {"ready s": ready, "import torch s": base})]


def _import_torch() -> float:
    """Seconds of a process that imports torch and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", "import torch"], check=True)
    return time.perf_counter() - start
