"""A device over the CPU's memory that computes at once, and says so only some milliseconds later.

So engines launch steps behind others that have not ended, as on a GPU, with no one to wait for them.
"""

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdkv.assemble.engine import RankPlace, run_rank
from pdkv.errors import TransferTimeout
from pdkv.kernels import streams
from pdkv.kernels.streams import Event, Streams

DELAY_S = 0.01


class BusyDevice(Streams):
    """Its streams; to be put in the place of `streams.HOST`. Nothing ends while `may_end` is not set."""

    is_host = False

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()

    def make_event(self) -> Event:
        return _Delayed(self)


class _Delayed(Event):
    def __init__(self, device: BusyDevice) -> None:
        self._device = device
        self._comes_at = 0.0

    def record(self) -> None:
        self._comes_at = time.monotonic() + DELAY_S

    def query(self) -> bool:
        return self._device.may_end.is_set() and time.monotonic() >= self._comes_at

    def synchronize(self, timeout_s: float) -> None:
        if not self._device.may_end.wait(timeout_s):
            raise TransferTimeout("the device is still busy")
        time.sleep(max(0.0, self._comes_at - time.monotonic()))


def follow_on_busy_device(
    rank: int, sockets: Sequence[socket.socket], peers: Sequence[socket.socket], timeout_s: float, **fields: Any
) -> None:
    """Another rank, in a process of its own."""
    streams.HOST = BusyDevice()
    place = RankPlace(rank, list(sockets), list(peers), Path("unused"), timeout_s)
    run_rank(**fields, place=place)
