"""The lifeline: a pipe with the launcher as its only writer. A child that reads it notices that the launcher is
gone.
"""

import os
import select
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from pdkv.host.linux import die_with_parent

EXIT_LAUNCHER_GONE = 70
"""Exit status of a child that could not stop by itself after the launcher's death."""


def watch_lifeline(fd: int, on_lost: Callable[[], None], *, grace_s: float, run_dir: Path | None = None) -> None:
    """Call `on_lost` when the launcher is gone and end the process `grace_s` later, whatever it is doing then.

    A separate thread does this, so that a process stuck in a long step ends, too. `on_lost` runs on that thread. A
    process that is stopped when the launcher dies is continued by the kernel, and ends like the others.
    """
    die_with_parent(signal.SIGCONT)

    def watch() -> None:
        # Nothing is written, so readiness is end of file. A read would not do: another child's event loop may have made
        # the pipe, which all share, non-blocking.
        lost = select.poll()
        lost.register(fd, select.POLLIN)
        lost.poll()
        on_lost()
        # Daemon threads end with the process: if the main thread stops in time, this wait never ends.
        select.select([], [], [], grace_s)
        sweep_if_orphaned(fd, run_dir)
        os._exit(EXIT_LAUNCHER_GONE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def sweep_if_orphaned(lifeline_fd: int, run_dir: Path | None) -> None:
    """At a child's end: delete the launch's directory if its owner, the launcher, is gone.

    All children try, since any of them may have been killed; if all were, the next launch does it.
    """
    lost = select.poll()
    lost.register(lifeline_fd, select.POLLIN)
    if run_dir is not None and lost.poll(0):
        shutil.rmtree(run_dir, ignore_errors=True)
