"""A connector whose prefill engines have their peers refuse their hand-offs while a file exists.

`--connector refusing:Refusing --connector-config of=NAME switch=PATH …` is the connector NAME otherwise. Nothing is
pretended on decode: what is refused there is refused by the connector's own checks, over its own transport.
"""

from pathlib import Path
from typing import Any

import msgspec
from spoiled import Spoiled


class Refusing(Spoiled):
    """Its peers refuse what it sends."""

    @staticmethod
    def spoil(kind: str, table: Any, side: Any, switch: Path) -> None:
        """As the transfers of its kind can be refused."""
        if kind == "pull":
            _end_generations(side, table, switch)
        else:
            _confuse_tickets(side, switch)


def _end_generations(side: Any, table: Any, switch: Path) -> None:
    """A pull: the blocks of a hand-off are of another generation at once, as if they had been used for others."""
    finish = side.request_finished

    def request_finished(request: Any, block_tables: Any) -> Any:
        decision = finish(request, block_tables)
        if decision.payload and switch.exists():
            table.reuse_all([block for block in block_tables[0] if block >= 0])
        return decision

    side.request_finished = request_finished


def _confuse_tickets(side: Any, switch: Path) -> None:
    """A push: what is sent is sent for a transfer that its receiver has never heard of."""
    build = side.build_connector_meta

    def build_connector_meta(view: Any) -> Any:
        meta = build(view)
        if meta.sends and switch.exists():
            replace = msgspec.structs.replace
            meta.sends = [replace(s, ticket=replace(s.ticket, transfer_id="nobody's")) for s in meta.sends]
        return meta

    side.build_connector_meta = build_connector_meta
