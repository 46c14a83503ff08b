"""The memory connector: options, refusals, and the store's two phases."""

import numpy as np
import pytest
from engines import at_rest, make_core, of_type, output_of, run, submit
from state_machine.standin import expected_tokens

from pdkv.connectors.base import ConnectorConfig, KVConnector
from pdkv.connectors.memory.fabric import MemoryFabric, MemoryStore
from pdkv.connectors.memory.pull import MemoryPullConnector
from pdkv.connectors.memory.push import MemoryPushConnector
from pdkv.connectors.memory.store import MemoryStoreConnector
from pdkv.connectors.registry import make_connector
from pdkv.errors import ConfigError, IncompatiblePeers, PeerGone, StaleEpoch
from pdkv.wire.messages import EngineCard, Finished, HandedOff, KVLayout, Peers

LAYOUT = KVLayout(2, 1, 1, 4, "int64", 8)


def make(options: dict[str, str], layout: KVLayout = LAYOUT, tp: int = 1) -> KVConnector:
    config = ConnectorConfig(engine="e", epoch="e.0", layout=layout, num_blocks=4, options=options, tp=tp)
    return make_connector("memory", config, lambda: None)


@pytest.mark.parametrize(
    ("mode", "kind", "orders"),
    [
        ("pull", MemoryPullConnector, ["prefill_first", "decode_first"]),
        ("push", MemoryPushConnector, ["decode_first", "needs_peer_first", "concurrent"]),
        ("store", MemoryStoreConnector, ["prefill_first", "decode_first"]),
    ],
)
def test_a_mode_has_its_kind_and_its_legal_orders(mode: str, kind: type, orders: list[str]) -> None:
    connector = make({"mode": mode})
    assert type(connector) is kind
    assert connector.kind == mode
    assert connector.orders() == orders


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "telepathy"},
        {"load": "sideways"},
        {"colour": "red"},
        {"transfer_timeout_s": "-1"},
        {"transfer_timeout_s": "nan"},
        {"transfer_timeout_s": "0"},
    ],
)
def test_a_wrong_option_is_refused_by_name_and_value(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make(options)


def test_a_second_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="one rank, this one has 2"):
        make({}, tp=2)


def test_peers_of_another_layout_are_refused_with_both_values() -> None:
    other = make_core(name="other", block_size=8).card
    with pytest.raises(IncompatiblePeers, match=r"block_size=4.*block_size=8"):
        make({}).make_scheduler_side().update_peers([other])


def test_the_fabric_tells_gone_from_restarted() -> None:
    fabric = MemoryFabric()
    with pytest.raises(PeerGone):
        fabric.endpoint("e", "1")
    worker = make({}).make_worker_side(0)
    fabric.register(worker)  # type: ignore[arg-type]
    with pytest.raises(StaleEpoch):
        fabric.endpoint("e", "older")


def test_the_store_evicts_the_least_recently_used() -> None:
    store = MemoryStore(capacity=2)
    for name in (b"a", b"b"):
        store.put(name, np.zeros(1))
    store.get(b"a")
    store.put(b"c", np.zeros(1))
    assert b"a" in store
    assert b"b" not in store


def test_any_engine_finds_in_the_store_what_another_computed() -> None:
    """Cross-engine prefix reuse, multi-turn: what decode generated is found too."""
    fabric = MemoryFabric()
    MemoryFabric.bind("memory-reuse", fabric)
    options = {"mode": "store", "fabric": "memory-reuse"}
    first, second = make_core(name="a", options=options), make_core(name="b", options=options)
    prompt = list(range(100, 110))
    first.handle("r", submit(prompt, max_tokens=7), 0.0)
    answer = output_of(run(first), "a")
    turn = [*prompt, *answer, 300, 301]
    second.handle("r", submit(turn, max_tokens=3), 0.0)
    messages = run(second)
    (finished,) = of_type(messages, Finished)
    assert isinstance(finished, Finished)
    assert (finished.sources.store, finished.sources.computed) == (16, 3)
    assert output_of(messages, "a") == expected_tokens(turn, 3)
    assert at_rest(second)
    MemoryFabric.unbind("memory-reuse")


def test_a_commit_under_way_is_invisible() -> None:
    """F10: two phases; what is not completely written cannot be found."""
    fabric = MemoryFabric(manual=True)
    MemoryFabric.bind("memory-phases", fabric)
    core = make_core(options={"mode": "store", "fabric": "memory-phases"})
    core.handle("r", submit(list(range(100, 110)), until="first_token", kv="handoff"), 0.0)
    assert len(of_type(run(core), HandedOff)) == 1
    assert fabric.under_way
    assert len(fabric.store) == 0
    while fabric.under_way:
        fabric.deliver(0)
    assert len(fabric.store) == 3  # two full blocks and the tail
    MemoryFabric.unbind("memory-phases")


def test_peers_is_told_to_both_sides() -> None:
    core = make_core(options={"fabric": "memory-peers"})
    peer: EngineCard = make_core(name="peer").card
    core.handle("r", Peers([core.card, peer]), 0.0)
    assert core.external.connector is not None
    assert core.external.connector.epochs == {"peer": "peer.0"}  # type: ignore[attr-defined]
