"""What --kv-host-memory and --kv-store make of a hand-off."""

from pathlib import Path

import pytest

from pdkv.config import HandoffConfig, TiersConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import plan_connector
from pdkv.errors import ConfigError
from pdkv.launch.kv_tiers import describe_tiers, plan_with_tiers

DIRECTORY = Path("/tmp/a, b?")
HOST = "host:///tmp/a%2C%20b%3F?segment=decode-0"
BOTH = TiersConfig(kv_host_memory=1 << 30, kv_store="redis://:secret@localhost:6379/0")


def with_tiers(tiers: TiersConfig, connector: str, **options: str) -> ConnectorPlan:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return plan_with_tiers(HandoffConfig(connector=connector, connector_config=given), tiers, DIRECTORY, "decode-0")


def test_without_tiers_a_connector_stays_as_it_is() -> None:
    assert with_tiers(TiersConfig(), "p2p") == plan_connector("p2p", {})
    assert describe_tiers(TiersConfig()) == ""


@pytest.mark.parametrize("connector", ["shared_memory", "p2p", "shared_storage"])
def test_tiers_are_one_more_child_behind_the_hand_off(connector: str) -> None:
    own = {"path": "/tmp/kv"} if connector == "shared_storage" else {}
    made = with_tiers(BOTH, connector, **own, store__load="layerwise")
    first, tiers = made.parts
    assert (first.name, dict(first.options)) == (connector, own)
    assert tiers.name == "store"
    assert dict(tiers.options) == {"url": f"{HOST},{BOTH.kv_store}", "load": "layerwise"}


@pytest.mark.parametrize(
    ("tiers", "url"),
    [
        (TiersConfig(kv_host_memory=1 << 30), HOST),
        (TiersConfig(kv_store="file:///a,redis://localhost:6379/0"), "file:///a,redis://localhost:6379/0"),
    ],
)
def test_either_may_be_alone(tiers: TiersConfig, url: str) -> None:
    assert with_tiers(tiers, "shared_memory").parts[-1].options["url"] == url


def test_several_connectors_get_one_more() -> None:
    made = with_tiers(BOTH, "multi", connectors="shared_memory, shared_storage", shared_storage__path="/tmp/kv")
    assert [child.name for child in made.parts] == ["shared_memory", "shared_storage", "store"]
    assert made.build == "pdkv.connectors.multi.connector:MultiConnector.build"


def test_host_memory_goes_in_front_of_a_store_that_hands_over() -> None:
    made = with_tiers(BOTH, "store", url="file:///shared", load="layerwise")
    assert made.name == "store"
    assert made.options == {"url": f"{HOST},file:///shared,{BOTH.kv_store}", "load": "layerwise"}
    assert with_tiers(TiersConfig(kv_host_memory=1 << 30), "store").options == {"url": HOST}


@pytest.mark.parametrize(
    ("tiers", "connector", "options", "message"),
    [
        (TiersConfig(kv_store="reddis://host"), "p2p", {}, "--kv-store: no store 'reddis://host'; known: memory://"),
        (TiersConfig(kv_store="redis://host/x"), "p2p", {"store.url": "y"}, "store.url=y.*give the URL as --kv-store"),
        (BOTH, "multi", {"connectors": "nixl,store"}, "connector multi of nixl,store already has a store"),
        (BOTH, "nixl", {"store.url": "redis://:pw@host"}, r"redis://\*\*\*@host"),
    ],
)
def test_what_cannot_be_is_named(tiers: TiersConfig, connector: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_with_tiers(HandoffConfig(connector=connector, connector_config=options), tiers, DIRECTORY, "decode-0")


def test_people_read_them_without_a_password() -> None:
    assert describe_tiers(BOTH) == ", 1.0 GiB of host memory each, redis://***@localhost:6379/0"
    assert "secret" not in repr(BOTH)
