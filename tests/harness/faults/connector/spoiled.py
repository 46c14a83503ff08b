"""Connectors with a fault that a file switches on: what `refusing` and `dying` have in common."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdkv.connectors.base import Built, ConnectorConfig, KVConnector, SchedulerConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.wire.kv import ConnectorKind

OF, SWITCH = "of", "switch"


class Spoiled(KVConnector):
    """The connector that its option `of` names, but for a fault of its scheduler side."""

    declares = ConnectorPlan(interface=INTERFACE, kind="pull")

    @staticmethod
    def spoil(kind: ConnectorKind, table: BlockTable, side: Any, switch: Path) -> None:
        """Give a scheduler side of that kind, whose pool writes `table`, its fault."""
        raise NotImplementedError

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        return msgspec.structs.replace(_plan_of_inner(options), build="", probe="")

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        inner = build_connector(msgspec.structs.replace(config, plan=_plan_of_inner(config.plan.options)), notify)
        table = inner.block_table or config.block_table

        def scheduler() -> SchedulerConnector:
            side = inner.scheduler()
            assert table is not None, "the pool of an engine is written down"
            cls.spoil(config.plan.kind, table, side, Path(config.plan.options[SWITCH]))
            return side

        return inner._replace(scheduler=scheduler)


def _plan_of_inner(options: Mapping[str, str]) -> ConnectorPlan:
    return plan_connector(options[OF], {name: text for name, text in options.items() if name not in (OF, SWITCH)})
