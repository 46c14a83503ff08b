"""Threads that help a rank to read from peers on its host, each with a NIXL agent of its own.

Within a host a read is a copy by the thread that posts it, and an agent works at one post at a time: large transfers
are cut into posts, and whoever is free takes the next one. A helper is never needed. What it cannot read it gives
back, and the transfer's own thread, which reads on meanwhile, finds out why.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from pdkv.connectors.nixl.agent import Memory, NixlAgent
from pdkv.connectors.nixl.memory import WORD_BYTES, region_of
from pdkv.connectors.nixl.wire import RankBlob
from pdkv.errors import PdkvError

logger = logging.getLogger(__name__)

_PROBE_S = 1.0
"""A first connection needs the peer's help: so long a helper waits for it, and after a failure so long for the next."""

_JOIN_TIMEOUT_S = 5.0

Post = TypeVar("Post")


class SharedPosts(Generic[Post]):
    """The posts of one transfer, that several threads read. Thread-safe.

    Args:
        read: reads one, by a helper's agent or (None) the rank's own.
    """

    def __init__(self, blob: RankBlob, posts: Iterable[Post], read: Callable[[Post, NixlAgent | None], None]) -> None:
        self.blob = blob
        self._read = read
        self._posts = deque(posts)
        self._num_helping = 0
        self._changed = threading.Condition()  # guards the two above

    def read_all(self) -> None:
        """For the transfer's own thread. On return, and on a raise, no helper is at any of them.

        Raises:
            TransferError: of `read`.
        """
        try:
            while (post := self._next()) is not None:
                self._read(post, None)
        finally:
            with self._changed:
                self._posts.clear()
                self._changed.wait_for(self._nobody_helps)

    def help(self, agent: NixlAgent) -> None:
        """For a helper: read until there is nothing left. Raises what `read` raises; the post is given back."""
        while True:
            with self._changed:
                if not self._posts:
                    return
                post = self._posts.popleft()
                self._num_helping += 1
            done = False
            try:
                self._read(post, agent)
                done = True
            finally:
                with self._changed:
                    self._num_helping -= 1
                    if not done:
                        self._posts.append(post)
                    self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to take."""
        return not self._posts

    def _next(self) -> Post | None:
        """A post; None: all are read. Waits for those that helpers are at: each ends at its transfer's deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._posts or self._nobody_helps())
            return self._posts.popleft() if self._posts else None

    def _nobody_helps(self) -> bool:
        return self._num_helping == 0


class Helper:
    """One such thread; it starts, and makes its agent, when it is first asked.

    Args:
        memory: is read into.
        is_known: whether a peer's card still says so.
        ring: wakes a peer, whose help a first connection needs.
    """

    def __init__(
        self, name: str, memory: Memory, is_known: Callable[[RankBlob], bool], ring: Callable[[RankBlob], None]
    ) -> None:
        self.name = name
        self._memory = memory
        self._is_known = is_known
        self._ring = ring
        self._word = np.zeros(1, dtype=np.int64)
        self._asked: queue.SimpleQueue[SharedPosts[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next three
        self._agent: NixlAgent | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: dict[str, float] = {}  # peers, and when

    def ask(self, shared: SharedPosts[Any]) -> None:
        """Help with that, when there is time. Never blocks."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdkv-nixl-help", daemon=True)
                self._thread.start()
        self._asked.put(shared)

    def forget(self, peer: str) -> None:
        """The peer is gone: tear the connection down."""
        with self._lock:
            agent = self._agent
        if agent is not None:
            agent.disconnect(peer)

    def close(self) -> None:
        """End what it does, the thread and the agent. Idempotent."""
        with self._lock:
            self._closed = True
            agent, thread = self._agent, self._thread
        self._asked.put(None)
        if agent is not None:
            agent.close()
        if thread is not None:
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive():
                logger.error("thread %s does not end", thread.name)

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (shared := self._asked.get()) is not None:
            try:
                if not shared.is_over and self._is_connected(shared.blob):
                    assert self._agent is not None
                    shared.help(self._agent)
            except PdkvError as error:
                logger.debug("agent %s does not help to read from %s: %s", self.name, shared.blob.agent, error)
            except Exception:
                logger.exception("agent %s", self.name)
            del shared  # a reference would keep what it names

    def _is_connected(self, blob: RankBlob) -> bool:
        """Be connected to a peer that answers. A connection that has answered once works even if the peer is stopped.

        Raises:
            PdkvError: it cannot be had; nobody else waits for it.
        """
        agent = self._open()
        if agent is None or not self._is_known(blob):
            return False
        if agent.is_connected(blob.agent):
            return True
        now = time.monotonic()
        self._failed = {peer: since for peer, since in self._failed.items() if now - since < _PROBE_S}
        if blob.agent in self._failed:
            return False
        self._failed[blob.agent] = now
        agent.disconnect(blob.agent)
        agent.connect(blob.agent, blob.metadata)
        self._ring(blob)
        zero = np.zeros(1, dtype=np.int64)
        agent.transfer(
            "READ", blob.agent, region_of(self._word).pieces(zero, WORD_BYTES), blob.pool.pieces(zero, WORD_BYTES),
            deadline=now + _PROBE_S,
        )  # fmt: skip
        del self._failed[blob.agent]
        if not self._is_known(blob):  # removed meanwhile
            agent.disconnect(blob.agent)
            return False
        return True

    def _open(self) -> NixlAgent | None:
        """Its agent; None: it is closed."""
        if self._agent is not None:
            return self._agent
        agent = NixlAgent(self.name)
        agent.register(self._memory)
        agent.register(region_of(self._word))
        with self._lock:
            if not self._closed:
                self._agent = agent
                return agent
        agent.close()
        return None
