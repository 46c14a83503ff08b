"""What can happen, to whom, and when: the cells of the matrix."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from matrix_rows import HAVE_CONNECTIONS

Kind = Literal["kill", "stop", "cut", "cut transfer", "refused transfer", "full pool", "stop, 1.5 s limit"]
Moment = Literal["on prefill", "in transfer", "mid-stream"]


class Place(NamedTuple):
    """An engine's role, and what at least one request is doing there when it happens."""

    role: str
    moment: Moment

    def __str__(self) -> str:
        return f"{self.role}, {self.moment}"


ON_PREFILL = Place("prefill", "on prefill")
SOURCE = Place("prefill", "in transfer")
TARGET = Place("decode", "in transfer")
MID_STREAM = Place("decode", "mid-stream")
PLACES = (ON_PREFILL, SOURCE, TARGET, MID_STREAM)

KINDS: Mapping[Kind, Sequence[Place]] = {
    "kill": PLACES,
    "stop": PLACES,
    "cut": PLACES,
    "cut transfer": (SOURCE, TARGET),
    "refused transfer": (SOURCE,),
    "full pool": (ON_PREFILL, MID_STREAM),
    "stop, 1.5 s limit": (ON_PREFILL, MID_STREAM),
}
"""kill -9; SIGSTOP; the connections to the router cut, or those that KV travels on; the peer refuses each hand-off;
more requests than the KV pool holds; SIGSTOP for the rest of the load, whose clients wait for 1.5 s each."""

USUAL = ("shared_memory", "p2p", "nixl pull", "nixl push", "store redis")
"""One of each way in which KV travels."""

CAN_REFUSE = USUAL

LIMITED: Kind = "stop, 1.5 s limit"


class Cell(NamedTuple):
    """One fault at one place over one backend."""

    backend: str
    kind: Kind
    place: Place
    number: int = 0  # of the engine; they take turns, for one that dies often gets few requests

    def __str__(self) -> str:
        return f"{self.backend}: {self.kind}, {self.place}"

    @property
    def engine(self) -> str:
        """To which it happens."""
        return f"{self.place.role}-{self.number}"

    @property
    def build(self) -> "Build":
        """The deployment that it needs."""
        return Build(self.kind == "refused transfer", self.place.role if self.kind == "full pool" else "")


class Build(NamedTuple):
    """What is special about a deployment."""

    refusing: bool = False  # its hand-offs can be refused (connector/refusing.py)
    small: str = ""  # whose engines' KV pools hold little more than one request


def cells_of(backend: str, kinds: Sequence[Kind] = tuple(KINDS)) -> list[Cell]:
    """All that can happen over a backend; cells of one deployment stand together."""
    cells = [Cell(backend, kind, place) for kind in kinds for place in KINDS[kind] if _can_be(backend, kind)]
    return sorted((cell._replace(number=i % 2) for i, cell in enumerate(cells)), key=lambda cell: cell.build)


def _can_be(backend: str, kind: Kind) -> bool:
    if kind == "cut transfer":
        return backend in HAVE_CONNECTIONS
    return kind != "refused transfer" or backend in CAN_REFUSE


def cover(backends: Sequence[str]) -> list[Cell]:
    """Each fault over each backend once, at places in turn: every pair of backend, fault and moment that can be."""
    chosen: list[Cell] = []
    for number, backend in enumerate(backends):
        for turn, kind in enumerate(KINDS):
            if kind != LIMITED and _can_be(backend, kind):
                places = KINDS[kind]
                chosen.append(Cell(backend, kind, places[(number + turn) % len(places)], (number + turn) % 2))
    return chosen
