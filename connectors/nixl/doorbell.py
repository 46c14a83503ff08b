"""Wakes the message thread of a rank on this host, and brings it messages: NIXL has no descriptor to wait on.

Every rank has a pipe without a name. A peer opens it through /proc/<pid>/fd/<fd>, which the kernel allows to processes
of the same user only (as it does all else that peers within a host do to each other): strangers cannot knock at all.
The pipe holds packets, each written and read at once. One byte says "let NIXL work", nothing else: one too many costs a
look. A message is one packet, or several in order.
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
import time
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from pdkv.connectors.nixl.agent import MAX_AGENT_NAME, MAX_MESSAGE_BYTES, Message
from pdkv.errors import PeerGone, TransferError
from pdkv.host.process_info import process_start_time

logger = logging.getLogger(__name__)

MAX_OPEN = 256
"""Peers whose bells are kept open."""

_PACKET_BYTES = 4096  # PIPE_BUF: what is written at once
_HEADER = struct.Struct("<QIHH")  # a writer's own number, the message's, the packet's place in it, and how many it has
_NAME = struct.Struct("<H")  # begins the first packet's content: the length of the sender's name, which follows
_MAX_PACKETS = -(-(MAX_MESSAGE_BYTES + MAX_AGENT_NAME + _NAME.size) // (_PACKET_BYTES - _HEADER.size))
_PIPE_BYTES = 256 << 10
"""Wanted: 64 packets. A user may have 64 MiB in pipes (fs.pipe-user-pages-soft); beyond that a pipe has 2 packets."""

_READS = 256
"""Packets that are read before the thread looks at something else, however fast somebody writes on."""

_WRITE_S = 0.01
"""A write that waits for nothing takes microseconds: who comes behind it looks again after so long, if nobody says."""

_RING = b"\0"


class DoorbellAddress(msgspec.Struct, frozen=True, array_like=True):
    """How a peer on the same host gets at a bell; travels in the engine's card."""

    pid: int
    start_time: int  # of the process: tells a recycled pid
    fd: int
    inode: int


