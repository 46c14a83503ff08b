"""A connector whose prefill engines have their peers refuse their hand-offs while a file exists.

`--connector refusing:Refusing --connector-config of=NAME switch=PATH …` is the connector NAME otherwise. Nothing is
pretended on decode: what is refused there is refused by the connector's own checks, over its own transport.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from pdkv.connectors.base import KVConnector, SchedulerConnector
from pdkv.connectors.registry import load_connector

OF, SWITCH = "of", "switch"


class Refusing(KVConnector):
    """Stands for the class that its options choose: see `for_options`."""

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
        """A subclass of the connector that is meant."""
        switch = options[SWITCH]
        chosen = load_connector(options[OF]).for_options(without_own(options))

        class Refused(chosen):  # type: ignore[misc, valid-type]
            @classmethod
            def parse_options(cls, options: Mapping[str, str]) -> Any:
                return super().parse_options(without_own(options))

            @classmethod
            def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
                return cls

            def make_block_table(self) -> Any:
                self.table = super().make_block_table()
                return self.table

            def make_scheduler_side(self) -> SchedulerConnector:
                side: SchedulerConnector = super().make_scheduler_side()
                if self.kind == "pull":
                    _end_generations(side, self.table, switch)
                else:
                    _confuse_tickets(side, switch)
                return side

        return Refused


def without_own(options: Mapping[str, str]) -> dict[str, str]:
    """The options of the connector that is meant."""
    return {name: text for name, text in options.items() if name not in (OF, SWITCH)}


def _end_generations(side: Any, table: Any, switch: str) -> None:
    """A pull: the blocks of a hand-off are of another generation at once, as if they had been used for others."""
    finish = side.request_finished

    def request_finished(request: Any, block_tables: Any) -> Any:
        decision = finish(request, block_tables)
        if decision.payload and os.path.exists(switch):
            table.reuse_all([block for block in block_tables[0] if block >= 0])
        return decision

    side.request_finished = request_finished


def _confuse_tickets(side: Any, switch: str) -> None:
    """A push: what is sent is sent for a transfer that its receiver has never heard of."""
    build = side.build_connector_meta

    def build_connector_meta(view: Any) -> Any:
        meta = build(view)
        if meta.sends and os.path.exists(switch):
            replace = msgspec.structs.replace
            meta.sends = [replace(s, ticket=replace(s.ticket, transfer_id="nobody's")) for s in meta.sends]
        return meta

    side.build_connector_meta = build_connector_meta
