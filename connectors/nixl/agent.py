"""One rank's NIXL agent: registered memory, peers, reads and messages, with every failure as a typed error.

NIXL is only imported here, when an agent is made: its import loads UCX, which must not happen in a fork server. NIXL's
agent is not thread-safe, and some of its calls hold the GIL while they wait for its inner lock: a lock of our own, held
per call, keeps them apart. A post over shared memory blocks for the whole copy (it releases the GIL), so no call here
belongs on a step thread.
"""

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import ConfigError, IncompatiblePeers, PeerGone, TransferCancelled, TransferError, TransferTimeout

logger = logging.getLogger(__name__)

Pieces = npt.NDArray[np.uint64]
"""(n, 3): address, bytes, device of each piece of one side of a transfer."""

MAX_MESSAGE_BYTES = 256 * 1024
"""The most bytes of a message: an offer of 131k tokens in scattered blocks has 64 KiB of descriptors."""

NOTHING = b""
"""A message that only makes UCX connect; dropped on arrival."""

MAX_AGENT_NAME = 256

_BACKEND = "UCX"
_PROGRESS_DELAY_US = 10_000
"""Microseconds between polls of a progress thread without an event; NIXL's Python API uses 0, which is a busy loop."""

LEAVE_S = 0.5
"""Seconds that a disconnect waits for transfers to let go; their posts take a few milliseconds."""

CLOSE_S = 5.0
"""As LEAVE_S, at the end and for all peers together: transfers that have not let go keep the agent's memory and
descriptors.
"""

_SPINS = 50
_WAIT_S = (0.00005, 0.0002)
"""NIXL has no event for the end of a transfer: the first and the longest pause between polls, after a few without a
pause.
"""

TRANSPORTS = "shm,self,cuda"
"""UCX's transports if the user names none: those within a host. Its TCP would listen at every address of the host,
without authentication.
"""

_END_WITH_THEIR_CONNECTION = {
    *("shm", "sm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "self", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
    *("rc", "rc_v", "rc_verbs", "rc_x", "rc_mlx5", "dc", "dc_x", "dc_mlx5"),
}
"""UCX's transports over which nothing arrives after a connection was closed by force: copies by this process itself,
and queue pairs that are destroyed. A closed connection of its TCP lives on as a socket.
"""

_ENVIRONMENT = {
    "UCX_TLS": TRANSPORTS,
    "UCX_POSIX_ERROR_HANDLING": "y",  # otherwise shared memory does not notice that a peer has died, and is not used
    "UCX_SYSV_ERROR_HANDLING": "y",
    # Otherwise an idle transport is armed, and any process on the host can end this one, by an empty datagram to the
    # socket that wakes it.
    "UCX_ADAPTIVE_PROGRESS": "n",
    # Otherwise a GPU without NVLink is read through host memory, in pieces of 8 KiB that its owner's calls move along.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_TCP_CONN_NB": "y",  # otherwise connecting to a silent host blocks the whole agent for minutes
    "NIXL_LOG_LEVEL": "FATAL",  # failures are raised and counted here; NIXL would print each poll of a dead peer
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",  # no signal handlers: a crash is the process owner's business
    "UCX_VFS_ENABLE": "n",  # no thread and directory for its file system of statistics
    # Practically never: asking a silent peer whether it lives ends the process where the connection is not complete
    # (a null pointer in ucp_ep_do_uct_ep_am_keepalive). "inf" would leave the handshake out that tells of a dead one.
    "UCX_KEEPALIVE_INTERVAL": "100000s",
}
"""Set unless the user has set them."""


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """A registered region: `size` bytes from `address` on."""

    address: int
    size: int
    kind: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0

    def pieces(self, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64] | int) -> Pieces:
        """Pieces at byte `offsets` of this region.

        Raises:
            TransferError: one is outside of the region (a peer's numbers are checked here, too).
        """
        if offsets.size and (offsets.min() < 0 or (offsets + sizes).max() > self.size or np.min(sizes) <= 0):
            raise TransferError(f"pieces outside of a region of {self.size} bytes")
        pieces = np.empty((offsets.size, 3), dtype=np.uint64)
        pieces[:, 0] = offsets + self.address
        pieces[:, 1] = sizes
        pieces[:, 2] = self.device
        return pieces


