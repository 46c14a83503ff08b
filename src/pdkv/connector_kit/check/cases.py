"""Cases: named functions that raise Violation if the connector breaks a contract."""

from collections.abc import Callable
from dataclasses import dataclass

from pdkv.connector_kit.rig.world import Setting

Run = Callable[[Setting], None]


@dataclass(frozen=True)
class Case:
    """A test case. `covers`: rows of docs/field-failures.md. `run` raises Violation, NotApplicable or Refused."""

    name: str
    run: Run
    covers: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first line of the docstring: what the case proves."""
        return (self.run.__doc__ or "").partition("\n")[0].strip()


CASES: dict[str, Case] = {}
"""The order of modules: from basic cases to slow ones."""


def case(name: str, *, covers: str = "") -> Callable[[Run], Run]:
    """Register a case."""

    def register(run: Run) -> Run:
        assert name not in CASES, name
        CASES[name] = Case(name, run, tuple(covers.split()))
        return run

    return register
