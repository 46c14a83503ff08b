"""ConnectorPlan: what a connector is, said once, as data that an engine's spec carries."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest

from pdkv.assemble.engine import build_engine
from pdkv.base.options import Options
from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.connectors.base import ConnectorConfig, KVConnector
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.registry import build_connector, load_connector, plan_connector
from pdkv.errors import ConfigError
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.wire.kv import KVGroup, KVLayout

OF_ALL: Mapping[str, Mapping[str, str]] = {
    "lmcache": {"url": "lmcache://host:1", "model_name": "m", "hash": "sha256_cbor"},
    "memory": {"mode": "push"},
    "multi": {"connectors": "p2p,shared_storage", "1.path": "/kv", "1.codec": "int8", "1.tokens_per_value": "48"},
    "nixl": {"mode": "push"},
    "p2p": {},
    "shared_memory": {},
    "shared_storage": {"path": "/kv", "codec": "fp8"},
    "store": {"url": "redis://host:1"},
}


class OfAnEarlierInterface(KVConnector):
    """As connectors were before they had plans."""

    kind = "pull"


class OfALaterInterface(KVConnector):
    """As connectors will be."""

    declares = ConnectorPlan(interface=INTERFACE + 1, kind="pull")


@pytest.mark.parametrize("name", OF_ALL)
def test_a_plan_is_plain_data_that_names_what_is_built(name: str) -> None:
    plan = plan_connector(name, OF_ALL[name])
    assert msgspec.json.decode(msgspec.json.encode(plan), type=ConnectorPlan) == plan
    assert (plan.name, plan.options, plan.interface) == (name, OF_ALL[name], INTERFACE)
    assert callable(resolve_name(plan.build))
    with pytest.raises(AttributeError, match="immutable"):
        plan.kind = "store"  # type: ignore[misc]


def test_what_multi_is_follows_from_its_parts() -> None:
    plan = plan_connector("multi", OF_ALL["multi"])
    parts = [plan_connector("p2p", {}), plan_connector("shared_storage", plan.parts[1].options)]
    assert list(plan.parts) == parts
    assert (plan.kind, plan.lends, plan.content_addressed) == ("push", True, False)
    assert (plan.codec, parts[1].codec) == ("int8-1.0", "int8-1.0")
    assert [p.hit_spacing(32) for p in (plan, *parts)] == [96, 0, 96]
    assert plan.wire_versions == {p.name: p.wire_version for p in (*parts, plan)}


def test_kv_that_a_plan_does_not_name_is_refused_with_both_values() -> None:
    plain = KVLayout(2, 1, 8, 16, "float32", 4)
    latent, unrotated = (msgspec.structs.replace(plain, **fields) for fields in ({"sides": 1}, {"positions": "none"}))
    states = msgspec.structs.replace(plain, groups=(KVGroup((0,)), KVGroup((1,), 2, state=True)))
    lmcache = plan_connector("lmcache", OF_ALL["lmcache"])
    for plan, layout, message in (
        (lmcache, latent, "lmcache carries KV in layouts heads, windows, but the KV of engine e is latent"),
        (lmcache, unrotated, "lmcache carries KV with positions rotated, but the KV of engine e is none"),
        (plan_connector("multi", {"connectors": "lmcache,memory", **{f"0.{k}": v for k, v in lmcache.options.items()}}),
         latent, "multi carries KV in layouts heads, windows, but"),
        (plan_connector("store", OF_ALL["store"]), states,
         "store carries KV in layouts heads, windows, latent, drafter, but .* is heads, windows, state"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            build_connector(
                ConnectorConfig(engine="e", epoch="1", layout=layout, num_blocks=4, plan=plan), lambda: None
            )
    for name in ("memory", "nixl", "p2p", "shared_memory", "shared_storage", "store"):
        plan = plan_connector(name, OF_ALL[name])
        assert {*plan.layouts} >= {"heads", "windows", "latent"}
        assert {*plan.positions} == {"rotated", "none"}


@pytest.mark.parametrize("kind", [OfAnEarlierInterface, OfALaterInterface])
def test_a_connector_for_another_interface_is_refused_with_the_page_to_read(kind: type) -> None:
    number = 1 if kind is OfAnEarlierInterface else INTERFACE + 1
    message = f"written for interface {number} of connectors, and this is interface {INTERFACE}: see docs/writing-a-t"
    with pytest.raises(ConfigError, match=message):
        load_connector(f"{__name__}:{kind.__name__}")


def test_an_engine_with_a_tier_parses_each_parts_options_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handoff, tiers = HandoffConfig(), TiersConfig(kv_store=f"file://{tmp_path}")
    plan = plan_with_tiers(handoff, tiers, tmp_path, "e")
    parsed: list[str] = []
    parse = Options.parse.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Options], *arguments: Any, **others: Any) -> Options:
        parsed.append(cls.__name__)
        options: Options = parse(cls, *arguments, **others)
        return options

    monkeypatch.setattr(Options, "parse", classmethod(counted))
    core = build_engine(EngineConfig(kv_cache_memory=16 << 20, threads=1), handoff, plan, name="planned", epoch="1")
    core.shutdown()
    assert parsed == ["SharedMemoryOptions", "StoreUrlOptions", "StoreOptions"]
