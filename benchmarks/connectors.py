"""Connectors against memcpy and against the bare transport below them, as `pd connector bench` measures them."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import layerwise
from benchmarks.load import Workload, send_all
from benchmarks.load import run as run_loop
from benchmarks.models import find_model
from benchmarks.redis_server import redis_server
from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv
from pdkv.connector_kit.bench.effects import measure_push_tail, measure_scheduler_cost, measure_slowdown
from pdkv.connector_kit.bench.measure import Row, measure
from pdkv.connector_kit.bench.plan import BEYOND_CACHE_BYTES, Plan, make_plan

TOKENS = 4096
PUSHED = 2048
SCATTERED = "4x2x32"
"""A layout whose blocks have 16 KiB: too small to be moved one by one."""

SCATTERED_TOKENS = 32768
CACHED = (1024, 16384)
"""Blocks of others in a peer's pool or in a store, few and many."""

SLOWDOWN_LIMIT = 0.10
TAIL_SHARE, TAIL_SLACK_MS = 0.25, 2.0
PUSHED_S = 0.88
"""The forward pass of mid for PUSHED tokens on two threads."""

SCHEDULER_LIMIT = 1.5
QUICK_REGION_BYTES = 1 << 22


def run_shared_memory(context: Context) -> list[Claim]:
    """Loads against memcpy."""
    rows = _rows(context, "shared_memory", {})
    claims = [
        Claim(f"mid, {row.tokens} tokens, {row.pattern}, of memcpy", row.ratio_to_memcpy, 0.5, "higher", _figures(row))
        for row in rows
    ]
    return [*claims, *_effects(context, "shared_memory", {})]


def run_nixl(context: Context) -> list[Claim]:
    """Pull and push, large pieces and small ones."""
    claims = []
    for mode in ("pull", "push"):
        claims += _against_bare(context, "nixl", {"mode": mode}, f"{mode}, ", 0.9)
    return [*claims, *_tails(context, "nixl", {"mode": "push"}), *_effects(context, "nixl", {"mode": "push"})]


def run_p2p(context: Context) -> list[Claim]:
    """Large pieces and small ones, over Gloo."""
    claims = _against_bare(context, "p2p", {}, "", 0.8)
    return [*claims, *_tails(context, "p2p", {}), *_effects(context, "p2p", {})]


def run_store_redis(context: Context) -> list[Claim]:
    """A store's hits against redis-py's pipelined GET, against recomputing, and behind the layers that compute."""
    with redis_server() as url:
        options = {"url": url}
        claims = [
            Claim(f"mid, {row.tokens} tokens, of a bare pipelined GET", _known(row.ratio_to_raw), 0.7, "higher",
                  _figures(row))
            for row in _rows(context, "store", options, patterns=["aged"], **({} if context.quick else {"repeats": 9}))
        ]  # fmt: skip
        claims += _effects(context, "store", options)
        claims += _tiers(context, url)
        claims += layerwise.run(context, url)
    return claims


# --- parts --------------------------------------------------------------------------------------------------------


def _plan(context: Context, connector: str, options: Mapping[str, str], **arguments: Any) -> Plan:
    values: dict[str, Any] = {
        "layout": "mid", "tokens": [256 if context.quick else TOKENS], "repeats": 2 if context.quick else 15,
        "region_bytes": QUICK_REGION_BYTES if context.quick else BEYOND_CACHE_BYTES,
    }  # fmt: skip
    return make_plan(connector, options=options, **{**values, **arguments})


def _rows(context: Context, connector: str, options: Mapping[str, str], **arguments: Any) -> list[Row]:
    return measure(_plan(context, connector, options, **arguments))


def _known(value: float | None) -> float:
    if value is None:
        raise RuntimeError("the connector has no bare transport to be compared with")
    return value


def _figures(row: Row) -> dict[str, float]:
    return {
        "GB/s": row.gb_s, "memcpy": row.memcpy_gb_s, "bare": row.raw_gb_s or 0.0,
        "per piece": row.per_piece_gb_s or 0.0, "pieces": float(row.pieces), "ms": row.ms,
    }  # fmt: skip


def _against_bare(context: Context, connector: str, options: Mapping[str, str], name: str, limit: float) -> list[Claim]:
    """Blocks of 512 KiB, and scattered ones of 16 KiB."""
    [large] = _rows(context, connector, options, patterns=["aged"])
    tokens = [1024 if context.quick else SCATTERED_TOKENS]
    [small] = _rows(
        context, connector, options, patterns=["aged"], layout=SCATTERED, tokens=tokens, piece_bytes=16 * 1024
    )
    return [
        Claim(f"{name}512 KiB pieces, of bare", _known(large.ratio_to_raw), limit, "higher", _figures(large)),
        Claim(f"{name}16 KiB pieces, of bare", _known(small.ratio_to_raw), 0.6, "higher", _figures(small)),
        Claim(f"{name}16 KiB pieces, of one by one", _known(small.ratio_to_per_piece), 2.3, "higher",
              _figures(small)),
    ]  # fmt: skip


