"""A connector whose decode engine is killed in the step of a certain token, once.

`--connector dying:Dying --connector-config of=NAME switch=PATH …` is the connector NAME otherwise. The file at PATH
says how many tokens of a request have been computed when its next step is the engine's last one.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refusing import OF, SWITCH, without_own

from pdkv.connectors.base import KVConnector, Observed, SchedulerConnector, Shown
from pdkv.connectors.registry import load_connector


class Dying(KVConnector):
    """Stands for the class that its options choose: see `for_options`."""

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
        """A subclass of the connector that is meant."""
        switch = Path(options[SWITCH])
        chosen = load_connector(options[OF]).for_options(without_own(options))

        class Mortal(chosen):  # type: ignore[misc, valid-type]
            @classmethod
            def parse_options(cls, options: Mapping[str, str]) -> Any:
                return super().parse_options(without_own(options))

            @classmethod
            def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
                return cls

            def make_scheduler_side(self) -> SchedulerConnector:
                side: SchedulerConnector = super().make_scheduler_side()
                _die_at(side, switch)
                return side

        return Mortal


def _die_at(side: Any, switch: Path) -> None:
    build = side.build_connector_meta
    side.observes = side.observes | Observed(Shown.ALL, Shown.NONE, waiting_keys=False)

    def build_connector_meta(view: Any) -> Any:
        at = int(switch.read_text()) if switch.exists() else -1
        if any(s.request.kv != "handoff" and s.start == at for s in view.scheduled):
            switch.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return build(view)

    side.build_connector_meta = build_connector_meta
