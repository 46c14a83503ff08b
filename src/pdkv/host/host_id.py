"""The identity of this host, so that two processes can tell whether they run on the same one."""

import os
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """The boot's id and the namespace of process ids: equal for all processes that can reach one another's memory.

    Containers that do not see each other's processes count as different hosts, although one kernel runs them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
