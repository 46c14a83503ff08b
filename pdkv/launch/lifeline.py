"""The lifeline: a pipe whose writer is the launcher. A child that reads its end knows that the launcher is gone."""

import os
import select
import threading
from collections.abc import Callable

EXIT_LAUNCHER_GONE = 70
"""Exit status of a child that could not stop by itself after the launcher's death."""


def watch_lifeline(fd: int, on_lost: Callable[[], None], *, grace_s: float) -> None:
    """Call `on_lost` when the launcher is gone and end the process `grace_s` later, whatever it is doing then.

    A thread of its own, so that a process that is stuck in a long step goes too. `on_lost` runs in that thread.
    """

    def watch() -> None:
        # Nobody writes, so readiness is end of file. A read would not do: another child's event loop may have made
        # the pipe, which all share, non-blocking.
        lost = select.poll()
        lost.register(fd, select.POLLIN)
        lost.poll()
        on_lost()
        # Daemon threads end with the process: if the main thread stops in time, this wait is never over.
        select.select([], [], [], grace_s)
        os._exit(EXIT_LAUNCHER_GONE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
