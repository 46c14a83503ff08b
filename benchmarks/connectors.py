"""Connectors against memcpy and against the bare transport below them, as `pd connector bench` measures them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.report import Claim, Context
from pdkv.connector_kit.bench.effects import PACE, TAIL_TOKENS, measure_push_tail, measure_slowdown
from pdkv.connector_kit.bench.measure import Row, measure, measure_in_turns
from pdkv.connector_kit.bench.plan import BEYOND_CACHE_BYTES, Plan, make_plan
from pdkv.connector_kit.bench.turns import Spread
from pdkv.wire.kv import ChecksumMode

TOKENS = 4096
PIECES = ("512 KiB", "16 KiB")
SCATTERED = "4x2x32"
"""A layout whose blocks have 16 KiB: too small to be moved one by one. Those of mid have 512 KiB."""

SCATTERED_TOKENS = 32768
PATHS: Mapping[str, Mapping[str, str]] = {name: {"path": name} for name in ("arena", "ucx")}
SOCKETS: Mapping[str, Mapping[str, str]] = {name: {"sockets": name} for name in ("unix", "tcp")}
STEP_THREAD_MS = 0.3
DIGEST_LIMIT = 1.10
SLOWDOWN_LIMIT = 0.10
QUICK_REGION_BYTES = 1 << 22


def run_shared_memory(context: Context) -> list[Claim]:
    """Loads against memcpy."""
    rows = _large_and_small(context, "shared_memory", {})
    claims = _of_memcpy("shared_memory", rows, (0.85, 0.7))
    claims += [_step_thread("shared_memory", rows[0]), _digests(context, "shared_memory", {})]
    return [*claims, _slowdown(context, "shared_memory", {})]


def run_nixl(context: Context) -> list[Claim]:
    """Pull and push within a host, beside the other paths that there are."""
    claims = []
    for mode, limit in (("pull", 0.85), ("push", 0.8)):
        for path, options in list(PATHS.items())[: 1 if context.quick else None]:
            large, _ = rows = _large_and_small(context, "nixl", {"mode": mode, **options})
            if path == "ucx":
                claims.append(Claim.of(f"{mode} by ucx, 512 KiB pieces, of one READ of the same bytes",
                                       _known(large.ratio_to_raw), 0.9, "higher", _figures(large)))  # fmt: skip
                continue
            claims += _of_memcpy(f"nixl {mode}", rows, (limit, 0.7))
            claims += [_step_thread(f"nixl {mode}", large), _digests(context, "nixl", {"mode": mode, **options})]
    return [*claims, *_tails(context, "nixl", {"mode": "push"}), _slowdown(context, "nixl", {"mode": "push"})]


def run_p2p(context: Context) -> list[Claim]:
    """Large pieces and small ones over both kinds of sockets, against a bare message."""
    claims = []
    for sockets, options in list(SOCKETS.items())[: 1 if context.quick else None]:
        rows = _large_and_small(context, "p2p", options)
        claims += [
            Claim.of(f"{sockets}, {piece} pieces, of one bare message over such a socket", _known(row.ratio_to_raw),
                     limit, "higher", _figures(row))
            for piece, limit, row in zip(PIECES, (0.95, 0.7), rows, strict=True)
        ]  # fmt: skip
        claims.append(_digests(context, "p2p", options))
        if sockets == "unix":
            claims.append(_step_thread("p2p", rows[0]))
    return [*claims, *_tails(context, "p2p", {}), _slowdown(context, "p2p", {})]


# --- parts --------------------------------------------------------------------------------------------------------


def _plan(context: Context, connector: str, options: Mapping[str, str], **arguments: Any) -> Plan:
    values: dict[str, Any] = {
        "layout": "mid", "tokens": [256 if context.quick else TOKENS], "repeats": 2 if context.quick else 15,
        "region_bytes": QUICK_REGION_BYTES if context.quick else BEYOND_CACHE_BYTES,
    }  # fmt: skip
    return make_plan(connector, options=options, **{**values, **arguments})


def _rows(context: Context, connector: str, options: Mapping[str, str], **arguments: Any) -> list[Row]:
    return measure(_plan(context, connector, options, **arguments))


def _known(spread: Spread | None) -> Spread:
    if spread is None:
        raise RuntimeError("the connector has no bare transport to be compared with")
    return spread


def _figures(row: Row) -> dict[str, float]:
    """GB/s, and what they are of."""
    rates = {"GB/s": row.gb_s, "memcpy": row.memcpy_gb_s, "bare": row.raw_gb_s, "bare in pieces": row.per_piece_gb_s}
    return {
        **{name: spread.median for name, spread in rates.items() if spread is not None},
        "pieces": float(row.pieces), "ms": row.ms.median,
    }  # fmt: skip


def _large_and_small(context: Context, connector: str, options: Mapping[str, str]) -> tuple[Row, Row]:
    """Scattered blocks of 512 KiB, and of 16 KiB; the bare transport has pieces of that size, too."""
    [large] = _rows(context, connector, options, patterns=["aged"], piece_bytes=512 * 1024)
    tokens = [1024 if context.quick else SCATTERED_TOKENS]
    [small] = _rows(
        context, connector, options, patterns=["aged"], layout=SCATTERED, tokens=tokens, piece_bytes=16 * 1024
    )
    return large, small


def _of_memcpy(name: str, rows: Sequence[Row], limits: Sequence[float]) -> list[Claim]:
    """Transfers of blocks of each size, whose bytes are digested, against one memcpy of as many bytes."""
    return [
        Claim.of(f"{name}, {piece} pieces, of memcpy", row.ratio_to_memcpy, limit, "higher", _figures(row))
        for piece, limit, row in zip(PIECES, limits, rows, strict=True)
    ]


def _step_thread(name: str, row: Row) -> Claim:
    """CPU time of all calls of the connector on one engine's step thread, for one request: of the engine with more."""
    sides = {"prefill": row.producer_step_ms, "decode": row.consumer_step_ms}
    figures = {f"{side} ms": spread.median for side, spread in sides.items()}
    most = max(sides.values(), key=lambda spread: spread.median)
    title = f"{name}: step-thread time of a transfer of {row.tokens} tokens / {STEP_THREAD_MS} ms"
    return Claim.of(title, most.over(STEP_THREAD_MS), 1.0, "lower", figures)


