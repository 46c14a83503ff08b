"""Tiers of KV beside any hand-off: how --kv-host-memory and --kv-store become options of connectors.

The tiers are one more child of `multi`: a `store` whose URLs are the tiers, fastest first. A hit in a slower one is
copied into the faster ones (kv_store/tiers.py). Where a store hands prompts over, host memory goes in front of it.
"""

import dataclasses
from pathlib import Path
from urllib.parse import quote

from pdkv.base.secret_options import without_secrets
from pdkv.config import HandoffConfig, TiersConfig
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.kv_store.registry import plan_store

CHILD = "store"
"""The tiers among the children of `multi`; what begins with its name in --connector-config are options of theirs."""

_URL = f"{CHILD}.url"


def add_tiers(handoff: HandoffConfig, tiers: TiersConfig, directory: Path, engine: str) -> HandoffConfig:
    """The hand-off of one engine, beside its tiers.

    Args:
        directory: where the launch names its segments of host memory.

    Raises:
        ConfigError: --kv-store is no store's URL, or there are tiers already where these would be.
    """
    if not tiers.wanted:
        return handoff
    host = f"host://{quote(str(directory), safe='/')}?segment={engine}" if tiers.kv_host_memory else ""
    _check_url(host, tiers.kv_store)
    options = dict(handoff.connector_config)
    if handoff.connector == CHILD:
        options["url"] = _joined(host, options.get("url", ""), tiers.kv_store)
        return dataclasses.replace(handoff, connector_config=options)
    if _URL in options:
        raise ConfigError(
            f"--connector-config {_URL}={without_secrets(options[_URL])}: --kv-host-memory and --kv-store say which "
            "tiers there are: give the URL as --kv-store, or neither of them"
        )
    options[_URL] = _joined(host, tiers.kv_store)
    if handoff.connector == "multi":
        children = [name.strip() for name in options.get("connectors", "").split(",")]
        if CHILD in children:
            raise ConfigError(
                f"connector multi of {','.join(children)} has a {CHILD} already: name the tiers in its url, or leave "
                "it out and give them as --kv-host-memory and --kv-store"
            )
    else:
        children = [handoff.connector]
        options = {
            name if name.startswith(f"{CHILD}.") else f"{handoff.connector}.{name}": value
            for name, value in options.items()
        }
    options["connectors"] = ",".join([*children, CHILD])
    return dataclasses.replace(handoff, connector="multi", connector_config=options)


def connector_with(handoff: HandoffConfig, tiers: TiersConfig) -> str:
    """The connector that `add_tiers` makes of it."""
    return "multi" if tiers.wanted and handoff.connector != CHILD else handoff.connector


def describe_tiers(tiers: TiersConfig) -> str:
    """Such as ", 8.0 GiB of host memory each, redis://host:6379/0"; empty where there are none."""
    host = f"{format_bytes(tiers.kv_host_memory)} of host memory each" if tiers.kv_host_memory else ""
    return "".join(f", {part}" for part in (host, without_secrets(tiers.kv_store)) if part)


def _check_url(*urls: str) -> None:
    try:
        plan_store(_joined(*urls), {})
    except ConfigError as error:
        raise ConfigError(f"--kv-store: {error}") from None


def _joined(*urls: str) -> str:
    return ",".join(url for url in urls if url)