class Message(NamedTuple):
    """A message and its sender (by its own claim: a hint, not proof)."""

    peer: str
    data: bytes


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection. `num_active` transfers use it; a broken one takes no more."""

    num_active: int = 0
    broken: bool = False

    def is_usable(self) -> bool:
        """Whether a transfer may begin."""
        return not self.broken


def may_land_late() -> bool:
    """Whether data may still be written to its destination long after its transfer was given up."""
    transports = os.environ.get("UCX_TLS", TRANSPORTS).split(",")
    return not _END_WITH_THEIR_CONNECTION.issuperset(transports)


def load_bindings() -> ModuleType:
    """NIXL's own module, with its environment set unless the user has set it.

    Raises:
        ConfigError: it is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    reasons = []
    for package in _wheels():
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "connector nixl needs NIXL: pip install 'pdkv[nixl]', or nixl-cu13 with a torch for CUDA 13 "
        f"({'; '.join(reasons)})"
    )


def _wheels() -> list[str]:
    """NIXL's packages, the one for torch's CUDA first; without CUDA either works."""
    torch = sys.modules.get("torch")
    cuda = (torch.version.cuda if torch is not None else None) or "12"
    return sorted(("nixl_cu12", "nixl_cu13"), key=lambda name: not name.endswith(cuda.partition(".")[0]))


