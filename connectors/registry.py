"""Names of KV connectors: the shipped ones in one table, third parties by entry point, or "module:Class" directly."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from pdkv.base.options import OptionTexts
from pdkv.base.registry import Registry
from pdkv.errors import ConfigError, UnknownConnector

if TYPE_CHECKING:
    from pdkv.connectors.base import ConnectorConfig, KVConnector

ENTRY_POINT_GROUP = "pdkv.connectors"

SHIPPED: Mapping[str, str] = {
    "lmcache": "pdkv.connectors.store.lmcache:LMCacheConnector",
    "memory": "pdkv.connectors.memory.connector:MemoryConnector",
    "multi": "pdkv.connectors.multi.connector:MultiConnector",
    "nixl": "pdkv.connectors.nixl.connector:NixlConnector",
    "p2p": "pdkv.connectors.p2p.connector:P2PConnector",
    "shared_memory": "pdkv.connectors.shared_memory.connector:SharedMemoryConnector",
    "shared_storage": "pdkv.connectors.store.shared_storage:SharedStorageConnector",
    "store": "pdkv.connectors.store.url:StoreUrlConnector",
}
"""name -> "module:Class" of what this distribution ships; the only place that says so. Imported on first use."""


CONNECTORS: "Registry[KVConnector]" = Registry(
    "connector", ENTRY_POINT_GROUP, SHIPPED, "pdkv.connectors.base:KVConnector", unknown=UnknownConnector
)


def connector_targets() -> dict[str, str]:
    """All known names with their "module:Class", shipped ones first. Imports none of them."""
    return CONNECTORS.targets()


def connector_target(name: str) -> str:
    """The "module:Class" that `name` stands for, without importing it.

    Raises:
        UnknownConnector: neither a known name nor of the form "module:Class".
    """
    return CONNECTORS.target(name)


def load_connector(name: str) -> "type[KVConnector]":
    """Import and return the connector class behind `name`.

    Raises:
        UnknownConnector: no such name, or its module or class is missing.
        ConfigError: what it names is no KVConnector.
    """
    return CONNECTORS.load(name)


def choose_connector(name: str, options: Mapping[str, str]) -> "type[KVConnector]":
    """The class that the options choose. Raises what `load_connector` and the class raise."""
    return load_connector(name).for_options(OptionTexts(options, f"connector {name}"))


def make_connector(name: str, config: "ConnectorConfig", notify: Callable[[], None]) -> "KVConnector":
    """One rank's connector: of the class that the options choose. Raises what `load_connector` and the class raise."""
    options = OptionTexts(config.options, f"connector {name}")
    connector = load_connector(name).for_options(options)
    config = msgspec.structs.replace(config, options=options, wire_version=connector.wire_version)
    return connector(config, notify)


def check_connector(name: str, options: Mapping[str, str]) -> "type[KVConnector]":
    """The class that the options choose, if it can be built: what can be said before there is a model.

    Raises:
        ConfigError: an option is unknown or wrong, or a package is not installed; UnknownConnector for the name.
    """
    texts = OptionTexts(options, f"connector {name}")
    connector = load_connector(name).for_options(texts)
    for requirement in connector.requirements(texts):
        if not requirement.installed:
            packages = " or ".join(requirement.modules)
            raise ConfigError(f"connector {name} needs {packages}, which is not installed: {requirement.install}")
    return connector
