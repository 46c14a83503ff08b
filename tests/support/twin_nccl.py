"""NCCL between engines of one process, on recorded streams: messages are ordered as torch's ProcessGroupNCCL does it.

A message runs on a stream of the group's, behind what the current stream had been given when it was posted, and `wait`
has the current stream, not the host, wait for it. Ends meet by the store that the link gives them.
"""

import itertools
import queue
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from recorded_streams import RecordedStreams

from pdkv.connectors.p2p import nccl, worker

MEETING_S = 10.0


class _Work(NamedTuple):
    recorded: RecordedStreams
    node: Any

    def wait(self) -> None:
        self.recorded.put(None, also_behind=self.node)


class TwinNccl:
    """One end of a group."""

    _numbers = itertools.count()
    _messages: ClassVar[dict[bytes, tuple[queue.Queue[Any], queue.Queue[Any]]]] = {}  # by group, to either rank

    def __init__(self, store: Any, rank: int, recorded: RecordedStreams) -> None:
        if rank == 0:
            name = str(next(self._numbers)).encode()
            self._messages[name] = (queue.Queue(), queue.Queue())
            store.set("name", name)
        inboxes = self._messages[store.get("name")]
        self._own, self._peers = inboxes[rank], inboxes[1 - rank]
        self._recorded = recorded
        self._stream = recorded.make_stream()
        self.is_aborted = False
        self.num_received = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        posted = self._recorded.put(None)
        with self._stream.on():
            self._recorded.put(None, also_behind=posted)
            message = tensors[0].clone()
            sent = self._recorded.put(None)
        self._peers.put((message, sent))
        return _Work(self._recorded, sent)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        message, sent = self._own.get(timeout=MEETING_S)
        if message is None or self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        posted = self._recorded.put(None)
        with self._stream.on():
            self._recorded.put(None, also_behind=posted)
            self._recorded.put(None, also_behind=sent)
            tensors[0].copy_(message)
            received = self._recorded.put(None)
        self.num_received += 1
        return _Work(self._recorded, received)

    def abort(self) -> None:
        self.is_aborted = True
        self._own.put((None, None))
        self._peers.put((None, None))


def use_gpus(monkeypatch: pytest.MonkeyPatch, *, same: bool = False) -> None:
    """From now on each pool lies on a GPU of its own, or all on one."""
    numbers = itertools.count()
    monkeypatch.setattr(worker, "_gpu_of", lambda kv_cache: "GPU-0" if same else f"GPU-{next(numbers)}")


def use_twin_nccl(monkeypatch: pytest.MonkeyPatch, recorded: RecordedStreams) -> None:
    """Groups of two are such ones."""
    monkeypatch.setattr(nccl, "make_nccl", lambda store, rank, device: TwinNccl(store, rank, recorded))
