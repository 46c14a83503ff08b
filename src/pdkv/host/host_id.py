"""The identity of this host, so that two processes can tell whether they run on the same one."""

from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """The boot's id: the same for all processes of a host, and for no other host's."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
