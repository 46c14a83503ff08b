"""Tiers of KV next to any hand-off: how --kv-host-memory and --kv-store become a connector.

The tiers are one more child of `multi`: a `store` with the tiers as its URLs, fastest first. A hit in a slower one is
copied into the faster ones (kv_store/tiers.py). If a store hands prompts over, host memory is put in front of it.
"""

from pathlib import Path
from urllib.parse import quote

from pdkv.base.options import OptionTexts
from pdkv.base.secret_options import without_secrets
from pdkv.config import HandoffConfig, TiersConfig
from pdkv.connectors.multi.connector import compose
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import plan_connector
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.kv_store.registry import plan_store

CHILD = "store"
"""The name of the tiers among the children of `multi`, and the prefix of their options in --connector-config."""

_URL = f"{CHILD}.url"


def plan_with_tiers(handoff: HandoffConfig, tiers: TiersConfig, directory: Path, engine: str) -> ConnectorPlan:
    """The connector of one engine, with its tiers.

    Args:
        directory: where the launch names its segments of host memory.

    Raises:
        ConfigError: --kv-store is not a store's URL, or the connector already has such tiers; and the errors of
            `plan_connector`.
    """
    name, options = handoff.connector, handoff.connector_config
    if not tiers.wanted:
        return plan_connector(name, options)
    host = f"host://{quote(str(directory), safe='/')}?segment={engine}" if tiers.kv_host_memory else ""
    _check_url(host, tiers.kv_store)
    if name == CHILD:
        return plan_connector(name, {**options, "url": _joined(host, options.get("url", ""), tiers.kv_store)})
    if _URL in options:
        raise ConfigError(
            f"--connector-config {_URL}={without_secrets(options[_URL])}: --kv-host-memory and --kv-store already "
            "define the tiers: give the URL as --kv-store, or drop both"
        )
    children = [child.strip() for child in options.get("connectors", "").split(",")] if name == "multi" else []
    if CHILD in children:
        raise ConfigError(
            f"connector multi of {','.join(children)} already has a {CHILD}: name the tiers in its url, or drop it "
            "and give them as --kv-host-memory and --kv-store"
        )
    others = {option: text for option, text in options.items() if not option.startswith(f"{CHILD}.")}
    own = {option.removeprefix(f"{CHILD}."): text for option, text in options.items() if option not in others}
    plan = plan_connector(name, others)
    texts = OptionTexts({**own, "url": _joined(host, tiers.kv_store)}, f"connector {CHILD}", prefix=f"{CHILD}.")
    return compose([*(plan.parts or [plan]), plan_connector(CHILD, texts)])


def describe_tiers(tiers: TiersConfig) -> str:
    """Description such as ", 8.0 GiB of host memory each, redis://host:6379/0"; empty if there are no tiers."""
    host = f"{format_bytes(tiers.kv_host_memory)} of host memory each" if tiers.kv_host_memory else ""
    return "".join(f", {part}" for part in (host, without_secrets(tiers.kv_store)) if part)


def _check_url(*urls: str) -> None:
    try:
        plan_store(_joined(*urls), {})
    except ConfigError as error:
        raise ConfigError(f"--kv-store: {error}") from None


def _joined(*urls: str) -> str:
    return ",".join(url for url in urls if url)
