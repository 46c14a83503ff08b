"""A torch.distributed store of two, by whose keys a group's ends find each other: over the link that they have.

Not torch's TCPStore: a tenth of the clients that connect to one at the same time wait for its answer in vain (seen with
torch 2.13), it needs another port, and whoever finds that may write into it.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from pdkv.connectors.p2p.wire import Control, Put
from pdkv.errors import TransferError, TransferTimeout


class LinkStore(Store):
    """One end's view: what it sets, and what the peer has. For the thread that makes the group, until `deadline`."""

    def __init__(self, control: Control, deadline: float) -> None:
        super().__init__()
        self._control = control
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self.failure: TransferError | None = None  # what C++ has made a RuntimeError of

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value and tell the peer."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._control.send(Put(key, self._values[key]), self._remaining_s())

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        while key not in self._values:
            self._take()
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are here by now."""
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The link's own deadline counts."""

    def _take(self) -> None:
        try:
            frame = self._control.expect(self._remaining_s())
            if not isinstance(frame, Put):
                raise TransferError(f"{type(frame).__name__} while a group is made")
        except TransferError as error:
            self.failure = error
            raise
        self._values[frame.key] = frame.value

    def _remaining_s(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            self.failure = TransferTimeout("the other end of a group did not come in time")
            raise self.failure
        return remaining
