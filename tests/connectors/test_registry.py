"""Connector names: shipped, by entry point, as "module:Class", and the ways that a name can be wrong."""

from importlib.metadata import EntryPoint

import pytest

from pdkv.base import registry as plug_points
from pdkv.connectors import registry
from pdkv.connectors.base import KVConnector
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.errors import ConfigError, UnknownConnector

DIRECT = "pdkv.connectors.p2p.connector:P2PConnector"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What other distributions provide; tests append to it."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(plug_points, "entry_points", lambda group: points if group == "pdkv.connectors" else [])
    return points


@pytest.mark.parametrize("name", registry.SHIPPED)
def test_every_shipped_name_resolves_to_a_connector(name: str) -> None:
    connector = registry.load_connector(name)
    assert issubclass(connector, KVConnector)
    assert connector.declares.orders


def test_an_unknown_name_lists_the_known_ones(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("theirs", DIRECT, "pdkv.connectors"))
    with pytest.raises(UnknownConnector, match=r"'nope'; known: lmcache, memory, .*theirs"):
        registry.CONNECTORS.target("nope")


def test_an_entry_point_is_found_and_loaded(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("theirs", DIRECT, "pdkv.connectors"))
    assert registry.CONNECTORS.targets()["theirs"] == DIRECT
    assert registry.load_connector("theirs") is P2PConnector


def test_an_entry_point_does_not_take_a_shipped_name_over(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("memory", DIRECT, "pdkv.connectors"))
    assert registry.CONNECTORS.targets()["memory"] == registry.SHIPPED["memory"]
    assert registry.CONNECTORS.target("memory") == registry.SHIPPED["memory"]


def test_module_and_class_can_be_given_directly() -> None:
    assert registry.load_connector(DIRECT) is P2PConnector


@pytest.mark.parametrize("name", ["no_such_package.module:Class", "pdkv.connectors.base:NoSuchClass"])
def test_a_missing_module_or_class_is_an_unknown_connector(name: str) -> None:
    with pytest.raises(UnknownConnector, match=name):
        registry.load_connector(name)


def test_what_is_no_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of KVConnector"):
        registry.load_connector("pdkv.errors:ConfigError")


@pytest.mark.parametrize("name", ["", ":", "module:", ":Class"])
def test_a_malformed_name_is_unknown(name: str) -> None:
    with pytest.raises(UnknownConnector):
        registry.CONNECTORS.target(name)
