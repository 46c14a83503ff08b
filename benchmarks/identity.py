"""An engine's start with its model's identity taken (digests to be taken, or known) against one without.

python -m benchmarks.identity MODEL none|cold|warm CACHE    # one start, in this process; prints its seconds
"""

import gc
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.launch.fork_server import ENVIRONMENT

LIMIT = 1.1
ROUNDS = 9
MODES = ("none", "cold", "warm")
_ROOT = Path(__file__).parent.parent


class Start(NamedTuple):
    """The start of one engine, from the model's files to the first step it could run."""

    wall_s: float
    cpu_s: float  # of all threads: says more than the wall on a machine that others use


def run(context: Context, size: str) -> list[Claim]:
    """Two claims; modes take turns, each start has a process of its own, and the page cache is warm."""
    model = find_model(context.models, size)
    starts: dict[str, list[Start]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as folder:
        known = Path(folder) / "known"
        _start_elsewhere(model, "warm", known)  # takes the digests, and warms the page cache
        for _ in range(1 if context.quick else ROUNDS):
            for mode in MODES:
                cache = known if mode == "warm" else Path(folder) / secrets.token_hex(4)
                starts[mode].append(_start_elsewhere(model, mode, cache))
    figures = {
        f"{mode} {field}": median(getattr(s, field) for s in starts[mode]) for mode in MODES for field in Start._fields
    }
    return [
        Claim(f"{size}: start, {text}", figures[f"{mode} wall_s"] / figures["none wall_s"], LIMIT, "lower", figures)
        for mode, text in (("cold", "digests to be taken"), ("warm", "digests known"))
    ]


def _start_elsewhere(model: Path, mode: str, cache: Path) -> Start:
    command = [sys.executable, "-m", "benchmarks.identity", str(model), mode, str(cache)]
    environment = {**ENVIRONMENT, **os.environ}
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=_ROOT, env=environment)
    return Start(*json.loads(process.stdout))


def start(model: Path, mode: str, cache: Path) -> Start:
    """Build an engine, and end it."""
    from pdkv.assemble import engine as build_engine
    from pdkv.config import EngineConfig
    from pdkv.models.config import ModelConfig
    from pdkv.models.identity import ModelSource
    from pdkv.models.weight_files import WeightFiles

    class Source(ModelSource):
        """With a cache of its own, or without an identity."""

        def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
            if mode == "none":
                self.files = WeightFiles(path)
            else:
                super().__init__(path, config, cache=cache)

        def known(self) -> str | None:
            return "none" if mode == "none" else super().known()

        def identity(self) -> str:
            return "none" if mode == "none" else super().identity()

        def close(self) -> None:
            if mode == "none":
                self.files.close()
            else:
                super().close()

    build_engine.ModelSource = Source  # type: ignore[misc]
    config = EngineConfig(model=model, device="cpu", kv_cache_memory=64 << 20, max_model_len=512)
    gc.collect()
    gc.freeze()  # as the fork server does: a collection would count as a part of the start
    before, cpu_before = time.perf_counter(), time.process_time()
    core = build_engine.build_engine(config, name="e", epoch="1")
    took = Start(time.perf_counter() - before, time.process_time() - cpu_before)
    core.shutdown()
    return took


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    model, mode, cache = arguments
    print(json.dumps(start(Path(model), mode, Path(cache))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
