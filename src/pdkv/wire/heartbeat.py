"""An engine's beats: a thread publishes that the process runs, and what its loop is doing."""

import threading

import zmq

from pdkv.base.service_thread import ServiceThread
from pdkv.wire.doorkeeper import Doorkeeper
from pdkv.wire.frames import encode_message
from pdkv.wire.messages import Beat
from pdkv.wire.step_watch import StepWatch, late_after_s

BEAT_S = 0.2
"""Seconds between two beats; one comes earlier when a step becomes late."""

_MAX_UNREAD_BEATS = 16

_MAX_SUBSCRIPTION_BYTES = 4096
"""All messages of a subscriber are shorter, including a handshake."""


class Heartbeat:
    """Publishes Beats at an endpoint until closed. Steps pay nothing: the thread reads when each began and ended."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        epoch: str,
        watch: StepWatch,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """`endpoint`: ipc://, or tcp:// with port 0 for a free one. Raises zmq.ZMQError if it cannot be bound."""
        self._epoch = epoch
        self._watch = watch
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.set_hwm(_MAX_UNREAD_BEATS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        try:
            if doorkeeper is not None:
                doorkeeper.guard(self._socket)
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._thread = ServiceThread(self._run, lambda: None, "heartbeat")
        self._thread.start_or(lambda: self._socket.close(linger=0))

    def close(self) -> None:
        """Stop beating. Idempotent."""
        self._thread.stop()

    def _run(self, stopping: threading.Event) -> None:
        clock, wait_s = self._watch.clock, BEAT_S
        try:
            while not clock.wait(stopping, clock.now() + wait_s):
                beat, wait_s = next_beat(self._watch, self._epoch, clock.now())
                self._socket.send(memoryview(encode_message(beat)), zmq.NOBLOCK)
        finally:
            self._socket.close(linger=0)


def next_beat(watch: StepWatch, epoch: str, now: float) -> tuple[Beat, float]:
    """The next beat, and the seconds after which to send another: at once when current work becomes late."""
    work = watch.oldest
    if work is None:
        return Beat(epoch, 0.0), BEAT_S
    busy_s = max(now - work.since, 0.0)
    late_in_s = late_after_s(work.predicted_s) - busy_s
    return Beat(epoch, busy_s, work.predicted_s), (min(late_in_s + 0.001, BEAT_S) if late_in_s >= 0.0 else BEAT_S)
