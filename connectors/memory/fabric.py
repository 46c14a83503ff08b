"""The network of the `memory` connector: operations between engines of one process, delivered in any order.

By itself a fabric delivers in order, when a worker asks for results. With `manual=True` its owner delivers, delays,
reorders, loses and duplicates operations one stage at a time: the reference for every contract of base.py.
"""

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import xxhash

from pdkv.connectors.base import TransferKey
from pdkv.connectors.block_table import BlockTable
from pdkv.errors import PeerGone, StaleEpoch

Content = Any
"""Whole blocks copied out of a pool, (num_blocks, num_layers, ...); a numpy array or a torch tensor."""

StoreName = bytes | TransferKey
"""What a stored block is found by: its last hash-block key, or, for a partial tail, its transfer."""


class Endpoint(Protocol):
    """One incarnation of an engine on the fabric."""

    engine: str
    epoch: str
    pool: Content
    table: BlockTable


class Operation(ABC):
    """Something under way. Each delivery runs one stage; it stays under way while a stage remains."""

    @abstractmethod
    def deliver(self) -> "Operation | None":
        """Run the next stage; returns what is under way then."""


class StoredBlock(NamedTuple):
    """What lies in the store, and the digest of what was put there under its name."""

    content: Content
    digest: bytes


class MemoryStore:
    """Content-addressed blocks outside every engine, least recently used evicted first."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.num_damaged = 0  # blocks that were not what was put: dropped
        self._blocks: OrderedDict[StoreName, StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: StoreName) -> bool:
        return name in self._blocks

    def get(self, name: StoreName) -> Content | None:
        """The block's content, which counts as a use; None: it is not there, or not what was put under this name."""
        block = self._blocks.get(name)
        if block is None:
            return None
        if block.digest != _digest(name, block.content):
            self.num_damaged += 1
            del self._blocks[name]
            return None
        self._blocks.move_to_end(name)
        return block.content

    def put(self, name: StoreName, content: Content) -> None:
        """Make a completely written block visible."""
        self._blocks[name] = StoredBlock(content, _digest(name, content))
        self._blocks.move_to_end(name)
        while self.capacity is not None and len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def discard(self, name: StoreName) -> None:
        """Drop a block, if it is there."""
        self._blocks.pop(name, None)


def _digest(name: StoreName, content: Content) -> bytes:
    """Of a block under its name, its bytes and their shape."""
    array = content
    if not isinstance(array, np.ndarray):
        import torch  # not before there is a tensor

        array = content.contiguous().flatten().view(torch.uint8).cpu().numpy()
    digest = xxhash.xxh3_128(repr((name, tuple(content.shape), str(content.dtype))).encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


class MemoryFabric:
    """Endpoints, operations under way and the shared store. One thread at a time."""

    _named: ClassVar[dict[str, "MemoryFabric"]] = {}

    def __init__(
        self,
        *,
        manual: bool = False,
        clock: Callable[[], float] = time.monotonic,
        store_capacity: int | None = None,
    ) -> None:
        self.manual = manual
        self.clock = clock
        self.store = MemoryStore(store_capacity)
        self.under_way: list[Operation] = []
        self.num_refused = 0  # landings whose transfer had ended
        self.num_losses_due = 0  # the next so many data operations get lost, even those that somebody forces
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
        """An engine joins; a new epoch replaces its predecessor."""
        self._endpoints[endpoint.engine] = endpoint

    def unregister(self, endpoint: Endpoint) -> None:
        """An engine leaves. Idempotent."""
        if self._endpoints.get(endpoint.engine) is endpoint:
            del self._endpoints[endpoint.engine]

    def endpoint(self, engine: str, epoch: str) -> Endpoint:
        """The live incarnation.

        Raises:
            PeerGone: nobody has that name.
            StaleEpoch: another incarnation has.
        """
        endpoint = self._endpoints.get(engine)
        if endpoint is None:
            raise PeerGone(f"engine {engine!r} is not on the fabric")
        if endpoint.epoch != epoch:
            raise StaleEpoch(f"engine {engine!r} is now in epoch {endpoint.epoch}, not {epoch}")
        return endpoint

    def post(self, operation: Operation) -> None:
        """Put an operation under way."""
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
        """The operation at `index` never arrives."""
        del self.under_way[index]

    def force(self, wanted: Callable[[Operation], bool]) -> None:
        """Deliver all stages of the operations that `wanted` accepts: somebody waits for them inside a step."""
        chosen = [operation for operation in self.under_way if wanted(operation)]
        self.under_way = [operation for operation in self.under_way if operation not in chosen]
        for operation in chosen:
            rest: Operation | None = operation
            while rest is not None:
                rest = rest.deliver()

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
