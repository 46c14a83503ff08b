"""An engine's beats: a thread publishes that the process runs, and since when its loop has been busy.

A long step is silent on the wire, and so is a process that is stopped. Only the former still beats.
"""

import threading
import time

import zmq

from pdkv.wire.frames import encode_message
from pdkv.wire.messages import Beat

BEAT_S = 0.5
"""Time between two beats."""

_MAX_UNREAD_BEATS = 16


class Heartbeat:
    """Publishes Beats at an endpoint until `close`. `begin` and `end` are the loop's, and cost an assignment."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, epoch: str) -> None:
        """Raises zmq.ZMQError: the endpoint cannot be bound."""
        self._epoch = epoch
        self._busy_since: float | None = None
        self._stop = threading.Event()
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.set_hwm(_MAX_UNREAD_BEATS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """The loop begins to work."""
        self._busy_since = time.monotonic()

    def end(self) -> None:
        """The loop begins to wait."""
        self._busy_since = None

    def close(self) -> None:
        """Stop beating. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(BEAT_S):
                since = self._busy_since
                busy_s = 0.0 if since is None else max(time.monotonic() - since, 0.0)
                self._socket.send(memoryview(encode_message(Beat(self._epoch, busy_s))), zmq.NOBLOCK)
        finally:
            self._socket.close(linger=0)
