"""One rank's end of the `nixl` connector: its agent, its registered memory, its peers, and the thread for messages."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC
from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.arena.arena import NUM_WORDS, Arena
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.nixl.agent import LEAVE_S, NOTHING, Memory, NixlAgent, may_land_late
from pdkv.connectors.nixl.doorbell import Doorbell
from pdkv.connectors.nixl.inbox import Inbox
from pdkv.connectors.nixl.memory import PAGE_BYTES, WORD_BYTES, LandingBuffers, Permits, Slots, memory_of, region_of
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.paths import PeerPaths
from pdkv.connectors.nixl.peers import NixlPeers, agent_name
from pdkv.connectors.nixl.wire import BLOB_VERSION, Path, RankBlob, Reset, Wire, encode, encode_blob
from pdkv.connectors.transfer.digest_table import DigestTable, table_bytes
from pdkv.connectors.transfer.planning import Bytes
from pdkv.errors import ConfigError, PdkvError, PeerGone, TransferError, TransferTimeout
from pdkv.host.host_id import host_id
from pdkv.host.huge_pages import use_huge_pages
from pdkv.kernels.streams import streams_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

A = TypeVar("A")
M = TypeVar("M", bound=Wire)

_HOT_S = 0.002
"""Seconds after a message in which another one is expected soon, by the machine's clock, whatever the
connector's is.
"""

_HOT_PAUSE_S = 0.00005
_IDLE_PAUSE_S = 0.02
"""Seconds between polls for peers on other hosts, whose messages cause no wake-up."""

_LOOK_S = 0.02
"""Seconds between checks whether an awaited answer of a peer is still wanted."""

_TICK_S = 0.2
_FULL_PAUSE_S = 0.002
"""Seconds between attempts while a message waits for room in a peer's doorbell."""


class Waiting(Protocol):
    """What a transfer is for, and how long it may take: a job, or a part of one."""

    @property
    def deadline(self) -> float:
        """The deadline by the connector's clock."""

    def check(self) -> None:
        """Raise TransferCancelled or TransferTimeout if it must stop."""

    def remaining_s(self) -> float:
        """Seconds until the deadline, above 0. Raises the same as `check`."""


def _none_open(agent: str) -> list[int]:
    return []


