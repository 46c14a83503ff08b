"""A launch whose one engine computes nothing (docs/testing.md, "The paced engine"): what a router costs by itself."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import pdkv, process_cpu_seconds, router_pids

MAX_LEN = 1024
_STEP_TOKENS = 1 << 17
_PROFILE = f"""
row_s = 0
prompt_token_s = 0
context_token_s = 0
num_layers = 1
num_kv_heads = 1
head_size = 8
max_model_len = {MAX_LEN}
vocab_size = 4096
"""


class Alone(NamedTuple):
    """A router that is ready, and its one engine."""

    url: str
    model: str
    pid: int
    fronts: tuple[int, ...] = ()  # their pids

    def cpu_seconds(self) -> float:
        """The router's, since its start."""
        return process_cpu_seconds(self.pid)

    def fronts_cpu_seconds(self) -> float:
        """The fronts', since their start."""
        return sum(map(process_cpu_seconds, self.fronts))


def own_memory_kib(pid: int) -> int:
    """Resident memory of a process that is its own, without pages of files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status names no RssAnon")


@contextlib.contextmanager
def router_alone(
    *,
    pace_s: float,
    num_seqs: int,
    num_fronts: int = 0,
) -> Iterator[Alone]:
    """A router with the default options, but for these, and an engine whose steps take `pace_s`."""
    pool_kib = min(64 + 36 * num_seqs, 256 << 10)  # 1 KiB a block: 576 tokens each
    options = ["--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(_STEP_TOKENS), "--max-steps-ahead", "0"]
    options += ["--kv-cache-memory", f"{pool_kib}KiB"]
    options += ["--router-fronts", str(num_fronts)] if num_fronts else []
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as folder:
        profile = Path(folder, "pace.toml")
        profile.write_text(f"step_s = {pace_s}\n{_PROFILE}")
        with pdkv(Path(f"paced:{profile}"), prefill=0, decode=1, options=options) as server:
            pid, *fronts = router_pids(server.pid)
            yield Alone(server.url, server.model, pid, tuple(fronts))
