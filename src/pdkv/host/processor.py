"""Capabilities of this host's processor, by its flags in /proc/cpuinfo."""

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # x86's, x86's, ARM's
_NAMED = (*_BFLOAT16, "avx512f", "avx2", "asimd")
"""Instruction sets, from the most capable to the least."""


@cache
def flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Flags of the first processor; empty if /proc/cpuinfo cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())


def instruction_set(cpuinfo: Path = CPUINFO) -> str:
    """The instruction set that affects figures most, such as "avx512_bf16"; "unknown" if it is not reported."""
    return next((name for name in _NAMED if name in flags(cpuinfo)), "unknown")


def emulates_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether bfloat16 products are known to be emulated by other instructions. False if it is not reported."""
    known = flags(cpuinfo)
    return bool(known) and known.isdisjoint(_BFLOAT16)
