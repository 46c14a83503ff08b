"""Engines whose connectors speak different versions refuse each other by their cards, and say which both are."""

import importlib.util
import logging
from collections.abc import Sequence

import pytest
import torch
from push_rig import make_layout

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import Built, ConnectorConfig
from pdkv.connectors.multi.wire import encode_handshake
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.wire.kv import EngineCard

OPTIONS = {"shared_memory": {}, "p2p": {}, "nixl": {"mode": "pull"}, "multi": {"connectors": "p2p,shared_memory"}}
NEEDS = {"nixl": ("nixl_cu12", "nixl_cu13")}
NUM_BLOCKS = 8


def make(name: str) -> tuple[ConnectorConfig, Built]:
    if not any(importlib.util.find_spec(module) for module in NEEDS.get(name, ("torch",))):
        pytest.skip(f"{name} needs {' or '.join(NEEDS[name])}")
    config = ConnectorConfig(
        engine="decode-0", epoch="1", layout=make_layout(), num_blocks=NUM_BLOCKS, model="m",
        plan=plan_connector(name, OPTIONS[name]),
    )  # fmt: skip
    return config, build_connector(config, lambda: None)


def card_of(name: str, versions: dict[str, int], blobs: Sequence[bytes]) -> EngineCard:
    """A prefill engine's that speaks these versions."""
    plan = plan_connector(name, OPTIONS[name])
    return EngineCard(
        engine="prefill-0", epoch="1", role="prefill", pid=1, connector=name, kind=plan.kind, orders=list(plan.orders),
        content_addressed=False, model="m", layout=make_layout(), hash_block_size=HASH_BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=128, max_num_seqs=8, rank_blobs=list(blobs), version="9.9", wire_versions=versions,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_peer_of_another_version_is_refused_before_anything_else_of_its_card_is_read(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a version that is to come puts into its card can be anything."""
    config, connector = make(name)
    versions = config.plan.wire_versions
    child, own = next(iter(versions.items()))  # of multi: its first child
    blob = b"of a version to come"
    blobs = [encode_handshake(["p2p", "shared_memory"], [blob, blob])] if name == "multi" else [blob]
    scheduler = connector.scheduler()
    with caplog.at_level(logging.WARNING):
        scheduler.update_peers([card_of(name, versions | {child: own + 1}, blobs)])
    assert f"no KV from engine prefill-0: connector {child} speaks version {own} in engine decode-0 but version " in (
        caplog.text
    )
    assert f"version {own + 1} in engine prefill-0 (pdkv 9.9): run the same pdkv on both" in caplog.text
    scheduler.shutdown()
    connector.shutdown()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_peer_of_the_same_version_is_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, connector = make(name)
    layout = config.layout
    shape = (NUM_BLOCKS, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_size)
    pool = connector.kv_cache()
    scheduler, worker = connector.scheduler(), connector.worker()
    worker.register_kv_caches(torch.zeros(shape) if pool is None else pool)
    with caplog.at_level(logging.WARNING):
        scheduler.update_peers([card_of(name, config.plan.wire_versions, [worker.handshake()])])
    assert "speaks version" not in caplog.text
    scheduler.shutdown()
    worker.shutdown()
    connector.shutdown()


def test_several_connectors_in_one_tell_the_versions_of_all() -> None:
    multi = plan_connector("multi", OPTIONS["multi"])
    assert multi.wire_versions == {name: plan_connector(name, {}).wire_version for name in ("p2p", "shared_memory")} | {
        "multi": multi.wire_version
    }