def _tails(context: Context, connector: str, options: Mapping[str, str]) -> list[Claim]:
    """What is left of a push when prefill has ended: of a prompt in one step, as by default, and in four."""
    return [_tail(context, connector, options, num_steps) for num_steps in (1, 4)]


def _tail(context: Context, connector: str, options: Mapping[str, str], num_steps: int) -> Claim:
    tokens, step_s = (128, 0.01) if context.quick else (PUSHED, PUSHED_S)
    plan = _plan(context, connector, options, tokens=[tokens])
    tail = measure_push_tail(
        plan, tokens, chunk=tokens // num_steps, step_s=step_s / num_steps, repeats=2 if context.quick else 7
    )
    allowed = TAIL_SHARE * tail.bare_ms + TAIL_SLACK_MS
    figures = {"tail ms": tail.tail_ms, "bare ms": tail.bare_ms, "allowed ms": allowed}
    name = f"mid, {tokens} tokens in steps of {tokens // num_steps}, push behind prefill, of what is allowed"
    return Claim(name, tail.tail_ms / allowed, 1.0, "lower", figures)


def _effects(context: Context, connector: str, options: Mapping[str, str]) -> list[Claim]:
    """What prefill steps lose, and the scheduler's cost with few and many cached blocks elsewhere."""
    quick = {"chunk": 32, "num_steps": 2, "step_s": 0.01, "rounds": 1} if context.quick else {"rounds": 5}
    slow = measure_slowdown(_plan(context, connector, options), **quick)  # type: ignore[arg-type]
    cached = (16, 64) if context.quick else CACHED
    plan = _plan(context, connector, options, layout="2x2x16", tokens=[1024])
    few, many = measure_scheduler_cost(plan, cached)
    figures = {f"us at {cost.cached_blocks}": cost.handoff_us for cost in (few, many)}
    claims = [
        Claim("prefill steps beside a throttled transport, longer by", slow.slowdown, SLOWDOWN_LIMIT, "lower",
              {"ms": slow.step_ms, "idle ms": slow.idle_step_ms, "transport MB/s": slow.transport_mb_s}),
        Claim("scheduler's cost of a hand-off, many against few cached blocks", many.handoff_us / few.handoff_us,
              SCHEDULER_LIMIT, "lower", figures),
    ]  # fmt: skip
    if few.lookup_us is not None and many.lookup_us is not None:
        figures = {f"us at {cost.cached_blocks}": cost.lookup_us or 0.0 for cost in (few, many)}
        claims.append(Claim("scheduler's cost of a lookup, many against few cached blocks",
                            many.lookup_us / few.lookup_us, SCHEDULER_LIMIT, "lower", figures))  # fmt: skip
    return claims


def _tiers(context: Context, redis_url: str) -> list[Claim]:
    """A hit of 4k tokens from each place that KV can be in, beside computing it."""
    tokens = 256 if context.quick else TOKENS
    computed = recompute_seconds(context, tokens)
    tiers: Sequence[tuple[str, str, Mapping[str, str], bool]] = (
        ("a peer's shared memory", "shared_memory", {}, False),
        ("memory", "store", {"url": "memory://"}, True),
        ("file", "store", {"url": "file://{directory}"}, False),
        ("shared storage", "shared_storage", {}, False),
        ("Redis", "store", {"url": redis_url}, False),
    )
    claims = []
    for name, connector, options, one_process in tiers:
        plan = _plan(
            context, connector, options, tokens=[tokens], patterns=["aged"], one_process=one_process, bare=False
        )
        [row] = measure(plan)
        claims.append(Claim(f"mid, {tokens} tokens from {name}, of recomputing", row.ms / 1e3 / computed, 1.0, "lower",
                            {"hit ms": row.ms, "recompute ms": computed * 1e3, "GB/s": row.gb_s}))  # fmt: skip
    return claims


def recompute_seconds(context: Context, tokens: int) -> float:
    """TTFT of a prompt that nobody has, on one engine with two threads."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    options = ("--threads", "2", "--kv-cache-memory", "1GiB")
    with pdkv(model, prefill=0, decode=1, options=options) as server:
        ttfts = []
        for seed in range(2 if context.quick else 4):
            replies, _ = run_loop(send_all(server.url, server.model, Workload(1, tokens, (2, 2), seed=seed + 1)))
            if not replies[0].ok:
                raise RuntimeError(f"a prompt of {tokens} tokens failed: {replies[0].error}")
            ttfts.append(replies[0].ttft)
    return median(ttfts[1:])
