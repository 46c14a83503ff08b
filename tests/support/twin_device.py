"""A device over the CPU's memory that computes at once, but has ended no step before somebody waits for it.

So runners queue their steps on it as on a GPU, and what they compute is what they would in turn.
"""

from pdkv.kernels.streams import Event, Streams


class _Late(Event):
    """Comes when somebody waits for it."""

    def __init__(self) -> None:
        self.has_come = True

    def record(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self, timeout_s: float) -> None:
        self.has_come = True


class TwinDevice(Streams):
    """Its streams; to be put in the place of `streams.HOST`."""

    is_host = False

    def make_event(self) -> Event:
        return _Late()
