"""Connectors with a fault that a file switches on: what `refusing` and `dying` have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdkv.connectors.base import KVConnector, SchedulerConnector
from pdkv.connectors.registry import load_connector

OF, SWITCH = "of", "switch"


class Spoiled(KVConnector):
    """Stands for the class that its options choose: see `for_options`."""

    @staticmethod
    def spoil(connector: Any, side: Any, switch: Path) -> None:
        """Give a scheduler side of the connector its fault."""
        raise NotImplementedError

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
        """A subclass of the connector that is meant."""
        spoil, switch = cls.spoil, Path(options[SWITCH])
        chosen = load_connector(options[OF]).for_options(_without_own(options))

        class Chosen(chosen):  # type: ignore[misc, valid-type]
            @classmethod
            def parse_options(cls, options: Mapping[str, str]) -> Any:
                return super().parse_options(_without_own(options))

            @classmethod
            def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
                return cls

            @classmethod
            def requirements(cls, options: Mapping[str, str]) -> Any:
                return super().requirements(_without_own(options))

            @classmethod
            def probe(cls, options: Mapping[str, str]) -> str:
                return str(super().probe(_without_own(options)))

            @classmethod
            def hit_tokens(cls, options: Mapping[str, str], block_size: int) -> int:
                return int(super().hit_tokens(_without_own(options), block_size))

            def make_block_table(self) -> Any:
                self.table = super().make_block_table()
                return self.table

            def make_scheduler_side(self) -> SchedulerConnector:
                side: SchedulerConnector = super().make_scheduler_side()
                spoil(self, side, switch)
                return side

        return Chosen


def _without_own(options: Mapping[str, str]) -> dict[str, str]:
    """The options of the connector that is meant."""
    return {name: text for name, text in options.items() if name not in (OF, SWITCH)}
