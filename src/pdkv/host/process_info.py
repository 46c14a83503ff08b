"""Facts about a process from /proc."""

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
