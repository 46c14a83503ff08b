"""One aggregated engine against vLLM's CPU build on the same cores: output tokens a second, 512 tokens in, 64 out."""

from benchmarks.models import find_model
from benchmarks.peers import vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv
from benchmarks.versus import compare
from pdkv.host.processor import emulates_bfloat16, instruction_set

LIMITS = {"tiny": {1: 1.5, 8: 1.5, 32: 1.4}, "mid": {1: 1.5, 8: 1.8, 32: 2.2}}
"""By model and concurrency, where both compute in bfloat16 with the processor's instructions for it."""

LIMITS_IN_FLOAT32 = LIMITS | {"mid": {1: 1.2, 8: 1.5, 32: 1.5}}
KV_MEMORY = "2GiB"  # what vLLM gets too


def run(context: Context, size: str) -> list[Claim]:
    """One claim per concurrency."""
    assert context.vllm is not None
    model = find_model(context.models, size)
    limits = LIMITS_IN_FLOAT32 if emulates_bfloat16() else LIMITS
    claims = []
    with (
        vllm(context.vllm, model) as theirs,
        pdkv(model, prefill=0, decode=1, options=["--kv-cache-memory", KV_MEMORY]) as ours,
    ):
        for concurrency, limit in limits[size].items():
            num_requests, rounds = _effort(size, concurrency, context.quick)
            found = compare(ours, theirs, concurrency=concurrency, num_requests=num_requests, rounds=rounds)
            figures = {"pdkv tok/s": found.ours, "vllm tok/s": found.theirs}
            claims.append(
                Claim(f"{size}, concurrency {concurrency}, {instruction_set()}", found.ratio, limit, "higher", figures)
            )
    return claims


def _effort(size: str, concurrency: int, quick: bool) -> tuple[int, int]:
    """(requests per round and server, rounds)."""
    if quick:
        return concurrency, 1
    if size == "tiny":
        return 8 * concurrency, 5
    return (concurrency, 3) if concurrency > 1 else (4, 3)
