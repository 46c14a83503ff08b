"""The network of the `memory` connector: operations between engines of one process, delivered in any order.

By default a fabric delivers in order, when a worker asks for results. With `manual=True` its owner delivers, delays,
reorders, loses and duplicates operations one stage at a time: the reference for every contract of base.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.block_table import BlockTable
from pdkv.errors import PeerGone, StaleEpoch

Content = Any
"""Whole blocks copied out of a pool, (num_blocks, num_layers, ...); a numpy array or a torch tensor."""


class Endpoint(Protocol):
    """One incarnation of an engine on the fabric."""

    engine: str
    epoch: str
    pool: Content
    table: BlockTable


class Operation(ABC):
    """A pending operation. Each delivery runs one stage; it stays pending while a stage remains."""

    @abstractmethod
    def deliver(self) -> "Operation | None":
        """Run the next stage; returns the operation that is pending then."""


class MemoryFabric:
    """Endpoints and pending operations. One thread at a time."""

    _named: ClassVar[dict[str, "MemoryFabric"]] = {}

    def __init__(self, *, manual: bool = False, clock: Callable[[], float] = MONOTONIC.now) -> None:
        self.manual = manual
        self.clock = clock
        self.under_way: list[Operation] = []
        self.num_refused = 0  # landings whose transfer had ended
        self.num_losses_due = 0  # number of data operations still to be lost
        self._endpoints: dict[str, Endpoint] = {}

    @classmethod
    def named(cls, name: str) -> "MemoryFabric":
        """The process-wide fabric of that name."""
        return cls._named.setdefault(name, cls())

    @classmethod
    def bind(cls, name: str, fabric: "MemoryFabric") -> None:
        """Let `named(name)` return this fabric."""
        cls._named[name] = fabric

    @classmethod
    def unbind(cls, name: str) -> None:
        """Forget a named fabric."""
        cls._named.pop(name, None)

    def register(self, endpoint: Endpoint) -> None:
        """Add an engine; a new epoch replaces its predecessor."""
        self._endpoints[endpoint.engine] = endpoint

    def unregister(self, endpoint: Endpoint) -> None:
        """Remove an engine. Idempotent."""
        if self._endpoints.get(endpoint.engine) is endpoint:
            del self._endpoints[endpoint.engine]

    def endpoint(self, engine: str, epoch: str) -> Endpoint:
        """The live incarnation.

        Raises:
            PeerGone: no engine has that name.
            StaleEpoch: another incarnation has it.
        """
        endpoint = self._endpoints.get(engine)
        if endpoint is None:
            raise PeerGone(f"engine {engine!r} is not on the fabric")
        if endpoint.epoch != epoch:
            raise StaleEpoch(f"engine {engine!r} is now in epoch {endpoint.epoch}, not {epoch}")
        return endpoint

    def post(self, operation: Operation) -> None:
        """Add a pending operation."""
        if self.num_losses_due and hasattr(operation, "content"):
            self.num_losses_due -= 1
            return
        self.under_way.append(operation)

    def deliver(self, index: int = 0) -> None:
        """Run the next stage of the operation at `index`."""
        remaining = self.under_way.pop(index).deliver()
        if remaining is not None:
            self.under_way.append(remaining)

    def lose(self, index: int) -> None:
        """Drop the operation at `index`."""
        del self.under_way[index]

    def pump(self) -> None:
        """Deliver everything, in order, unless the owner does that."""
        while self.under_way and not self.manual:
            self.deliver(0)


def copy_out(pool: Content, block_ids: Sequence[int]) -> Content:
    """A private copy of whole blocks, (len(block_ids), num_layers, ...)."""
    return pool[list(block_ids)]


def copy_in(pool: Content, block_ids: Sequence[int], content: Content) -> None:
    """Write whole blocks."""
    pool[list(block_ids)] = content