class NixlEndpoint:
    """Thread-safe. On a step thread, only the methods so marked below, `register`, `blob` and `close` may be called."""

    def __init__(
        self, config: ConnectorConfig, peers: NixlPeers, options: NixlOptions, arena: Arena | None = None
    ) -> None:
        """`arena`: the arena that will hold the pool. Raises ConfigError if NIXL is missing."""
        import torch

        self.config = config
        self._streams = streams_of(torch.device(config.device))
        self.peers = peers
        self.slot_bytes = options.slot_bytes
        self._options = options
        self._arena = arena
        self._paths: list[str] = []  # the paths by which peers may read the pool
        self.sources = PeerPaths(peers, [])
        self._agent = NixlAgent(
            agent_name(config.engine, config.epoch, config.rank),
            progress_thread=options.progress_thread,
            clock=config.clock,
        )
        self._doorbell = Doorbell(self._agent.name)
        self.slots = Slots(options.slots, options.slot_bytes, self._streams)
        self.may_land_late = may_land_late()
        # Read from peers' slots, followed by a slot's generation.
        self.buffers = LandingBuffers(
            max(options.slots // 2, 2),
            options.slot_bytes + PAGE_BYTES,
            self._agent.register,
            may_land_late=self.may_land_late,
            streams=self._streams,
        )
        self._slot_region = self._agent.register(region_of(self.slots.memory))
        self.permits = Permits(arena.words if arena is not None else np.zeros(NUM_WORDS, dtype=np.int64))
        self._permit_region = self._agent.register(region_of(self.permits.values))
        self.pool: Memory | None = None
        self._table: Memory | None = None
        self._digests: Memory | None = None
        self._inbox = Inbox(peers, config.clock)
        self._workers: list[Callable[[], bool]] = []
        self._ticks: list[Callable[[], None]] = []
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open_requests: Callable[[str], list[int]] = _none_open
        self._connecting = threading.Lock()
        self._greeting: set[str] = set()  # agents that may be connected, but have not been greeted
        self._thread = ServiceThread(self._run, self._doorbell.wake, "pdkv-nixl")

    @property
    def num_bad_messages(self) -> int:
        """Messages without a decoder or handler, or with one that failed."""
        return self._inbox.num_bad_messages + self._doorbell.num_bad_packets

    # --- set up -----------------------------------------------------------------------------------------------------

    def register(self, kv_cache: "torch.Tensor", generations: npt.NDArray[np.int64] | None) -> None:
        """Register the pool, and rank 0's generations. Raises ConfigError."""
        in_arena = self._arena is not None and self._arena.holds(kv_cache)
        self._paths = _paths_to(kv_cache, self._options.paths, in_arena)
        self.sources = PeerPaths(self.peers, _paths_from(kv_cache, self._options.paths))
        if kv_cache.device.type == "cpu" and not in_arena:
            use_huge_pages(kv_cache.data_ptr(), kv_cache.nbytes)
        self._streams = streams_of(kv_cache.device)
        self.pool = self._agent.register(memory_of(kv_cache))
        if generations is not None:
            self._table = self._agent.register(region_of(generations))

    def register_digests(self) -> DigestTable:
        """Register the table of digests of the pool's content, in memory that peers read. Raises ConfigError."""
        layout = self.config.layout
        units = self.config.num_blocks * (layout.block_size // HASH_BLOCK_SIZE)
        if self._arena is not None:
            table = self._arena.digests()
        else:
            memory = np.zeros(table_bytes(units, layout.num_kv_heads), dtype=np.uint8)
            table = DigestTable(memory.data, units, layout.num_kv_heads)
        self._digests = self._agent.register(region_of(table.words))
        return table

    def handle(self, kind: type[M], handler: Callable[[RankBlob, M], None]) -> None:
        """Pass messages of that kind to this handler, on the message thread."""
        self._inbox.handle(kind, handler)

    def add_work(self, work: Callable[[], bool]) -> None:
        """Add a little work for the message thread, which returns False when there is none."""
        self._workers.append(work)

    def add_tick(self, tick: Callable[[], None]) -> None:
        """Add a function to be called on the message thread a few times a second."""
        self._ticks.append(tick)

    def report_open_requests(self, report: Callable[[str], list[int]]) -> None:
        """Set the function that knows which requests to an agent are open."""
        self._open_requests = report

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def blob(self) -> bytes:
        """This rank's part of the engine's card."""
        assert self.pool is not None, "register must be called first"
        blob = RankBlob(
            version=BLOB_VERSION,
            mode=self._options.mode,
            agent=self._agent.name,
            metadata=self._agent.metadata(),
            host=host_id(),
            doorbell=self._doorbell.address,
            pool=self.pool,
            block_bytes=self.config.layout.block_bytes,
            slots=self._slot_region,
            slot_bytes=self.slot_bytes,
            permits=self._permit_region,
            nonce=self.permits.nonce,
            paths=self._paths,
            arena=self._arena.address if self._arena is not None and "arena" in self._paths else None,
            generations=self._table,
            digests=self._digests,
        )
        return encode_blob(blob)

    def use_device(self) -> None:
        """Set the CUDA device of this thread, whose current context UCX uses: called on each thread that moves KV."""
        self._streams.use()

    # --- transfers and messages -------------------------------------------------------------------------------------

    def read(
        self,
        job: Waiting,
        blob: RankBlob,
        local: tuple[Memory, npt.NDArray[np.int64]],
        remote: tuple[Memory, npt.NDArray[np.int64]],
        sizes: npt.NDArray[np.int64] | int,
    ) -> None:
        """Read pieces of a peer's region into one of this rank's regions, each given as (region, offsets). Raises
        TransferError.

        A read that may land late goes only into `buffers`, and is not ended by a cancel, which would cost a buffer, but
        by its deadline.
        """
        self._reach(blob)
        self._agent.read(
            blob.agent,
            local[0].pieces(local[1], sizes),
            remote[0].pieces(remote[1], sizes),
            deadline=job.deadline,
            kinds=(local[0].kind, remote[0].kind),
            check=None if self.may_land_late else job.check,
        )

    def read_bytes(self, job: Waiting, blob: RankBlob, buffer: Bytes, region: Memory, offset: int) -> None:
        """Read a part of a peer's region into one of `buffers`, or a part of it. Raises TransferError."""
        start = np.asarray([offset], dtype=np.int64)
        self.read(job, blob, (region_of(buffer), np.zeros_like(start)), (region, start), buffer.size)

    def read_words(self, job: Waiting, blob: RankBlob, region: Memory, first: int, count: int) -> npt.NDArray[np.int64]:
        """Read `count` int64 words of a peer's region, from number `first` on. Raises TransferError."""
        words = np.empty(count, dtype=np.int64)
        with self.buffers.take(job.remaining_s()) as buffer:
            step = buffer.size // WORD_BYTES
            for start in range(0, count, step):
                part = buffer[: min(step, count - start) * WORD_BYTES]
                self.read_bytes(job, blob, part, region, (first + start) * WORD_BYTES)
                words[start : start + step] = part.view(np.int64)
        return words

    def send(self, blob: RankBlob, message: Wire) -> None:
        """Send a message, which arrives soon or never: by the doorbell within a host, otherwise by NIXL.

        UCX's queue between processes has one tail for all senders: a process that is killed while it sends leaves the
        receiver deaf to all of them.

        Raises:
            PdkvError: the peer is gone, accepts no messages, or cannot be reached.
            ValueError: the message is too long.
        """
        data = encode(message)
        if blob.host != host_id():
            self._reach(blob)
            self._agent.send(blob.agent, data)
            return
        if not self._is_known(blob):
            raise PeerGone(f"agent {blob.agent} is not known")
        if not self._doorbell.send(blob.doorbell, data):
            self._send_reset(blob, alone=True)
            raise TransferError(f"agent {blob.agent} takes no messages")

    def try_send(self, blob: RankBlob, message: Wire) -> bool:
        """Send if the peer can be reached. For messages whose loss a peer's deadline makes up for."""
        try:
            self.send(blob, message)
        except PdkvError as error:
            logger.debug("message to %s failed: %s", blob.agent, error)
            return False
        return True

    def next_answer(self, job: Waiting, blob: RankBlob, answers: "queue.SimpleQueue[A]") -> A:
        """Wait for a peer's answer, which a handler delivers. Raises PeerGone, and what the job raises."""
        while True:
            try:
                return answers.get(timeout=min(_LOOK_S, job.remaining_s()))
            except queue.Empty:
                if self.peers.agent(blob.agent) is None:
                    raise PeerGone(f"agent {blob.agent} is gone") from None

    # --- the step thread --------------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Run something on the message thread. Never blocks."""
        self._posted.put(call)
        self._doorbell.wake()

    def meet(self, agents: list[str]) -> None:
        """Connect to new peers soon, so that the first transfer need not wait for it."""

        def connect() -> None:
            for agent in agents:
                if (blob := self.peers.agent(agent)) is not None:
                    with contextlib.suppress(PdkvError):  # code that needs it will get the reason
                        if self.sources.source(blob) is None:
                            self._reach(blob)

        self.post(connect)

    def forget(self, blobs: Sequence[RankBlob]) -> None:
        """Tear down connections to peers that are gone, soon."""

        def disconnect() -> None:
            for blob in blobs:
                self._doorbell.forget(blob.doorbell)
                self._agent.disconnect(blob.agent, 0.0)
            self.sources.forget(blobs)

        self.post(disconnect)

    def close(self) -> None:
        """End the thread and the agent. Idempotent."""
        if self._thread.stopping.is_set():
            return
        if self._thread.stop():  # otherwise it still uses the descriptors
            self._doorbell.close()
        self.sources.close()
        self._agent.close()
        for users in (self._inbox, self._workers, self._ticks):  # they know the endpoint, and it knows them
            users.clear()
        self._open_requests = _none_open
        self.permits.close()
        del self.slots, self.buffers
        self._arena = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _reach(self, blob: RankBlob) -> None:
        """Connect to a peer. Raises PeerGone for one that is not known any more."""
        if self._agent.is_connected(blob.agent) and blob.agent not in self._greeting:
            return
        with self._connecting:
            if self._thread.stopping.is_set() or self.peers.agent(blob.agent) != blob:
                raise PeerGone(f"agent {blob.agent} is not known")
            if self._agent.is_connected(blob.agent):
                return
            if not self._agent.disconnect(blob.agent, self._patience(LEAVE_S)):
                raise TransferTimeout(f"agent {blob.agent}: a transfer still uses the old connection")
            self._greeting.add(blob.agent)  # between hosts, no request may overtake the Reset, which would end it
            try:
                self._greet(blob)
            finally:
                self._greeting.discard(blob.agent)
        if self.peers.agent(blob.agent) is None:  # removed in the meantime
            self._agent.disconnect(blob.agent)

    def _patience(self, wait_s: float) -> float:
        """How long this thread may wait for a peer: the message thread does not."""
        return 0.0 if self._thread.is_current else wait_s

    def _is_known(self, blob: RankBlob) -> bool:
        return not self._thread.stopping.is_set() and self.peers.agent(blob.agent) == blob

    def _greet(self, blob: RankBlob) -> None:
        """Connect, have UCX do so, which the first read would otherwise wait for, and report what is open here."""
        self._agent.add_peer(blob.agent, blob.metadata)
        if blob.host == host_id():
            self._agent.send(blob.agent, NOTHING)
            self._send_reset(blob)
        else:
            self._agent.send(blob.agent, self._reset(blob.agent))

    def _send_reset(self, blob: RankBlob, *, alone: bool = False) -> None:
        """Send a Reset to a peer on this host. `alone`: in place of all messages that wait there, which are lost.

        It is encoded when it is sent. So it names each request whose `Gather` is sent before it, and does not end later
        ones.
        """
        self._doorbell.send(blob.doorbell, partial(self._reset, blob.agent), alone=alone)

    def _reset(self, agent: str) -> bytes:
        return encode(Reset(self._open_requests(agent)))

    def _run(self, stopping: threading.Event) -> None:
        """The message thread."""
        self.use_device()
        hot_until, next_tick, now = 0.0, 0.0, self.config.clock.now
        while not stopping.is_set():
            busy, all_sent = False, True
            try:
                busy = self._receive()
                while not self._posted.empty():
                    self._posted.get()()
                for work in self._workers:
                    busy = work() or busy
                if now() >= next_tick:
                    next_tick = now() + _TICK_S
                    for tick in self._ticks:
                        tick()
                all_sent = self._doorbell.flush()
            except Exception:  # whatever the error was, the next message is served
                self._inbox.num_bad_messages += 1
                logger.exception("agent %s", self._agent.name)
            pause_s = _IDLE_PAUSE_S if all_sent else _FULL_PAUSE_S
            if busy:
                pause_s = 0.0
            elif MONOTONIC.now() < hot_until:
                pause_s = _HOT_PAUSE_S
            if self._doorbell.wait(pause_s) or busy:
                hot_until = MONOTONIC.now() + _HOT_S

    def _receive(self) -> bool:
        messages = [*self._agent.receive(), *self._doorbell.take()]
        self._inbox.take(messages)
        return bool(messages)


def _paths_to(kv_cache: "torch.Tensor", allowed: Sequence[Path], in_arena: bool) -> list[str]:
    """The paths by which peers may read a pool. Raises ConfigError if none is allowed."""
    paths: list[str] = [path for path in _paths_from(kv_cache, allowed) if in_arena or path != "arena"]
    if not paths:
        raise ConfigError(
            f"connector nixl: path={allowed[0]} reads only KV in host memory that this connector allocates; it lies on "
            f"{kv_cache.device}, allocated by another connector or the engine: path=auto uses a path that works"
        )
    return paths


def _paths_from(kv_cache: "torch.Tensor", allowed: Sequence[Path]) -> list[Path]:
    """The paths by which peers may be read into a pool."""
    on_host = kv_cache.device.type == "cpu"
    return [path for path in allowed if on_host or path == "ucx"]
