"""Connectors with a fault that a file switches on: what `refusing` and `dying` have in common."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdkv.connectors.base import ConnectorConfig, KVConnector, SchedulerConnector, WorkerConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.registry import build_connector, plan_connector

OF, SWITCH = "of", "switch"


class Spoiled(KVConnector):
    """The connector that its option `of` names, but for a fault of its scheduler side."""

    declares = ConnectorPlan(interface=INTERFACE, kind="pull")

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        self.config = config
        inner = msgspec.structs.replace(config, plan=_plan_of_inner(config.plan.options))
        self._inner = build_connector(inner, notify)
        self.metadata_type = self._inner.metadata_type  # type: ignore[misc]

    @staticmethod
    def spoil(connector: Any, side: Any, switch: Path) -> None:
        """Give a scheduler side of the connector its fault."""
        raise NotImplementedError

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        return msgspec.structs.replace(_plan_of_inner(options), build="", probe="")

    def make_block_table(self) -> BlockTable:
        self.table = self._inner.make_block_table()
        return self.table

    def allocate_kv_cache(self) -> Any:
        return self._inner.allocate_kv_cache()

    def make_scheduler_side(self) -> SchedulerConnector:
        side = self._inner.make_scheduler_side()
        self.spoil(self, side, Path(self.config.plan.options[SWITCH]))
        return side

    def make_worker_side(self, rank: int) -> WorkerConnector:
        return self._inner.make_worker_side(rank)

    def shutdown(self) -> None:
        self._inner.shutdown()


def _plan_of_inner(options: Mapping[str, str]) -> ConnectorPlan:
    return plan_connector(options[OF], {name: text for name, text in options.items() if name not in (OF, SWITCH)})
