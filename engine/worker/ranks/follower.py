"""A rank of an engine other than the first: it carries out rank 0's orders until rank 0 says stop or is gone."""

import contextlib
import os
import socket
import weakref
from collections import deque

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.base import KVConnectorMetadata
from pdkv.engine.worker.executor import InProcessExecutor, RankInfo
from pdkv.engine.worker.pending import LOOK_S, PendingStep
from pdkv.engine.worker.ranks.channel import RankChannel
from pdkv.engine.worker.ranks.messages import (
    Answer,
    Attach,
    Attached,
    Broken,
    Collect,
    MasksTaken,
    PeersChanged,
    Sized,
    Step,
    Stop,
    collected,
    decode_order,
    encode,
    plan_of,
    step_done,
)
from pdkv.engine.worker.ranks.ring_queue import RingReader
from pdkv.errors import RankError, RankGone, RankTimeout


class FirstRank:
    """Rank 0, seen from another rank: the ring that it writes, and the channel for answers."""

    def __init__(self, sock: socket.socket, rank: int, *, timeout_s: float, start_timeout_s: float) -> None:
        """Owns `sock`. Raises RankTimeout and RankGone if rank 0 offers no ring.

        Args:
            timeout_s: limit of an answer.
            start_timeout_s: limit of each wait before the engine is ready.
        """
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._channel = RankChannel(sock, "rank 0")
        self._ring = RingReader(self._channel, rank - 1, start_timeout_s)
        (self._wake_fd,) = self._channel.receive_fds(1, start_timeout_s)
        weakref.finalize(self, os.close, self._wake_fd).atexit = False  # a thread of the connector may still notify

    def notify(self) -> None:
        """Report that the connector has news: rank 0's loop then asks all ranks. Thread-safe."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is about to wake anyway, or it is gone
            os.write(self._wake_fd, b"\0")

    def say(self, answer: Answer) -> None:
        """Send an answer. Raises RankTimeout and RankGone."""
        self._channel.send(encode(answer), self._timeout_s)

    def wait_to_attach(self, num_blocks: int, model: str) -> int:
        """Report the loaded model and the number of blocks that fit here; returns the number that the engine has.

        Raises:
            RankError: rank 0 is gone, late, or stopped.
        """
        self.say(Sized(num_blocks, model))
        order = decode_order(self._ring.get(self._start_timeout_s))
        if not isinstance(order, Attach):
            raise RankGone("rank 0 stopped before the engine was ready")
        return order.num_blocks

    def attached(self, info: RankInfo) -> None:
        """Report that this rank is ready. Raises RankTimeout and RankGone."""
        self.say(Attached(info.pid, info.blob))

    def hear_masks(self) -> MasksTaken:
        """In the middle of a step: receive the masks from rank 0. Raises RankTimeout and RankGone."""
        order = decode_order(self._ring.get(self._timeout_s))
        if not isinstance(order, MasksTaken):
            raise RankError(f"rank 0 gave an unexpected order: {type(order).__name__}")
        return order

    def follow(self, executor: InProcessExecutor, metadata_type: type[KVConnectorMetadata]) -> None:
        """Run orders until rank 0 stops; an engine without requests is silent, so the wait for an order has no end.

        Raises:
            RankError: rank 0 went away or hangs; and whatever a step raised.
        """
        under_way = deque[PendingStep]()  # rank 0 has no more
        while True:
            while under_way:
                if under_way[0].is_done:
                    self.say(step_done(under_way.popleft().finish()))
                elif self._ring.has_news:
                    break
                else:
                    MONOTONIC.sleep(LOOK_S)
            match decode_order(self._ring.get(None)):
                case Step() as step:
                    under_way.append(executor.launch(plan_of(step, metadata_type)))
                case Collect(with_stats=with_stats):
                    ended = executor.ask_finished(with_stats=with_stats)
                    has_sends = any(step.has_sends for step in under_way)
                    self.say(collected(ended.transfers, ended.stats, has_sends=has_sends))
                case PeersChanged(added=added, removed=removed):
                    executor.update_peers(added, removed)
                case Stop():
                    return
                case order:
                    raise RankError(f"rank 0 gave an unexpected order: {type(order).__name__}")

    def give_up(self, error: Exception) -> None:
        """Tell rank 0 why this rank ends, if rank 0 can be reached and does not see the same error."""
        if isinstance(error, RankGone | RankTimeout):
            return
        with contextlib.suppress(RankError):
            self.say(Broken(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Idempotent."""
        self._ring.close()
        self._channel.close()
