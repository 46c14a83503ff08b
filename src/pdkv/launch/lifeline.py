"""The lifeline: a pipe whose writer is the launcher. A child that reads its end knows that the launcher is gone."""

import os
import select
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from pdkv.host.linux import continue_when_orphaned

EXIT_LAUNCHER_GONE = 70
"""Exit status of a child that could not stop by itself after the launcher's death."""


def watch_lifeline(fd: int, on_lost: Callable[[], None], *, grace_s: float, run_dir: Path | None = None) -> None:
    """Call `on_lost` when the launcher is gone and end the process `grace_s` later, whatever it is doing then.

    A thread of its own, so that a process that is stuck in a long step goes too. `on_lost` runs in that thread. A
    process that is stopped when the launcher dies is continued by the kernel, and goes as the others do.
    """
    continue_when_orphaned()

    def watch() -> None:
        # Nobody writes, so readiness is end of file. A read would not do: another child's event loop may have made
        # the pipe, which all share, non-blocking.
        lost = select.poll()
        lost.register(fd, select.POLLIN)
        lost.poll()
        on_lost()
        # Daemon threads end with the process: if the main thread stops in time, this wait is never over.
        select.select([], [], [], grace_s)
        sweep_if_orphaned(fd, run_dir)
        os._exit(EXIT_LAUNCHER_GONE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def sweep_if_orphaned(lifeline_fd: int, run_dir: Path | None) -> None:
    """At a child's end: delete the launch's directory if the launcher, whose it is, is gone.

    All children try, since any of them may have been killed; where all were, the next launch does it.
    """
    lost = select.poll()
    lost.register(lifeline_fd, select.POLLIN)
    if run_dir is not None and lost.poll(0):
        shutil.rmtree(run_dir, ignore_errors=True)
