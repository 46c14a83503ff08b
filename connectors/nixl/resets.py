"""What a peer is told when messages to it may have got lost: which requests are open."""

import threading
from collections.abc import Callable

from pdkv.connectors.nixl.doorbell import DoorbellAddress
from pdkv.connectors.nixl.wire import RankBlob, Reset, encode
from pdkv.errors import PdkvError, TransferError


class Resets:
    """On this host a message gets lost where a peer leaves its doorbell full. If it said that a slot is free, or that a
    request is over, the peer keeps the slot until it hears a Reset: that is owed then. Thread-safe.

    Args:
        send: as `Doorbell.send`.
        open_requests: those that this rank has at an agent. One is open before its `Gather` is sent.
    """

    def __init__(
        self, send: Callable[[DoorbellAddress, bytes, float], None], open_requests: Callable[[str], list[int]]
    ) -> None:
        self._send = send
        self._open_requests = open_requests
        self._lock = threading.Lock()  # held while a Reset is sent
        self._owed: set[str] = set()  # agents
        self._being_paid: set[str] = set()

    def message(self, agent: str) -> bytes:
        """The Reset for an agent, as of now."""
        return encode(Reset(self._open_requests(agent)))

    def owe(self, blob: RankBlob) -> None:
        """A message to that peer got lost."""
        self._owed.add(blob.agent)

    def owed(self) -> list[str]:
        """Agents that have not heard a Reset since."""
        return list(self._owed)

    def forget(self, agent: str) -> None:
        """It is gone. Idempotent."""
        self._owed.discard(agent)

    def pay(self, blob: RankBlob, timeout_s: float) -> None:
        """Send the Reset that is owed, if one is. Called before each `Gather`: the Reset would end a request that came
        first and that it does not name.

        Raises:
            PdkvError: the peer is gone, or has had no room for so long.
        """
        agent = blob.agent
        if agent not in self._owed and agent not in self._being_paid:
            return
        if not self._lock.acquire(timeout=timeout_s):
            raise TransferError(f"agent {agent} takes no messages")
        try:
            if agent in self._owed:
                self._pay(blob, timeout_s)
        finally:
            self._lock.release()

    def _pay(self, blob: RankBlob, timeout_s: float) -> None:
        self._being_paid.add(blob.agent)
        self._owed.discard(blob.agent)  # what gets lost from here on is owed again
        try:
            self._send(blob.doorbell, self.message(blob.agent), timeout_s)
        except PdkvError:
            self._owed.add(blob.agent)
            raise
        finally:
            self._being_paid.discard(blob.agent)
