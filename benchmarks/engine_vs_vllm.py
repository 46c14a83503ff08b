"""One aggregated engine against vLLM's CPU build on the same cores: output tokens a second, 512 tokens in, 64 out."""

from benchmarks.models import find_model
from benchmarks.peers import vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv
from benchmarks.versus import compare

LIMITS = {"tiny": {8: 1.2, 32: 1.2}, "mid": {1: 1.2, 32: 1.5}}
KV_MEMORY = "2GiB"  # what vLLM gets too


def run(context: Context, size: str) -> list[Claim]:
    """One claim per concurrency."""
    assert context.vllm is not None
    model = find_model(context.models, size)
    claims = []
    with (
        vllm(context.vllm, model) as theirs,
        pdkv(model, prefill=0, decode=1, options=["--kv-cache-memory", KV_MEMORY]) as ours,
    ):
        for concurrency, limit in LIMITS[size].items():
            num_requests, rounds = _effort(size, concurrency, context.quick)
            found = compare(ours, theirs, concurrency=concurrency, num_requests=num_requests, rounds=rounds)
            figures = {"pdkv tok/s": found.ours, "vllm tok/s": found.theirs}
            claims.append(Claim(f"{size}, concurrency {concurrency}", found.ratio, limit, "higher", figures))
    return claims


def _effort(size: str, concurrency: int, quick: bool) -> tuple[int, int]:
    """(requests per round and server, rounds)."""
    if quick:
        return concurrency, 1
    if size == "tiny":
        return 8 * concurrency, 5
    return (concurrency, 3) if concurrency > 1 else (4, 3)
