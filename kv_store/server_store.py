"""Common to stores with a server: connections, and batches of commands on one of them."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.kv_store.base import TellingStore
from pdkv.kv_store.connections import Channel, ConnectionPool, Deadline
from pdkv.kv_store.options import BYTES_IN_FLIGHT, StoreOptions
from pdkv.kv_store.pipeline import ByteBudget, Command, run_pipeline

Receive = Callable[[Channel, int], None]
"""Reads the reply to the command of that index."""


class ServerStore(TellingStore):
    """Commands of a batch are pipelined within `pipeline` and, over all calls, `max_bytes_in_flight`."""

    def __init__(self, what: str, options: StoreOptions | None, clock: Clock = MONOTONIC) -> None:
        """`what` names the server in messages. Connects on first use."""
        self.what = what
        self.options = options or StoreOptions()
        self.clock = clock
        self._budget = ByteBudget(self.options.max_bytes_in_flight or BYTES_IN_FLIGHT)
        self._pool = ConnectionPool(
            lambda deadline: self.connect(min(self.options.connect_timeout_s, deadline.remaining())), what
        )

    def close(self) -> None:
        self._pool.close()

    def hang_up(self, *, for_good: bool = False) -> None:
        (self._pool.close if for_good else self._pool.hang_up)()

    @abstractmethod
    def connect(self, timeout_s: float) -> Channel:
        """A new connection.

        Raises:
            StoreTimeout: there is none within `timeout_s`.
            StoreUnavailable: it was refused.
        """

    def _deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self.options.operation_timeout_s, self.what, self.clock)

    def _run(self, commands: Sequence[Command], receive: Receive, deadline: Deadline) -> None:
        """Send a batch and read its replies. It may run twice, when the first connection turns out to be lost."""
        if not commands:
            return

        def operation(channel: Channel) -> None:
            run_pipeline(
                channel,
                commands,
                lambda index: receive(channel, index),
                budget=self._budget,
                max_commands=self.options.pipeline,
            )

        self._pool.run(operation, deadline)
