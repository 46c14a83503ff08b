"""The memory connector: options and refusals, and that its store is that of the store connectors."""

import msgspec
import pytest

from pdkv.connectors.base import Built, ConnectorConfig
from pdkv.connectors.memory.connector import MemoryStoreConnector
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.memory.pull import MemoryPullWorker
from pdkv.connectors.memory.push import MemoryPushWorker
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.connectors.store.base import StoreConnector
from pdkv.connectors.store.worker import StoreWorker
from pdkv.errors import ConfigError, IncompatiblePeers, PeerGone, StaleEpoch
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.testing.engine import make_core
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import Peers

LAYOUT = KVLayout(2, 1, 1, 4, "int64", 8)
UNITS = msgspec.structs.replace(LAYOUT, block_size=16)


def make(options: dict[str, str], layout: KVLayout = LAYOUT, tp: int = 1) -> Built:
    plan = plan_connector("memory", options)
    return build_connector(
        ConnectorConfig(engine="e", epoch="e.0", layout=layout, num_blocks=4, plan=plan, tp=tp), lambda: None
    )


@pytest.mark.parametrize(
    ("mode", "kind", "orders"),
    [
        ("pull", MemoryPullWorker, ["prefill_first", "decode_first"]),
        ("push", MemoryPushWorker, ["decode_first", "needs_peer_first", "concurrent"]),
        ("store", StoreWorker, ["prefill_first", "decode_first"]),
    ],
)
def test_a_mode_has_its_kind_and_its_legal_orders(mode: str, kind: type, orders: list[str]) -> None:
    plan = plan_connector("memory", {"mode": mode})
    assert plan.kind == mode
    assert list(plan.orders) == orders
    built = make({"mode": mode}, UNITS)
    worker = built.worker()
    assert type(worker) is kind
    worker.shutdown()
    built.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "telepathy"},
        {"mode": "store", "load": "sideways"},
        {"colour": "red"},
        {"transfer_timeout_s": "-1"},
        {"transfer_timeout_s": "nan"},
        {"transfer_timeout_s": "0"},
    ],
)
def test_a_wrong_option_is_refused_by_name_and_value(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=list(options)[-1]):
        make(options)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_option_of_the_store_is_refused_where_nothing_is_stored(mode: str) -> None:
    message = f"connector memory: option 'load' belongs to mode=store, but the mode is {mode}"
    with pytest.raises(ConfigError, match=message):
        make({"mode": mode, "load": "layerwise"})


@pytest.mark.parametrize("mode", ["pull", "push", "store"])
def test_a_second_rank_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"supports only tp=1, but engine .* has tp=2"):
        make({"mode": mode}, tp=2)


def test_peers_of_another_layout_are_refused_with_both_values() -> None:
    other = make_core(name="other", block_size=8).card
    with pytest.raises(IncompatiblePeers, match=r"block_size=4.*block_size=8"):
        make({}).scheduler().update_peers([other])


def test_the_fabric_tells_gone_from_restarted() -> None:
    fabric = MemoryFabric()
    with pytest.raises(PeerGone):
        fabric.endpoint("e", "1")
    worker = make({}).worker()
    fabric.register(worker)  # type: ignore[arg-type]
    with pytest.raises(StaleEpoch):
        fabric.endpoint("e", "older")


def test_peers_is_told_to_both_sides() -> None:
    core = make_core(options={"fabric": "memory-peers"})
    peer: EngineCard = make_core(name="peer").card
    core.handle("r", Peers([core.card, peer]), 0.0)
    assert core.external.connector is not None
    assert core.external.connector.epochs == {"peer": "peer.0"}  # type: ignore[attr-defined]


def test_the_store_of_a_fabric_is_one_of_kv_store_under_its_name() -> None:
    """One implementation: what holds for the store connectors holds here, KV groups and damage included."""
    plan = plan_connector("memory", {"mode": "store", "fabric": "memory-one"})
    assert "windows" in plan.layouts
    config = ConnectorConfig(engine="e", epoch="e.0", layout=UNITS, num_blocks=4, plan=plan)
    connector = MemoryStoreConnector(config, lambda: None)
    assert isinstance(connector, StoreConnector)
    with MemoryStore("memory-one") as same:
        connector.store.put([(b"k", memoryview(b"value"))])
        assert same.contains([b"k"]) == [True]
    connector.shutdown()
