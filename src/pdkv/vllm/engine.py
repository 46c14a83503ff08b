"""The meaning of vLLM's configuration for pdkv, and how vLLM processes with pdkv inside find one another."""

import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.secret_options import read_option
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import build_connector, load_connector, plan_connector
from pdkv.errors import ConfigError
from pdkv.vllm.identity import computation_identity, weights_identity
from pdkv.vllm.peers import CardDirectory
from pdkv.vllm.staging import PeerChange
from pdkv.wire.kv import EngineCard, KVLayout

_KNOWN = {"connector", "config", "peers_dir", "staging_tokens", "save_wait_s"}
_STAGED_STEPS = 4
"""Default number of largest steps with KV in transit."""


class VllmEngine:
    """A connector built from vLLM's configuration. Each side builds its own, since vLLM may run the sides in two
    processes.

    Raises:
        ConfigError: options, models or engines that cannot be served.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = dict(transfer.kv_connector_extra_config)
        unknown = extra.keys() - _KNOWN
        if unknown or "connector" not in extra:
            raise ConfigError(
                f"kv_connector_extra_config requires connector, and allows {', '.join(sorted(_KNOWN))}; got "
                f"{sorted(extra)}"
            )
        self.extra = extra
        self.layout = read_layout(vllm_config, kv_cache_config)
        self.plan = choose_connector(str(extra["connector"]), extra.get("config") or {}, self.layout)
        self.layout = msgspec.structs.replace(self.layout, codec=self.plan.codec)
        self.num_staging_blocks = _staging_blocks(extra, vllm_config, self.layout)
        self.wake = threading.Event()
        self.name, self.epoch = f"vllm-{transfer.engine_id}", str(transfer.engine_id)
        self.model = weights_identity(vllm_config.model_config)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._max_num_seqs = int(vllm_config.scheduler_config.max_num_seqs)
        shows_pool = self.plan.kind != "store"
        if shows_pool != ("peers_dir" in extra):
            raise ConfigError(
                f"peers_dir, a directory that all these engines name, is {'needed' if shows_pool else 'of no use'} "
                f"with connector {extra['connector']}"
            )
        self.peers = CardDirectory(Path(extra["peers_dir"]), self.name) if shows_pool else None
        config = ConnectorConfig(
            engine=self.name,
            epoch=self.epoch,
            layout=self.layout,
            num_blocks=self.num_staging_blocks,
            plan=self.plan,
            model=self.model,
        )
        self.built = build_connector(config, self.wake.set)
        self._change: PeerChange | None = None  # peer changes that the worker side has not been told of

    def shutdown(self) -> None:
        """Shut down, after the side. Idempotent."""
        if self.peers is not None:
            self.peers.withdraw()
        self.built.shutdown()

    def poll_peers(self, tell: Callable[[Sequence[EngineCard]], None]) -> None:
        """Tell the scheduler side of peer changes, if there are any; the worker side is told with the next step."""
        change = self.peers.poll() if self.peers is not None else None
        if self.peers is None or change is None:
            return
        tell(self.peers.cards)
        before = self._change or PeerChange([], [])
        self._change = PeerChange(before.added + change.added, before.removed + change.removed)

    def take_peer_change(self) -> PeerChange | None:
        """Take the peer change for the worker side."""
        change, self._change = self._change, None
        return change

    def card(self, blob: bytes) -> EngineCard:
        """What peers need to know."""
        plan = self.plan
        return EngineCard(
            engine=self.name,
            epoch=self.epoch,
            role="any",
            pid=os.getpid(),
            **plan.on_card(),
            model=self.model,
            layout=self.layout,
            hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=self.num_staging_blocks,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            rank_blobs=[blob],
            wire_versions=plan.wire_versions,
        )


def read_layout(vllm_config: Any, kv_cache_config: Any) -> KVLayout:
    """The layout of a block image.

    Raises:
        ConfigError: several ranks or KV groups, attention other than full, or blocks that are not multiples of 16
            tokens.
    """
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size != 1:
        raise ConfigError("pdkv inside vLLM supports only tensor_parallel_size=1 and pipeline_parallel_size=1")
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(f"pdkv inside vLLM supports only full attention in all layers, got {kinds}")
    spec = groups[0].kv_cache_spec
    layout = KVLayout(
        num_layers=len(groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        dtype_bytes=spec.dtype.itemsize,
    )
    if layout.block_bytes != spec.page_size_bytes * layout.num_layers or layout.block_size % HASH_BLOCK_SIZE:
        raise ConfigError(f"pdkv inside vLLM serves plain KV blocks of a multiple of {HASH_BLOCK_SIZE} tokens")
    return layout


def choose_connector(name: str, config: Mapping[str, Any], layout: KVLayout) -> ConnectorPlan:
    """The connector; a store's values have a block each by default.

    Raises:
        ConfigError: unknown connector, or one that finds nothing by content.
    """
    options = {key: read_option(str(value), f"config: {key}") for key, value in config.items()}
    if load_connector(name).declares.kind == "store":
        options.setdefault("tokens_per_value", str(layout.block_size))
    plan = plan_connector(name, options)
    if not plan.content_addressed:
        raise ConfigError(f"inside vLLM, KV is found by content, which connector {name!r} does not support")
    if options.get("load", "async") != "async":
        raise ConfigError("inside vLLM, loads are asynchronous: use load=async")
    return plan


def _staging_blocks(extra: Mapping[str, Any], vllm_config: Any, layout: KVLayout) -> int:
    """Blocks of the staging pool, including block 0, which is never used."""
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    default = _STAGED_STEPS * max(step_tokens, vllm_config.model_config.max_model_len)
    return -(-int(extra.get("staging_tokens", default)) // layout.block_size) + 1


def layout_identity(vllm_config: Any, kv_cache_config: Any, layout: KVLayout) -> str:
    """Everything that the bytes of a block depend on, except the tokens: only identical engines find each other's
    blocks.
    """
    import vllm

    facts = {
        "vllm": vllm.__version__,
        "device": vllm_config.device_config.device_type,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "backend": vllm_config.attention_config.backend,
        "memory": kv_cache_config.kv_cache_layout,
        "cache": vllm_config.cache_config.cache_dtype,
        "block": layout.block_size,
        "computation": computation_identity(vllm_config),
    }
    return ",".join([layout.identity, *(f"{name}={value}" for name, value in facts.items())])