class NixlAgent:
    """Thread-safe. Once a read has returned or raised, it no longer touches memory, unless it failed and
    `may_land_late`.
    """

    def __init__(self, name: str, *, progress_thread: bool = False, clock: Clock = MONOTONIC) -> None:
        """Without a progress thread, UCX works only within calls of this agent, so `receive` must be called again and
        again. With one, UCX works by itself, but that thread spins on UCX's lock while another thread copies.

        Raises:
            ConfigError: NIXL is missing, or its UCX backend cannot start.
        """
        self.name = name
        self._clock = clock
        self.num_bad_messages = 0
        self._bindings = load_bindings()
        self._lock = threading.Lock()  # around every call of the agent
        self._idle = threading.Condition(self._lock)  # a peer has one active transfer less
        self._closing = threading.Event()
        self._peers: dict[str, _Peer] = {}
        self._registered: list[Any] = []
        self._messages: list[Message] = []
        self._errors = _error_types(self._bindings)
        self._failures: tuple[type[Exception], ...] = (RuntimeError, *self._errors)
        self._bad_messages: tuple[type[Exception], ...] = (
            UnicodeDecodeError,
            *self._failures,
        )  # a name that is not text
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = _PROGRESS_DELAY_US
        try:
            self._agent: Any = self._bindings.nixlAgent(name, config)
            # A connection is closed at once, so that pending data cannot land afterwards.
            self._agent.createBackend(_BACKEND, {"ucx_ep_close_force": "true"})
        except self._failures as error:
            raise ConfigError(f"NIXL cannot start its backend {_BACKEND}: {error}") from error

    # --- memory and peers -----------------------------------------------------------------------------------------

    def register(self, memory: Memory) -> Memory:
        """Register a region with NIXL, permanently. It stays mapped until `close`. Raises ConfigError."""
        descriptors = self._bindings.nixlRegDList(
            self._segment(memory.kind), [(memory.address, memory.size, memory.device, "")]
        )
        try:
            with self._lock:
                self._agent.registerMem(descriptors, [])
        except self._failures as error:
            raise ConfigError(f"NIXL cannot register {memory.size} bytes of {memory.kind}: {error}") from error
        self._registered.append(descriptors)
        return memory

    def metadata(self) -> bytes:
        """What a peer needs to reach the regions registered so far."""
        with self._lock:
            return bytes(self._agent.getLocalMD())

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Add a peer by its metadata; UCX connects on the first transfer. Idempotent.

        Raises:
            PeerGone: there is no peer where the metadata says.
            IncompatiblePeers: the metadata is not this peer's, or cannot be read.
        """
        with self._lock:
            if peer in self._peers:
                return
            try:
                name = self._agent.loadRemoteMD(metadata)
            except self._bindings.nixlBackendError as error:
                raise PeerGone(f"agent {peer} cannot be reached: {error}") from error
            except self._failures as error:
                raise IncompatiblePeers(f"the NIXL metadata of agent {peer} cannot be read: {error}") from error
            name = name.decode() if isinstance(name, bytes) else str(name)
            if name != peer:
                self._agent.invalidateRemoteMD(name)
                raise IncompatiblePeers(f"the NIXL metadata of agent {peer!r} is that of {name!r}")
            self._peers[peer] = _Peer()

    def disconnect(self, peer: str, timeout_s: float = LEAVE_S) -> bool:
        """Tear a connection down; its transfers fail. Idempotent.

        Returns:
            Whether all of them have ended. False: a transfer is still in use after `timeout_s`; the connection then
            takes no new transfers, and the last one to end tears it down.
        """
        with self._lock:
            connection = self._peers.get(peer)
            return connection is None or self._tear_down(peer, connection, timeout_s)

    def is_connected(self, peer: str) -> bool:
        """Whether the peer is known and no transfer has found it gone."""
        with self._lock:
            connection = self._peers.get(peer)
            return connection is not None and not connection.broken

    # --- transfers ------------------------------------------------------------------------------------------------

    def read(
        self,
        peer: str,
        local: Pieces,
        remote: Pieces,
        *,
        deadline: float,
        kinds: tuple[str, str] = ("DRAM", "DRAM"),
        check: Callable[[], None] | None = None,
    ) -> None:
        """Copy remote[i] to local[i], and return when that is done.

        Giving a transfer up closes its connection. After that none of its data is written, unless it `may_land_late`.

        Args:
            deadline: by this agent's clock.
            kinds: the kinds of memory on the local and the remote side.
            check: called during the wait; raises the error that ends the transfer.

        Raises:
            PeerGone: the peer is not connected (any more).
            TransferTimeout: not done at the deadline.
            TransferError: NIXL refuses it.
        """
        with self._active(peer, is_transfer=True) as connection:
            handle = self._make(peer, local, remote, kinds)
            under_way = True
            try:
                self._post(handle, peer, connection, deadline, check)
                under_way = False
            except PeerGone:
                under_way = False  # NIXL has torn the connection down
                connection.broken = True
                raise
            finally:
                connection.broken = connection.broken or under_way
                self._release(handle)
        # `_active` tears a broken connection down when it exits.

    def send(self, peer: str, data: bytes) -> None:
        """Send a message, which arrives soon or never.

        Raises:
            PeerGone: the peer is not connected (any more).
        """
        with self._active(peer) as connection:
            try:
                with self._lock:
                    self._agent.genNotif(peer, data)
                    self._take_messages()  # data that UCX could not send at once is sent now, not with the next call
            except self._failures as error:
                connection.broken = True
                raise PeerGone(f"message to agent {peer} failed: {error}") from error

    def receive(self) -> list[Message]:
        """Messages since the last call, in each peer's order. Foreign messages are counted and dropped."""
        with self._lock:
            if self._closing.is_set():
                return []
            self._take_messages()
            messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        """End waiting transfers, disconnect, deregister. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = self._clock.now() + CLOSE_S
        ended = [self.disconnect(peer, max(deadline - self._clock.now(), 0.0)) for peer in list(self._peers)]
        if not all(ended):
            logger.error("agent %s is left open: one of its transfers does not end", self.name)
            return
        with self._lock:
            for descriptors in self._registered:
                self._agent.deregisterMem(descriptors, [])
            self._registered.clear()
            self._agent = None  # the last reference: UCX's threads and descriptors are freed with it

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _active(self, peer: str, *, is_transfer: bool = False) -> Iterator[_Peer]:
        """Use a connection; the last one to leave a broken one closes it, and every transfer waits for that: each of
        the others checks within a millisecond, and has a deadline.
        """
        with self._lock:
            connection = self._peers.get(peer)
            if connection is None or not connection.is_usable() or self._closing.is_set():
                raise PeerGone(f"agent {peer} is not connected")
            connection.num_active += 1
        try:
            yield connection
        finally:
            with self._lock:
                connection.num_active -= 1
                self._idle.notify_all()
                if connection.broken:
                    self._tear_down(peer, connection, None if is_transfer else 0.0)

    def _tear_down(self, peer: str, connection: _Peer, timeout_s: float | None) -> bool:
        """Under the lock: end a connection, unless that has been done; there may already be a new one.

        Returns:
            False: transfers have not left it within `timeout_s` (None: they end by their own deadlines).
        """
        connection.broken = True  # waiting transfers check it again and again
        until = None if timeout_s is None else self._clock.now() + timeout_s
        if not self._clock.wait_for(self._idle, lambda: not connection.num_active, until):
            return False
        if self._peers.get(peer) is connection:
            del self._peers[peer]
            self._invalidate(peer)
        return True

    def _take_messages(self) -> None:
        """Under the lock: let UCX work, and keep received messages."""
        try:
            received = self._agent.getNotifs({}, [])
        except self._bad_messages as error:
            self.num_bad_messages += 1
            logger.debug("agent %s cannot receive: %s", self.name, error)
            return
        for peer, batch in received.items():
            for data in batch:
                if data == NOTHING:
                    continue
                if len(data) > MAX_MESSAGE_BYTES or not 0 < len(peer) <= MAX_AGENT_NAME:
                    self.num_bad_messages += 1
                else:
                    self._messages.append(Message(peer, data))

    def _segment(self, kind: str) -> Any:
        return self._bindings.VRAM_SEG if kind == "VRAM" else self._bindings.DRAM_SEG

    def _make(self, peer: str, local: Pieces, remote: Pieces, kinds: tuple[str, str]) -> int:
        bindings = self._bindings
        sides = [
            bindings.nixlXferDList(self._segment(kind), pieces)
            for kind, pieces in zip(kinds, (local, remote), strict=True)
        ]
        try:
            with self._lock:
                return int(self._agent.createXferReq(bindings.NIXL_READ, *sides, peer, b"", []))
        except self._failures as error:
            raise self._typed(error, peer) from error

    def _post(
        self, handle: int, peer: str, connection: _Peer, deadline: float, check: Callable[[], None] | None
    ) -> None:
        """Post and wait. Raises a TransferError."""
        done = self._bindings.NIXL_SUCCESS
        call: Callable[[int], Any] = self._agent.postXferReq
        looks, pause_s = 0, _WAIT_S[0]
        while True:
            try:
                with self._lock:
                    state = call(handle)
            except self._failures as error:
                raise self._typed(error, peer) from error
            if state == done:
                return
            call = self._agent.getXferStatus
            if check is not None:
                check()
            if connection.broken or self._closing.is_set():
                raise TransferCancelled(f"the connection to agent {peer} is torn down")
            if self._clock.now() >= deadline:
                raise TransferTimeout(f"agent {peer} did not answer in time")
            looks += 1
            if looks > _SPINS:
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _WAIT_S[1])

    def _release(self, handle: int) -> None:
        try:
            with self._lock:
                self._agent.releaseXferReq(handle)
        except self._failures as error:  # it is freed with the agent
            logger.warning("agent %s cannot release a transfer: %s", self.name, error)

    def _invalidate(self, peer: str) -> None:
        """Under the lock: invalidate a peer's metadata."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except self._failures:
            logger.debug("agent %s: NIXL had already closed the connection to %s", self.name, peer)

    def _typed(self, error: Exception, peer: str) -> TransferError:
        kind = self._errors.get(type(error), TransferError)
        return kind(f"agent {peer}: {error}")


def _error_types(bindings: ModuleType) -> dict[type[Exception], type[TransferError]]:
    """NIXL's exception types, which share no base class."""
    plain = "NotPosted InvalidParam Backend Mismatch NotAllowed RepostActive Unknown NotSupported NoTelemetry"
    return {
        **{getattr(bindings, f"nixl{name}Error"): TransferError for name in plain.split()},
        bindings.nixlRemoteDisconnectError: PeerGone,
        bindings.nixlNotFoundError: PeerGone,  # the peer's metadata has been invalidated in the meantime
        bindings.nixlCancelledError: TransferCancelled,
    }
