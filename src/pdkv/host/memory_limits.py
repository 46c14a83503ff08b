"""How much host memory can be allocated, and whether the kernel killed a process for lack of it. Imports no torch.

Read from /proc/meminfo, /proc/vmstat and the cgroups.

`posix_fallocate` of a KV pool that does not fit does not fail: it takes the machine's memory until the kernel kills a
process. So every pool is compared with the available memory before a byte of it is allocated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdkv.errors import ConfigError

RESERVE_FRACTION = 0.03
MAX_RESERVE_BYTES = 1 << 30
"""Memory left for everything else: 3 % of what is available, at most 1 GiB."""

LEAST_POOL_BYTES = 256 << 20
"""KV pool, at least, of an engine that computes on the CPU and was told no size."""

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page below 2^63


class MemoryBound(NamedTuple):
    """The tightest limit on what a process may still allocate."""

    available_bytes: int
    source: str  # such as "MemAvailable", or the cgroup's limit file

    @property
    def usable_bytes(self) -> int:
        """Bytes that may be used: `available_bytes` less the reserve."""
        return self.available_bytes - min(int(self.available_bytes * RESERVE_FRACTION), MAX_RESERVE_BYTES)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> MemoryBound | None:
    """The least of MemAvailable and the rest of each cgroup of this process; None if neither can be read."""
    bounds = [*_meminfo(proc), *_cgroup_bounds(proc, cgroups)]
    return min(bounds, default=None)


def check_host_memory(num_bytes: int, what: str) -> None:
    """Refuse an allocation for which the host has too little memory.

    Args:
        what: the purpose of the bytes and the option to reduce them, such as "2 KV pools of 1 GiB (--kv-cache-memory)".

    Raises:
        ConfigError: `num_bytes` exceed the usable memory; names both.
    """
    bound = available_memory()
    if bound is not None and num_bytes > bound.usable_bytes:
        raise ConfigError(
            f"{what} need {format_bytes(num_bytes)} of host memory, but only {format_bytes(bound.usable_bytes)} can "
            f"be used ({bound.source}: {format_bytes(bound.available_bytes)} available)"
        )


def share_for_pools(num_pools: int, num_taken_bytes: int) -> int:
    """Bytes for each of `num_pools` KV pools without a configured size: together a quarter of the memory that is
    available and not taken by others.
    """
    bound = available_memory()
    usable_bytes = 0 if bound is None else bound.usable_bytes - num_taken_bytes
    return max(usable_bytes // 4 // num_pools, LEAST_POOL_BYTES)


def format_bytes(num_bytes: int) -> str:
    """A number of bytes for people, such as "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def num_oom_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """Number of processes that the kernel has killed for lack of memory: in this process's cgroup or, if that has no
    count, on the whole machine since boot; None if neither is known.
    """
    files = [*((directory / of.events) for directory, of in _memory_cgroups(proc, cgroups)), proc / "vmstat"]
    counts = (_read_stat(file, "oom_kill") for file in files)
    return next((count for count in counts if count is not None), None)


def _meminfo(proc: Path) -> Iterator[MemoryBound]:
    if (kilobytes := _read_stat(proc / "meminfo", "MemAvailable:")) is not None:
        yield MemoryBound(kilobytes * 1024, "MemAvailable")


class _Files(NamedTuple):
    """What files of a memory cgroup, or lines in them, are called."""

    limit: str
    usage: str
    cache: str  # that can be dropped, in memory.stat
    events: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """This process' memory cgroup and its ancestors, some of which may not be visible."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        root, files = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), files


def _cgroup_bounds(proc: Path, cgroups: Path) -> Iterator[MemoryBound]:
    """What is left of each limit; page cache that can be dropped counts as free."""
    for directory, files in _memory_cgroups(proc, cgroups):
        allowed, used = _read_number(directory / files.limit), _read_number(directory / files.usage)
        if allowed is None or used is None or allowed >= _NO_LIMIT_BYTES:
            continue
        free = allowed - used + (_read_stat(directory / "memory.stat", files.cache) or 0)
        yield MemoryBound(max(free, 0), str(directory / files.limit))


def _read_number(path: Path) -> int | None:
    """The number in a file of a cgroup; None if there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int | None:
    """The number behind a name, each of which has a line; None: there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
