"""1P1D over shared memory against vLLM's 1P1D over NIXL, one core for each engine: output tokens a second."""

from benchmarks.models import find_model
from benchmarks.peers import vllm_pd
from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv
from benchmarks.versus import compare

CONCURRENCIES = (8, 32)
LIMIT = 2.0


def run(context: Context, size: str) -> list[Claim]:
    """One claim per concurrency."""
    assert context.vllm is not None
    model = find_model(context.models, size)
    claims = []
    with (
        vllm_pd(context.vllm, model) as theirs,
        pdkv(model, prefill=1, decode=1, options=["--threads", "1", "--kv-cache-memory", "2GiB"]) as ours,
    ):
        for concurrency in CONCURRENCIES:
            num_requests, rounds = (concurrency, 1) if context.quick else (4 * concurrency, 4)
            found = compare(ours, theirs, concurrency=concurrency, num_requests=num_requests, rounds=rounds)
            figures = {"pdkv tok/s": found.ours, "vllm tok/s": found.theirs}
            claims.append(Claim(f"{size}, concurrency {concurrency}", found.ratio, LIMIT, "higher", figures))
    return claims
