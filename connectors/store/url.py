"""The `store` connector: KV in any store that kv_store/ opens by URL; several URLs make tiers, fastest first."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.options import option, options_of
from pdkv.connectors.plan import ConnectorPlan, Requirement
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.registry import StorePlan, plan_store


class StoreUrlOptions(StoreConnectorOptions, StoreOptions):
    """Options of every store connector, and those of the stores, which depend on the URL."""

    url: str = option(
        help="redis://host:port/db, rediss://…, unix:///socket, lmcache://host:port, mooncake://host:port, "
        "s3://bucket/prefix, gs://…, az://…, file:///directory, host:///directory, memory://; several, separated "
        "by commas, form tiers, fastest first",
        metavar="URL[,URL…]",
    )

    def open_store(self, clock: Clock = MONOTONIC) -> KVStore:
        """`clock`: of its deadlines."""
        return self._plan().open(clock)

    def probed_stores(self) -> Iterable[KVStore]:
        """All but host memory: its segment belongs to the first process that opens it for writing."""
        plan = self._plan()
        others = [part for part in plan.parts if part.parts.scheme != "host"]
        return (StorePlan([part], plan.retry_after_s).open() for part in others)

    def _plan(self) -> StorePlan:
        values = {name: (getattr(self, name), item.default) for name, item in options_of(StoreOptions).items()}
        given: dict[str, Any] = {name: value for name, (value, default) in values.items() if value != default}
        return plan_store(self.url, given)


_NEEDED = {
    "redis|unix://": Requirement(("redis",), "pip install 'pdkv[redis]'", "url=redis://…, rediss://… or unix://…"),
    "mooncake://": Requirement(("mooncake",), "pip install 'pdkv[mooncake]'", "url=mooncake://…"),
    "(s3|gs|az)://": Requirement(("obstore",), "pip install 'pdkv[objects]'", "url=s3://…, gs://… or az://…"),
}


class StoreUrlConnector(StoreConnector):
    """A store connector; its option `url` chooses the store."""

    declares = msgspec.structs.replace(StoreConnector.declares, requirements=tuple(_NEEDED.values()))
    options_type = StoreUrlOptions
    options: StoreUrlOptions

    def open_store(self) -> KVStore:
        return self.options.open_store(self.config.clock)

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        """Raises ConfigError without a URL, for one that no store accepts, and for an option that does not belong to
        its store.
        """
        plan, url = super().plan(options), options["url"]
        plan_store(url, {name: text for name, text in options.items() if name in StoreOptions.names()})
        needed = [requirement for pattern, requirement in _NEEDED.items() if re.search(pattern, url)]
        return msgspec.structs.replace(plan, requirements=tuple(needed))
