"""Brings messages of neighbours on this host to the message thread of a rank, and wakes it.

Every rank has an unnamed pipe. A peer opens it through /proc/<pid>/fd/<fd>, which the kernel allows only to processes
of the same user (as it does everything else between peers on a host): strangers cannot knock at all. The pipe holds
packets, each written and read at once. A message is one packet, or several in order.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import select
import struct
import threading
from collections import OrderedDict
from typing import NamedTuple

from pdkv.connectors.nixl.agent import MAX_AGENT_NAME, MAX_MESSAGE_BYTES, Message
from pdkv.connectors.nixl.outbox import Content, Outbox
from pdkv.errors import PeerGone, TransferCancelled
from pdkv.host.held_file import HeldFile, held_here

logger = logging.getLogger(__name__)

MAX_OPEN = 256
"""The most peers whose bells are kept open."""

_PACKET_BYTES = 4096  # PIPE_BUF: the size of an atomic write
_HEADER = struct.Struct(
    "<QIHH"
)  # the writer's own number, the message's, the packet's place in it, and the number of packets
_NAME = struct.Struct("<H")  # begins the first packet's content: the length of the sender's name, which follows
_MAX_PACKETS = -(-(MAX_MESSAGE_BYTES + MAX_AGENT_NAME + _NAME.size) // (_PACKET_BYTES - _HEADER.size))
_PIPE_BYTES = 256 << 10
"""Desired pipe size: 64 packets. A user may have 64 MiB in pipes (fs.pipe-user-pages-soft); beyond that, a pipe has 2
packets.
"""

_READS = 256
"""Packets read before the thread does something else, however fast a peer writes."""


class DoorbellAddress(HeldFile, frozen=True, array_like=True):
    """How a peer on the same host reaches a bell; part of the engine's card."""


