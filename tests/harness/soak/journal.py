"""What happened in one run: events, how requests ended, and what must not have been."""

import time
from collections import Counter
from dataclasses import dataclass, field

from deployments import Running


@dataclass
class Journal:
    """Filled by everyone who takes part; lives in one event loop."""

    started: float = field(default_factory=time.monotonic)
    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    patient: Counter[str] = field(default_factory=Counter)  # outcomes of those that were read to their end
    worst_s: float = 0.0  # of all requests that were read to their end
    router_deaths: list[float] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)  # pids

    @property
    def elapsed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.started

    def note(self, text: str) -> None:
        """One more line, with its time."""
        self.lines.append(f"{self.elapsed_s:8.2f}  {text}")

    def violation(self, text: str) -> None:
        """Something that must not be."""
        self.violations.append(f"at {self.elapsed_s:.1f} s: {text}")
        self.note(f"VIOLATION: {text}")

    def text(self, deployment: Running) -> str:
        """All of it with the deployment's log, to find a cause in."""
        return "\n".join([*self.lines, "", f"--- stderr of pid {deployment.process.pid}", *deployment.lines, ""])
