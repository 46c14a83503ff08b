"""Cases: named functions that raise Violation if the connector breaks a contract."""

from collections.abc import Callable
from dataclasses import dataclass

from pdkv.connector_kit.rig.world import Setting

Run = Callable[[Setting], None]


@dataclass(frozen=True)
class Case:
    """`covers`: rows of the field's failures. `run` raises Violation, NotApplicable or Refused."""

    name: str
    run: Run
    covers: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first line of the docstring: what it proves."""
        return (self.run.__doc__ or "").partition("\n")[0].strip()


CASES: dict[str, Case] = {}
"""In the order in which they run: from what everything else needs to what takes long."""


def case(name: str, *, covers: str = "") -> Callable[[Run], Run]:
    """Register a case."""

    def register(run: Run) -> Run:
        assert name not in CASES, name
        CASES[name] = Case(name, run, tuple(covers.split()))
        return run

    return register