class Doorbell:
    """A pipe for peers, and an eventfd for this process.

    Args:
        name: the sender's name in messages.
    """

    def __init__(self, name: str) -> None:
        self.num_bad_packets = 0
        self._name = name.encode()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the own write end keeps it open
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        size = fcntl.fcntl(self._read_fd, fcntl.F_GETPIPE_SZ)
        if size < _PIPE_BYTES:
            logger.warning("a pipe has %d bytes instead of %d: see fs.pipe-user-pages-soft", size, _PIPE_BYTES)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.address = DoorbellAddress(*held_here(self._write_fd))
        self._poll = select.poll()
        for fd in (self._read_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self._assembly = _Assembly()
        self._id, self._numbers = secrets.randbits(64), itertools.count()
        self._full: dict[DoorbellAddress, Outbox] = {}  # those with waiting messages
        self._lock = threading.Lock()  # guards the following
        self._open: OrderedDict[DoorbellAddress, Outbox] = OrderedDict()  # of peers
        self._closed = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up or a message; `take` returns the messages.

        For one thread, which must be done before `close`.

        Returns:
            Whether there was a wake-up or a message; if so, check everything, since there may also be more to read.
        """
        if self._closed:
            return False
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        look = self._wake_fd in ready
        with contextlib.suppress(BlockingIOError):
            if look:
                os.eventfd_read(self._wake_fd)
            if self._read_fd in ready:
                look = True
                for _ in range(_READS):
                    self._read_packet()
        return look

    def take(self) -> list[Message]:
        """The messages that `wait` has read since the last call, each sender's in its order."""
        messages, self._assembly.messages = self._assembly.messages, []
        return messages

    def send(self, address: DoorbellAddress, message: Content, *, alone: bool = False) -> bool:
        """Send a message to the owner of another doorbell, now or when there is room and `flush` is called.

        Args:
            alone: replaces the messages that wait for room.

        Returns:
            False: too many wait; this one is lost.

        Raises:
            PeerGone: the owner does not exist (any more).
            TransferCancelled: this doorbell is closed.
        """
        outbox = self._outbox(address)
        try:
            is_taken = outbox.put(message, alone=alone)
        except OSError as error:
            self._drop(address, outbox)
            raise PeerGone(f"process {address.pid} is gone: {error.strerror}") from error
        if not outbox.is_empty and self._full.get(address) is not outbox:
            self._full[address] = outbox
            self.wake()  # the flushing thread
        return is_taken

    def flush(self) -> bool:
        """Send waiting messages as far as there is room. Returns whether none wait any more. For one thread."""
        for address in list(self._full):
            if (outbox := self._full.pop(address, None)) is None:  # `forget` has removed it
                continue
            try:
                if not outbox.flush():
                    self._full.setdefault(address, outbox)  # unless `send` has replaced it
            except OSError as error:
                logger.debug("process %d is gone: %s", address.pid, error)
                self._drop(address, outbox)
        return not self._full

    def forget(self, address: DoorbellAddress) -> None:
        """Forget a bell with an owner that is gone. Idempotent."""
        with self._lock:
            outbox = self._open.pop(address, None)
        self._full.pop(address, None)
        if outbox is not None:
            outbox.close()

    def wake(self) -> None:
        """Wake the thread that waits here. Does not block, whatever its thread is doing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the descriptors, when no thread waits any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outboxes = list(self._open.values())
            self._open.clear()
            for fd in (self._read_fd, self._write_fd, self._wake_fd):
                os.close(fd)
        for outbox in outboxes:
            outbox.close()

    def _read_packet(self) -> None:
        """Read a packet. Raises BlockingIOError if there is none."""
        if not self._assembly.add(os.read(self._read_fd, _PACKET_BYTES)):
            self.num_bad_packets += 1

    def _outbox(self, address: DoorbellAddress) -> Outbox:
        """The outbox for a peer. Raises PeerGone, or TransferCancelled once this doorbell is closed."""
        with self._lock:
            if self._closed:
                raise TransferCancelled("this engine's doorbell is closed")
            outbox = self._open.get(address)
            if outbox is None:
                outbox = self._open[address] = Outbox(_open_pipe(address), self._pack)
            self._open.move_to_end(address)
            evicted = self._open.pop(self._to_evict(address)) if len(self._open) > MAX_OPEN else None
        if evicted is not None:
            evicted.close()
        return outbox

    def _to_evict(self, used: DoorbellAddress) -> DoorbellAddress:
        """The least recently used bell without waiting messages, other than the one in use; None if there is none."""
        oldest = next(iter(self._open))
        return next((address for address in self._open if address not in self._full and address != used), oldest)

    def _drop(self, address: DoorbellAddress, outbox: Outbox) -> None:
        """Drop a bell without a reader; there may be another one by now."""
        with self._lock:
            if self._open.get(address) is outbox:
                del self._open[address]
        outbox.close()

    def _pack(self, data: bytes) -> list[bytes]:
        content = _NAME.pack(len(self._name)) + self._name + data
        size = _PACKET_BYTES - _HEADER.size
        count = -(-len(content) // size)
        number = next(self._numbers) & 0xFFFFFFFF
        return [
            _HEADER.pack(self._id, number, place, count) + content[place * size : (place + 1) * size]
            for place in range(count)
        ]


class _Part(NamedTuple):
    """A message with packets still missing."""

    number: int
    num_packets: int
    packets: list[bytes]


class _Assembly:
    """Assembles messages from packets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._parts: OrderedDict[int, _Part] = OrderedDict()  # by writer

    def add(self, packet: bytes) -> bool:
        """Add a packet; False: it belongs to no message."""
        if len(packet) < _HEADER.size:
            return False
        writer, number, place, count = _HEADER.unpack_from(packet)
        part = self._parts.pop(writer, None)
        if place == 0 and 0 < count <= _MAX_PACKETS:
            part = _Part(number, count, [])
        if part is None or (number, count, place) != (part.number, part.num_packets, len(part.packets)):
            return False  # the message before it is lost
        part.packets.append(packet[_HEADER.size :])
        if len(part.packets) == count:
            return self._complete(b"".join(part.packets))
        self._parts[writer] = part
        if len(self._parts) > MAX_OPEN:
            self._parts.popitem(last=False)
        return True

    def _complete(self, content: bytes) -> bool:
        size = _NAME.unpack_from(content)[0] if len(content) >= _NAME.size else 0
        name, data = content[_NAME.size : _NAME.size + size], content[_NAME.size + size :]
        if not 0 < len(name) <= MAX_AGENT_NAME or len(data) > MAX_MESSAGE_BYTES:
            return False
        try:
            self.messages.append(Message(name.decode(), data))
        except UnicodeDecodeError:
            return False
        return True


def _open_pipe(address: DoorbellAddress) -> int:
    """The pipe of an address, opened for writing packets.

    Raises:
        PeerGone: it does not exist (any more), or belongs to another user.
    """
    try:
        fd = address.open(os.O_WRONLY, f"pipe:[{address.inode}]")
    except OSError as error:
        raise PeerGone(f"process {address.pid} has no doorbell here: {error.strerror}") from None
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)  # each write is one packet
    return fd
