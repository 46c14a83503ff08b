"""The subject of a measurement: the KV layout, the engines, and their processes."""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdkv.connector_kit.bench.aged_pools import PATTERNS
from pdkv.connector_kit.check.profiles import profile_of
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import Setting, Shape
from pdkv.connectors.registry import CONNECTORS, check_connector
from pdkv.connectors.store.base import LAYERWISE_GROUPS
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.errors import ConfigError
from pdkv.wire.kv import ChecksumMode

TIMEOUT_S = 120.0

STORED_BYTES, STORED_S = "2GiB", "60"

BEYOND_CACHE_BYTES = 128 << 20
"""Bytes of pools and yardsticks, which exceed the last-level cache."""


_DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

LAYOUTS: Mapping[str, str] = {"tiny": "4x4x32", "small": "8x4x64", "mid": "16x8x64"}
"""layers x KV heads x head size of the models with 5, 40 and 197 million parameters that benchmarks use."""

_FORM = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\w+))?")


def parse_layout(text: str, *, tp: int = 1, block_size: int = 16, num_blocks: int = 0) -> Shape:
    """A name of LAYOUTS or LAYERSxHEADSxHEAD_SIZE[:DTYPE], bfloat16 by default; heads are those of all ranks.

    Raises:
        ConfigError: neither of the two, or heads that cannot be divided among the ranks.
    """
    match = _FORM.fullmatch(LAYOUTS.get(text, text))
    dtype = (match[4] or "bfloat16") if match else ""
    if match is None or dtype not in _DTYPES or not all(int(match[i]) for i in (1, 2, 3)):
        raise ConfigError(
            f"layout {text!r} is neither one of {', '.join(LAYOUTS)} nor LAYERSxHEADSxHEAD_SIZE[:DTYPE] with DTYPE "
            f"one of {', '.join(_DTYPES)}"
        )
    layers, heads, head_size = (int(match[i]) for i in (1, 2, 3))
    if heads % tp and tp % heads:
        raise ConfigError(f"{heads} KV heads cannot be divided among {tp} tensor parallel ranks")
    if head_size * _DTYPES[dtype] % 4:
        raise ConfigError(f"a head of {head_size} {dtype} is not a multiple of 4 bytes")
    return Shape(
        tp=tp, block_size=block_size, num_blocks=num_blocks, num_layers=layers, head_size=head_size, num_heads=heads,
        dtype=dtype, dtype_bytes=_DTYPES[dtype],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of one measurement."""

    connector: str  # a registry name or "module:Class"
    options: Mapping[str, str]
    layout: str
    producer: Shape
    consumer: Shape
    tokens: Sequence[int]
    patterns: Sequence[str] = tuple(PATTERNS)
    repeats: int = 7
    piece_bytes: int = 0  # size of the bare transport's pieces; 0: one per (layer, K or V, block)
    one_process: bool = False  # both engines in one process, for stores private to a process
    region_bytes: int = BEYOND_CACHE_BYTES  # of memory that is used in turns
    bare: bool = True  # also for the bare transport
    kv_checksum: ChecksumMode = "on"


def make_plan(
    connector: str,
    *,
    layout: str,
    tokens: Sequence[int],
    tp_pair: tuple[int, int] = (1, 1),
    block_sizes: tuple[int, int] = (16, 16),
    region_bytes: int = BEYOND_CACHE_BYTES,
    **fields: Any,
) -> Plan:
    """A plan with large enough pools; `fields` are its other fields. Raises ConfigError for an invalid layout."""
    producer, consumer = (
        sized(parse_layout(layout, tp=tp, block_size=size), max(tokens), region_bytes)
        for tp, size in zip(tp_pair, block_sizes, strict=True)
    )
    return Plan(
        connector=connector, layout=layout, producer=producer, consumer=consumer, tokens=tokens,
        region_bytes=region_bytes, **fields,
    )  # fmt: skip


@contextmanager
def open_setting(plan: Plan) -> Iterator[Setting]:
    """Processes for worlds of the plan's connector, with private directories for its files."""
    target = CONNECTORS.target(plan.connector)
    options = bounded(target, {**profile_of(target, plan.options).options, **plan.options})
    checked = check_connector(
        plan.connector, {name: text.replace("{directory}", "/") for name, text in options.items()}
    )
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as directory, Zygote(Path(directory)) as zygote:
        yield Setting(
            zygote=zygote,
            directory=Path(directory),
            connector=plan.connector,
            options=options,
            one_process=checked.one_process or plan.one_process,
            kv_checksum=plan.kv_checksum,
            timeout_s=TIMEOUT_S,
        )


def bounded(target: str, options: Mapping[str, str]) -> dict[str, str]:
    """The options with a limit on the store's size, unless they have one: every load has different KV."""
    schemes = {url.partition("://")[0] for url in options.get("url", "").split(",")}
    bounds = {}
    if target.startswith("pdkv.connectors.store.shared_storage:") or "file" in schemes:
        bounds["capacity"] = STORED_BYTES
    if schemes & {"redis", "rediss", "redis+unix", "unix"}:
        bounds["ttl_s"] = STORED_S
    return {**bounds, **options}


def sized(shape: Shape, tokens: int, region_bytes: int = BEYOND_CACHE_BYTES) -> Shape:
    """The shape with a pool for two requests of this many tokens, and of this many bytes."""
    block_bytes = shape.layout().block_bytes
    num_blocks = max(2 * -(-tokens // shape.block_size) + 16, region_bytes // block_bytes)
    return replace(shape, num_blocks=num_blocks)


def plan_bytes(plan: Plan, num_tokens: int) -> int:
    """Bytes of KV of this many tokens on all of the consumer's ranks, in whole blocks."""
    layout = plan.consumer.layout()
    return -(-num_tokens // layout.block_size) * layout.block_bytes * plan.consumer.tp


def store_values(plan: Plan, options: Mapping[str, str]) -> tuple[int, int]:
    """Tokens per value of a store connector with these options, and the number of values for their KV."""
    defaults = StoreConnectorOptions()
    groups = int(options.get("layer_groups", defaults.layer_groups))
    if not groups:
        layerwise = options.get("load", defaults.load) == "layerwise"
        groups = min(LAYERWISE_GROUPS, plan.producer.num_layers) if layerwise else 1
    shards = min(math.lcm(plan.producer.tp, plan.consumer.tp), plan.producer.num_heads)
    return int(options.get("tokens_per_value", defaults.tokens_per_value)), groups * shards
