"""Facts about a process from /proc."""

from pathlib import Path


def process_start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, None if there is no such process (a zombie counts as none).

    With it a pid names one process: another one that gets the number later has another start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])
