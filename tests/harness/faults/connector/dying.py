"""A connector whose decode engine is killed in the step of a certain token, once.

`--connector dying:Dying --connector-config of=NAME switch=PATH …` is the connector NAME otherwise. The file at PATH
says how many tokens of a request have been computed when its next step is the engine's last one.
"""

import os
import signal
from pathlib import Path
from typing import Any

from spoiled import Spoiled

from pdkv.connectors.base import Observed, Shown


class Dying(Spoiled):
    """Ends its process."""

    @staticmethod
    def spoil(kind: str, table: Any, side: Any, switch: Path) -> None:
        """Kill the process in the step that the file says."""
        build = side.build_connector_meta
        side.observes = side.observes | Observed(Shown.ALL, Shown.NONE, waiting_keys=False)

        def build_connector_meta(view: Any) -> Any:
            at = int(switch.read_text()) if switch.exists() else -1
            if any(s.request.kv != "handoff" and s.start == at for s in view.scheduled):
                switch.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return build(view)

        side.build_connector_meta = build_connector_meta
