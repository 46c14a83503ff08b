"""Receives one engine's heartbeats in the router."""

import asyncio
from collections.abc import Callable

import zmq

from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.frames import decode_message
from pdkv.wire.messages import Beat

_MAX_BEAT_BYTES = 64 * 1024
_MAX_UNREAD_BEATS = 16
_CONNECT_TIMEOUT_MS = 2000  # between hosts; the kernel's own timeout is minutes


def beats_endpoint(endpoint: str, told: str) -> str:
    """The endpoint of an engine's beats, for a router that reaches the engine at `endpoint`.

    An engine on another host may have given any address of that host: only the port counts.
    """
    if not told.startswith("tcp://"):
        return told
    return f"{endpoint.rpartition(':')[0]}:{told.rpartition(':')[2]}"


class BeatReader:
    """Passes on the Beats of one incarnation of an engine until closed. Lives in one event loop."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        epoch: str,
        on_beat: Callable[[Beat], None],
        key: ClusterKey | None = None,
    ) -> None:
        """Raises zmq.ZMQError or OSError if the endpoint is not valid or no descriptor is left."""
        self.num_dropped = 0  # frames that are not Beats of that incarnation
        self._epoch = epoch
        self._on_beat = on_beat
        self._loop = asyncio.get_running_loop()
        self._socket = socket = context.socket(zmq.SUB)
        try:
            socket.linger = 0
            socket.set_hwm(_MAX_UNREAD_BEATS)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BEAT_BYTES)
            socket.subscribe(b"")
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
            if key is not None:
                key.present(socket)
            socket.connect(endpoint)
            self._fd = socket.fileno()
            self._loop.add_reader(self._fd, self._read)
        except (zmq.ZMQError, OSError):
            socket.close(linger=0)
            raise
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop: no more beats arrive. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _read(self) -> None:
        """Read everything available, since ZeroMQ signals only changes of state."""
        while not self._socket.closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            beat = decode_message(parts[0])
            if isinstance(beat, Beat) and beat.epoch == self._epoch:
                self._on_beat(beat)
            else:
                self.num_dropped += 1