class Doorbell:
    """A pipe for peers, and an eventfd for oneself.

    Args:
        name: as which messages are sent.
    """

    def __init__(self, name: str) -> None:
        self.num_bad_packets = 0
        self._name = name.encode()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the own end for writing keeps it open
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        size = fcntl.fcntl(self._read_fd, fcntl.F_GETPIPE_SZ)
        if size < _PIPE_BYTES:
            logger.warning("a pipe of %d bytes instead of %d: see fs.pipe-user-pages-soft", size, _PIPE_BYTES)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pid = os.getpid()
        start_time = process_start_time(pid)
        assert start_time is not None
        self.address = DoorbellAddress(pid, start_time, self._write_fd, os.fstat(self._write_fd).st_ino)
        self._poll = select.poll()
        for fd in (self._read_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self._assembly = _Assembly()
        self._id, self._numbers = secrets.randbits(64), itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._open: OrderedDict[DoorbellAddress, _Pipe] = OrderedDict()  # peers'
        self._closed = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody rings, wakes or writes; messages that have come are for `take`.

        For one thread, which is done before `close`.

        Returns:
            Whether there was a ring or a wake, or there may be more to read: look at everything.
        """
        if self._closed:
            return False
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        look = self._wake_fd in ready
        with contextlib.suppress(BlockingIOError):
            if look:
                os.eventfd_read(self._wake_fd)
            if self._read_fd in ready:
                for _ in range(_READS):
                    look |= self._read_packet()
                look = True
        return look

    def take(self) -> list[Message]:
        """The messages that `wait` has read since the last call, each sender's in its order."""
        messages, self._assembly.messages = self._assembly.messages, []
        return messages

    def ring(self, address: DoorbellAddress) -> None:
        """Wake the owner of another doorbell, if it is there; its pipe may be full, then it will look anyway."""
        with contextlib.suppress(PeerGone):
            self._write(address, [_RING], 0.0)

    def send(self, address: DoorbellAddress, data: bytes, timeout_s: float) -> None:
        """Send a message to the owner of another doorbell.

        Raises:
            PeerGone: nobody is there (any more).
            TransferError: it has left its pipe full for so long.
        """
        content = _NAME.pack(len(self._name)) + self._name + data
        size = _PACKET_BYTES - _HEADER.size
        count = -(-len(content) // size)
        number = next(self._numbers) & 0xFFFFFFFF
        packets = [
            _HEADER.pack(self._id, number, place, count) + content[place * size : (place + 1) * size]
            for place in range(count)
        ]
        if not self._write(address, packets, timeout_s):
            raise TransferError(f"process {address.pid} takes no messages")

    def forget(self, address: DoorbellAddress) -> None:
        """Its owner is gone. Idempotent."""
        with self._lock:
            pipe = self._open.pop(address, None)
        if pipe is not None:
            pipe.close()

    def wake(self) -> None:
        """Wake who waits here. Does not block, whatever its thread is doing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Give the descriptors back, when nobody waits any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pipes = list(self._open.values())
            self._open.clear()
            for fd in (self._read_fd, self._write_fd, self._wake_fd):
                os.close(fd)
        for pipe in pipes:
            pipe.close()

    def _read_packet(self) -> bool:
        """Read one packet; whether it is a ring. Raises BlockingIOError where there is none."""
        packet = os.read(self._read_fd, _PACKET_BYTES)
        if packet == _RING:
            return True
        if not self._assembly.add(packet):
            self.num_bad_packets += 1
        return False

    def _write(self, address: DoorbellAddress, packets: list[bytes], timeout_s: float) -> bool:
        """False: the pipe is full. Raises PeerGone."""
        with self._lock:
            if self._closed:
                raise PeerGone("the own doorbell is closed")
            pipe = self._open.get(address)
            if pipe is None:
                fd = _open_pipe(address)
                if fd is None:
                    raise PeerGone(f"process {address.pid} is gone, or shows no doorbell here")
                pipe = self._open[address] = _Pipe(fd)
            self._open.move_to_end(address)
            oldest = self._open.popitem(last=False)[1] if len(self._open) > MAX_OPEN else None
        if oldest is not None:
            oldest.close()
        try:
            return pipe.write(packets, timeout_s)
        except OSError as error:
            self.forget(address)
            raise PeerGone(f"process {address.pid} is gone: {error.strerror}") from error


class _Pipe:
    """A peer's. What is written to it together is not interrupted by another thread of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()  # guards what follows
        self._has_writer = False
        self._is_full = False  # its writer waits for room
        self._closed = False

    def write(self, packets: list[bytes], timeout_s: float) -> bool:
        """Write all; False: it was full for so long, or is closed. Raises OSError where nobody reads any more."""
        deadline = time.monotonic() + timeout_s
        if not self._begin(deadline):
            return False
        try:
            return all(self._write_packet(packet, deadline) for packet in packets)
        finally:
            self._end()

    def close(self) -> None:
        """Idempotent. Who writes is not waited for."""
        with self._changed:
            if not self._closed:
                self._closed = True
                if not self._has_writer:
                    os.close(self._fd)
            self._changed.notify_all()

    def _begin(self, deadline: float) -> bool:
        """Become its writer, once the one before has ended; who waits for room is waited for until the deadline."""
        with self._changed:
            while self._has_writer and not self._closed:
                left_s = deadline - time.monotonic()
                if self._is_full and left_s <= 0:
                    return False
                self._changed.wait(left_s if self._is_full else _WRITE_S)
            if self._closed:
                return False
            self._has_writer = True
            return True

    def _end(self) -> None:
        with self._changed:
            self._has_writer = False
            if self._closed:
                os.close(self._fd)
            self._changed.notify()

    def _write_packet(self, packet: bytes, deadline: float) -> bool:
        while not self._closed:
            try:
                os.write(self._fd, packet)
                return True
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._wait_for_room(left_s)
        return False

    def _wait_for_room(self, timeout_s: float) -> None:
        with self._changed:
            self._is_full = True
            self._changed.notify_all()  # who cannot wait goes
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(timeout_s * 1000)
        with self._changed:
            self._is_full = False


class _Part(NamedTuple):
    """A message whose last packets have not come."""

    number: int
    num_packets: int
    packets: list[bytes]


class _Assembly:
    """Makes messages of packets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._parts: OrderedDict[int, _Part] = OrderedDict()  # by writer

    def add(self, packet: bytes) -> bool:
        """A packet; False: it belongs to no message."""
        if len(packet) < _HEADER.size:
            return False
        writer, number, place, count = _HEADER.unpack_from(packet)
        part = self._parts.pop(writer, None)
        if place == 0 and 0 < count <= _MAX_PACKETS:
            part = _Part(number, count, [])
        if part is None or (number, count, place) != (part.number, part.num_packets, len(part.packets)):
            return False  # what came before it is lost
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


def _open_pipe(address: DoorbellAddress) -> int | None:
    """The pipe that an address means, for writing packets; None: it is not there (any more), or not ours to open."""
    path = f"/proc/{address.pid}/fd/{address.fd}"
    link = f"pipe:[{address.inode}]"
    try:
        if address.fd < 0 or os.readlink(path) != link or process_start_time(address.pid) != address.start_time:
            return None  # never open what may be something else
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        logger.debug("no doorbell at %s: %s", path, error)
        return None
    if os.fstat(fd).st_ino == address.inode:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)  # a packet each
        return fd
    os.close(fd)
    return None