def _digests(context: Context, connector: str, options: Mapping[str, str]) -> Claim:
    """Time of a transfer whose KV is compared with what was sent, against one without."""
    plan, tokens = _plan(context, connector, options), 256 if context.quick else TOKENS
    modes: tuple[ChecksumMode, ...] = ("on", "off")
    took = measure_in_turns({mode: replace(plan, kv_checksum=mode) for mode in modes}, tokens)
    figures = {f"{mode} ms": median(took[mode]) for mode in modes}
    title = f"{' '.join([connector, *options.values()])}: {tokens} tokens with digests / without"
    return Claim.of(title, Spread.of_ratios(took["on"], took["off"]), DIGEST_LIMIT, "lower", figures)


def _tails(context: Context, connector: str, options: Mapping[str, str]) -> list[Claim]:
    """What is left of a push when prefill has ended: of a prompt in one step, as by default, and in four."""
    tokens = 128 if context.quick else TAIL_TOKENS
    plan = _plan(context, connector, options, tokens=[tokens], repeats=2 if context.quick else 9)
    return [
        Claim.of(
            f"mid, {tokens} tokens in steps of {tokens // tail.steps}, push behind prefill, of what is allowed",
            tail.ratio_to_allowed, 1.0, "lower", {"tail ms": tail.tail_ms.median, "bare ms": tail.bare_ms.median},
        )
        for tail in measure_push_tail(plan, tokens, pace=12_800.0 if context.quick else PACE)
    ]  # fmt: skip


def _slowdown(context: Context, connector: str, options: Mapping[str, str]) -> Claim:
    """What prefill steps lose."""
    quick = {"chunk": 32, "num_steps": 2, "step_s": 0.01, "rounds": 1} if context.quick else {"rounds": 5}
    slow = measure_slowdown(_plan(context, connector, options), **quick)  # type: ignore[arg-type]
    figures = {"ms": slow.step_ms, "idle ms": slow.idle_step_ms, "transport MB/s": slow.transport_mb_s}
    return Claim(
        "prefill steps beside a throttled transport, longer by", slow.slowdown, SLOWDOWN_LIMIT, "lower", figures
    )
