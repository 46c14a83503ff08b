"""pdkv's host tier inside vLLM: one trace of conversations that overflow vLLM's own pool, on the CPU.

Other tiers take no part. vLLM's own OffloadingConnector refuses to run on a CPU. LMCache 0.5.6 has no connector for KV
in host memory: it says so in its log, then keeps nothing, and each prompt waits seconds for a lookup that is never
answered. The virtual environment with vLLM also needs pdkv: python -m benchmarks.peers install-pdkv VENV. With a third
server a run took 25 minutes on two cores with avx2.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.conversations import make_turns, play
from benchmarks.models import find_model
from benchmarks.peers import vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, metric

BLOCK, POOL_TOKENS, MAX_LEN = 32, 2048, 1536
CHUNK = 256
"""Tokens of a value."""

CONVERSATIONS, TURNS = 8, 6
"""8,283 tokens in the end: four times the pool."""

HOST_MEMORY_GIB = 4


def run(context: Context) -> list[Claim]:
    """Mean TTFT with pdkv's host tier / without one; rounds take turns."""
    assert context.vllm is not None
    count, turns = (2, 2) if context.quick else (CONVERSATIONS, TURNS)
    model = find_model(context.models, "tiny" if context.quick else "mid")
    plan = make_turns(1, count, turns)
    with _servers(context.vllm, model) as servers:
        times = play(servers, plan)
        hits = {name: _external_share(server) for name, server in servers.items()}
    means = {name: mean(each) for name, each in times.items()}
    figures = {f"{name} ms": each * 1e3 for name, each in means.items()}
    figures |= {f"{name} loaded share": share for name, share in hits.items()}
    title = (
        f"mid inside vLLM, {count} conversations of {turns} turns, KV 4x the pool, mean TTFT with a host tier / without"
    )
    return [Claim(title, means["pdkv"] / means["none"], 1.0, "lower", figures)]


@contextmanager
def _servers(folder: Path, model: Path) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm"))
        url = f"host://{memory}/kv?capacity={HOST_MEMORY_GIB}GiB"
        extra = {"connector": "store", "config": {"url": url, "tokens_per_value": str(CHUNK)}}
        transfer = {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector": "PdkvConnector",
            "kv_connector_module_path": "pdkv.vllm.adapter",
            "kv_connector_extra_config": extra,
        }
        systems = {"none": None, "pdkv": transfer}
        yield {name: stack.enter_context(_serving(folder, model, system)) for name, system in systems.items()}


@contextmanager
def _serving(folder: Path, model: Path, transfer: Mapping[str, Any] | None) -> Iterator[Server]:
    options = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_TOKENS // BLOCK)]
    options += ["--max-model-len", str(MAX_LEN)]
    if transfer is not None:
        options += ["--kv-transfer-config", json.dumps(transfer)]
    with vllm(folder, model, cpus="0-1", options=options) as server:
        yield server


def _external_share(server: Server) -> float:
    """Prompt tokens that came from below the pool, of all."""
    name = "vllm:prompt_tokens_by_source_total"
    return metric(server, name, source="external_kv_transfer") / max(1.0, metric(server, name))
