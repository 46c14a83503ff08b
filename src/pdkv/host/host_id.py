"""The identity of this host, so that two processes can tell whether they run on the same one."""

import os
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """The boot's id and the namespace of process ids: the same for all processes that can reach each other's memory.

    Containers that do not see each other's processes are different hosts, although one kernel runs them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
