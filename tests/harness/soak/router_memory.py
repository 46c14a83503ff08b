"""The router's resident memory over a run, and whether it stays flat."""

from typing import NamedTuple

WARM_UP = 2
"""First rests that are not judged: code is imported, pools and histories fill."""

MIN_RESTS = 6
"""With fewer rests of one router nothing is said."""

MAX_GROWTH = 0.03
"""Of what it had after the warm-up."""

_MIB = 1 << 20


class Sample(NamedTuple):
    """Of one moment at rest."""

    at_s: float
    pid: int
    resident: int  # bytes


class Verdict(NamedTuple):
    """Of one router over its rests behind the warm-up: a straight line through them (least squares)."""

    num_rests: int
    minutes: float
    first_mib: float
    last_mib: float
    growth_mib: float  # of the line, from its first moment to its last
    is_flat: bool

    def __str__(self) -> str:
        return (
            f"{self.first_mib:.1f} → {self.last_mib:.1f} MiB at {self.num_rests} rests in {self.minutes:.1f} minutes, "
            f"{self.growth_mib:+.2f} MiB by the straight line through them"
        )


def judge_memory(samples: list[Sample]) -> Verdict | None:
    """Of the router that is there at the end; None: it was not at rest often enough."""
    own = [sample for sample in samples if sample.pid == samples[-1].pid][WARM_UP:] if samples else []
    if len(own) < MIN_RESTS:
        return None
    mean_at = sum(sample.at_s for sample in own) / len(own)
    mean = sum(sample.resident for sample in own) / len(own)
    spread = sum((sample.at_s - mean_at) ** 2 for sample in own)
    slope = sum((sample.at_s - mean_at) * (sample.resident - mean) for sample in own) / spread
    seconds = own[-1].at_s - own[0].at_s
    growth = slope * seconds
    return Verdict(
        len(own), round(seconds / 60, 2), round(own[0].resident / _MIB, 2), round(own[-1].resident / _MIB, 2),
        round(growth / _MIB, 2), growth <= MAX_GROWTH * own[0].resident,
    )  # fmt: skip
