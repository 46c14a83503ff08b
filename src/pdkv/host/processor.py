"""What this host's processor can do, by its flags in /proc/cpuinfo."""

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # x86's, x86's, ARM's
_NAMED = (*_BFLOAT16, "avx512f", "avx2", "asimd")
"""From what computes most at once to what does least."""


@cache
def flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Of the first processor; none where there is no such file."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())


def instruction_set(cpuinfo: Path = CPUINFO) -> str:
    """What figures depend on most, such as "avx512_bf16"; "unknown" where nobody says."""
    return next((name for name in _NAMED if name in flags(cpuinfo)), "unknown")


def emulates_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether products of bfloat16 are known to be made by other instructions. False where nobody says."""
    known = flags(cpuinfo)
    return bool(known) and known.isdisjoint(_BFLOAT16)
