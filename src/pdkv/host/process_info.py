"""Facts about a process from the kernel."""

import contextlib
import time
from pathlib import Path


def process_start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if there is no such process (a zombie does not count).

    Together with the pid it identifies a process: another one with the same number has another start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may contain spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def process_name(pid: int) -> str:
    """The name set by `set_process_name`, 15 bytes at most; "" if there is no such process. A zombie has one, too."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process in nanoseconds; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns(~pid << 3 | 2)  # as clock_getcpuclockid(3) numbers the clocks of processes
    return 0
