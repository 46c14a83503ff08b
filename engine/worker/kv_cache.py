"""The KV pool of one rank: how many blocks fit, and the tensor that holds them."""

import logging
from bisect import bisect_right
from collections import Counter
from sys import maxsize

import torch

from pdkv.config import EngineConfig
from pdkv.engine.kv.kv_groups import make_groups, num_held_at_once
from pdkv.errors import ConfigError
from pdkv.host.huge_pages import HugeMemory
from pdkv.host.memory_limits import format_bytes
from pdkv.models.config import ModelConfig
from pdkv.models.kv_scales import KVScales
from pdkv.models.shard import WHOLE, Shard
from pdkv.wire.kv import KVLayout

logger = logging.getLogger(__name__)


def make_layout(
    model: ModelConfig,
    *,
    block_size: int,
    dtype: str,
    shard: Shard = WHOLE,
    grouped: bool = True,
    kv_scales: KVScales = (),
) -> KVLayout:
    """The KV layout of one rank for a dtype by torch's name, such as "bfloat16".

    Args:
        grouped: False: one group that keeps all tokens of all layers, for a connector that supports no other.
        kv_scales: as in the layout.
    """
    kv_heads = shard.heads(model.num_kv_heads)
    num_layers, groups = make_groups(model.windows) if grouped else (model.num_layers, ())
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        head_size=model.head_size,
        block_size=block_size,
        dtype=dtype,
        dtype_bytes=getattr(torch, dtype).itemsize,
        total_kv_heads=model.num_kv_heads,
        groups=groups,
        kv_scales=kv_scales,
        sides=2 if model.latent is None else 1,
    )


def num_blocks_that_fit(
    layout: KVLayout, size_bytes: int, most: int = maxsize, *, option: str = "kv_cache_memory"
) -> int:
    """Whole blocks in `size_bytes`, which `option` says, at most `most`; logs the formula.

    Raises:
        ConfigError: not one block fits.
    """
    num_blocks = min(size_bytes // layout.block_bytes, most)
    logger.info(
        "KV cache: %d blocks of %d tokens; a block = %d x %d layers x %d KV heads x %d tokens x %d head size x %d "
        "bytes = %d bytes; %.1f MiB in total",
        num_blocks, layout.block_size, layout.sides, layout.num_layers, layout.num_kv_heads, layout.block_size,
        layout.head_size, layout.dtype_bytes, layout.block_bytes, num_blocks * layout.block_bytes / (1 << 20),
    )  # fmt: skip
    if layout.groups:
        windows = Counter(layout.windows)
        logger.info(
            "KV groups, each with blocks of its own: %s",
            ", ".join(f"{n} with {f'a window of {w} tokens' if w else 'all tokens'}" for w, n in windows.items()),
        )
    if num_blocks < 1:
        raise ConfigError(f"{option} of {size_bytes} bytes holds no block ({layout.block_bytes} bytes each)")
    return num_blocks


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device, *, reserved: bool = True) -> torch.Tensor:
    """A pool of zeros, so that padded reads see no NaN.

    Args:
        reserved: touch every page of host memory now; False: pages are touched when they are used.
    """
    shape, dtype = layout.pool_shape(num_blocks), getattr(torch, layout.dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = HugeMemory().take(num_blocks * layout.block_bytes)  # every layer has different strides between blocks
    pool = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    return pool.zero_() if reserved else pool


def check_pool(pool: torch.Tensor, layout: KVLayout, num_blocks: int) -> None:
    """Raise ConfigError unless `pool`, which a connector made, is the contiguous pool of that layout."""
    expected = (layout.pool_shape(num_blocks), layout.dtype)
    got = (tuple(pool.shape), str(pool.dtype).removeprefix("torch."))
    if got != expected or not pool.is_contiguous():
        raise ConfigError(f"the connector's KV pool is {got}, contiguous={pool.is_contiguous()}; expected {expected}")


def most_useful_blocks(
    config: EngineConfig, layout: KVLayout, max_model_len: int, max_step_tokens: int = 0, hit_tokens: int = 0
) -> int:
    """The most blocks of an automatically sized pool: enough for all requests of a step at the maximum length. Other
    pools have no such limit.
    """
    if not config.sizes_itself:
        return maxsize
    sizes = (layout.block_size, max_step_tokens, hit_tokens)
    return config.max_num_seqs * num_held_at_once(layout.windows, max_model_len, *sizes)


def length_that_fits(
    config: EngineConfig,
    layout: KVLayout,
    num_blocks: int,
    max_model_len: int,
    max_step_tokens: int = 0,
    hit_tokens: int = 0,
) -> int:
    """The length of the longest request that the engine may accept: a request that does not fit into the pool would be
    cut short.

    Args:
        max_model_len: the requested length, or else the model's, which a smaller pool reduces.
        max_step_tokens: tokens of one step; relevant if layers have a window, as is `hit_tokens` (kv_groups.py).

    Raises:
        ConfigError: the requested length does not fit; names both figures, and what to set.
    """

    def needs(num_tokens: int) -> int:
        return num_held_at_once(layout.windows, num_tokens, layout.block_size, max_step_tokens, hit_tokens)

    if needs(max_model_len) <= num_blocks:
        return max_model_len
    most = range(-(-max_model_len // layout.block_size))  # blocks of one group
    capacity = (bisect_right(most, num_blocks, key=lambda n: needs(n * layout.block_size)) - 1) * layout.block_size
    if capacity < 1:
        raise ConfigError(
            f"the KV pool has {num_blocks} blocks, but a model of {layout.num_groups} KV groups needs one for each: "
            f"use --kv-cache-memory {layout.num_groups * layout.block_bytes * config.tp} bytes or more"
        )
    needed = needs(max_model_len) * layout.block_bytes * config.tp
    pool = f"the KV pool of {format_bytes(num_blocks * layout.block_bytes * config.tp)} holds {capacity} tokens"
    remedy = f"--kv-cache-memory {-(-needed >> 20)}MiB"
    if config.max_model_len is not None:
        raise ConfigError(
            f"{pool}, but a request may have {max_model_len} (max_model_len), which need {format_bytes(needed)}: use "
            f"{remedy} or more, or --max-model-len {capacity} or less"
        )
    logger.warning(
        "%s: prompt plus output is limited to that instead of the model's %d; %s would hold them",
        pool, max_model_len, remedy,
    )  # fmt: skip
    return capacity


def pool_bytes(config: EngineConfig, device: torch.device) -> int | None:
    """Bytes of one rank's pool; None if they depend on the memory that a step leaves, as by default on a GPU."""
    if config.kv_cache_memory is None and device.type != "cpu":
        return None
    return config.host_kv_bytes // config.tp
