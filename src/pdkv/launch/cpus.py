"""Assigns CPUs and threads to engines."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdkv.base.options import parse_numbers
from pdkv.errors import ConfigError

_SPIN_ROUNDS = 20_000
"""Seconds that idle threads spin: longer than from one operation of a step to the next, but soon over."""

_NODES = Path("/sys/devices/system/node")

AUTO = "auto"
"""--cpu-bind: each engine of a launch has the CPUs of one NUMA node, and with them its memory."""


def available_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def default_threads(num_ranks: int) -> int:
    """Default threads per rank: the CPUs divided among the ranks, at least one."""
    return max(1, available_cpus() // num_ranks)


def spin_rounds(threads_per_rank: Sequence[int]) -> int:
    """Rounds that an idle OpenMP thread looks for work before it sleeps, GOMP_SPINCOUNT.

    Waking it costs as much as a small operation, so it spins for a while if each computing thread has its own CPU. If
    several threads share a CPU, a spinning one would keep the others from computing.
    """
    return _SPIN_ROUNDS if sum(threads_per_rank) <= available_cpus() else 0


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list such as "0-1" or "0,2".

    Raises:
        ConfigError: malformed, empty, or a CPU that this process may not use.
    """
    cpus = frozenset(parse_numbers("cpu_bind", text))
    missing = cpus - os.sched_getaffinity(0)
    if missing:
        usable = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"cpu_bind: CPU {min(missing)} cannot be used here (usable: {usable}), got {text!r}")
    return cpus


def numa_node(index: int, nodes: Path = _NODES) -> frozenset[int] | None:
    """The CPUs of the NUMA node that engine number `index` of a launch has, the nodes taken in turn.

    None: this process may use the CPUs of one node only, or the kernel names no nodes.
    """
    usable = os.sched_getaffinity(0)
    found = [cpus for of_node in _cpus_of_nodes(nodes).values() if (cpus := usable & of_node)]
    return frozenset(found[index % len(found)]) if len(found) > 1 else None


def nodes_of(cpus: Iterable[int] | None) -> str:
    """The NUMA nodes that have these CPUs, such as "0" or "0,1"; "": there is one, or all CPUs are meant."""
    nodes = _cpus_of_nodes(_NODES)
    if cpus is None or len(nodes) < 2:
        return ""
    return ",".join(name for name, of_node in nodes.items() if not of_node.isdisjoint(cpus))


def _cpus_of_nodes(folder: Path) -> dict[str, set[int]]:
    """The CPUs of each NUMA node that has any, by its number."""
    texts = {path.parent.name[4:]: path.read_text().strip() for path in sorted(folder.glob("node[0-9]*/cpulist"))}
    return {name: set(parse_numbers("cpulist", text)) for name, text in texts.items() if text}


def split_cpu_bind(text: str | None, num_engines: int) -> list[frozenset[int] | None]:
    """The CPUs of each of `num_engines` engines from --cpu-bind: one list for all, or one per engine separated by |.

    Raises:
        ConfigError: another number of lists, or a malformed one.
    """
    if text is None:
        return [None] * num_engines
    lists = [parse_cpu_list(part) for part in text.split("|")]
    if len(lists) == 1:
        return list(lists * num_engines)
    if len(lists) != num_engines:
        raise ConfigError(f"cpu_bind: one CPU list or {num_engines} separated by | were expected, got {text!r}")
    return list(lists)
