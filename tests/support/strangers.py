"""What strangers may do to a socket that listens: each attack is bounded, and leaves its connections to its caller.

An attack knows how a conversation begins there (`opening`), and what else is well-formed up to a point.
"""

import contextlib
import random
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdkv.connector_kit.rig.sockets import Listener

CROWD = 1000
CONNECT_S = 5.0
ANSWER_S = 1.0
LOOPBACK = "127.0.0.1"
"""Where everything listens but engines on TCP: these have addresses of their own (deployments.launches)."""

_RESET = struct.pack("ii", 1, 0)

_ZMTP_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
_ZMTP_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
_ZMTP_SUBSCRIBER = b"\x05READY\x0bSocket-Type\0\0\0\x03SUB"
_CURVE_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\3\0" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
_CURVE_HELLO = b"\x04\xc8\x05HELLO\x01\0" + b"\0" * 72 + b"k" * 32 + b"\0" * 7 + b"\x01" + b"b" * 80


def _zmtp(ready: bytes) -> bytes:
    return _ZMTP_GREETING + b"\x04" + bytes([len(ready)]) + ready


def opening(door: Listener) -> bytes:
    """The first bytes of who belongs there; no more than a stranger can know."""
    name = Path(str(door.address)).name
    if door.family == socket.AF_INET and door.address[0] != LOOPBACK:
        return _CURVE_GREETING + _CURVE_HELLO  # its box is made with a key that no stranger has
    if door.family != socket.AF_UNIX or name.startswith("\0"):
        return (
            b"\x81\0\x97\xa5Hello\x01\xa3p2p\xc4\x20" + bytes(32) + b"\x93\xa1p\xa11\0\x93\xa1d\xa11\0\xcb" + bytes(8)
        )
    if name == "control.sock":
        return b'{"type":"Scale","prefill":0}'  # noise may bring the end of the line: then it is refused
    if name == "admin.sock":
        return (
            b"POST /admin/drain HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
    return _zmtp(_ZMTP_SUBSCRIBER if name.endswith(".beats") else _ZMTP_READY)


def huge_lengths() -> Sequence[bytes]:
    """Announcements of more than anybody may send, in all protocols."""
    return (
        b"\xff\xff" + b"x" * 100,  # a greeting of a peer
        struct.pack("<QQ16s16s", 0, 1 << 62, b"", b""),  # a frame of one
        b"\x02" + struct.pack(">Q", 1 << 62) + b"x" * 1000,  # a ZeroMQ frame
        b"\x06" + struct.pack(">Q", (1 << 63) - 1),  # a ZeroMQ command
        b"\x02" + struct.pack(">Q", 255 << 20) + b"x" * 1000,  # a frame that may be so long, and never comes
        b"POST /admin/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n" + b"x" * 200_000,
        b'{"type":"Scale","prefill":' + b"1" * 100_000,
    )


class Crowd:
    """Connections of strangers to one door."""

    def __init__(self, door: Listener, size: int = CROWD, seed: int = 0) -> None:
        self.door = door
        self.size = size
        self.rng = random.Random(f"{door} {seed}")
        self.num_refused = 0  # were not let in, or had to go
        self._connections: list[socket.socket] = []

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def come(self, number: int) -> list[socket.socket]:
        """So many connect. One for whom there is no room at once goes away."""
        come = []
        for _ in range(max(number, 1)):
            connection = socket.socket(self.door.family, self.door.type)
            connection.settimeout(CONNECT_S)
            try:
                connection.connect(self.door.address)
            except OSError:
                self.num_refused += 1
                connection.close()
                continue
            connection.setblocking(False)
            come.append(connection)
        self._connections += come
        return come

    def leave(self, connection: socket.socket) -> None:
        """One goes, by a reset where there is such a thing."""
        self._connections.remove(connection)
        if self.door.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()

    def say(self, connection: socket.socket, data: bytes) -> bool:
        """Send what goes; False: the connection is no more."""
        try:
            connection.send(data)
        except BlockingIOError:
            return True
        except OSError:
            self.num_refused += 1
            return False
        return True

    def greet(self, connection: socket.socket) -> None:
        """Say what belongs there; with ZeroMQ one is a peer behind the answer."""
        self.say(connection, opening(self.door))
        while opening(self.door).startswith(_ZMTP_GREETING) and select.select([connection], [], [], ANSWER_S)[0]:
            with contextlib.suppress(OSError):
                if not connection.recv(4096).endswith(_ZMTP_GREETING[-32:]):
                    return  # READY, or the end


def idle(crowd: Crowd) -> None:
    """They say nothing."""
    crowd.come(crowd.size)


def half_open(crowd: Crowd) -> None:
    """They begin as if they belonged there, and stop anywhere."""
    data = opening(crowd.door)
    for connection in crowd.come(crowd.size // 4):
        crowd.say(connection, data[: crowd.rng.randrange(1, len(data) + 1)])


def one_byte_at_a_time(crowd: Crowd) -> None:
    """A slow loris: each byte in time, the greeting never."""
    data = opening(crowd.door)
    talking = crowd.come(crowd.size // 25)
    for position in range(len(data)):
        talking = [connection for connection in talking if crowd.say(connection, data[position : position + 1])]
        select.select([], [], [], 0.0005)


def gone_at_once(crowd: Crowd) -> None:
    """Connect and reset, in a loop."""
    for _ in range(crowd.size // 10):
        for connection in crowd.come(10):
            crowd.leave(connection)


def truncated(crowd: Crowd) -> None:
    """A part of what belongs there, then the end."""
    data = opening(crowd.door) + b"\0" + bytes([200]) + b"x" * 100
    for connection in crowd.come(crowd.size // 4):
        crowd.say(connection, data[: crowd.rng.randrange(len(data))])
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)


def huge(crowd: Crowd) -> None:
    """Lengths that nobody means, at the beginning and behind a greeting."""
    for data in huge_lengths():
        for number, connection in enumerate(crowd.come(4)):
            if number % 2:
                crowd.greet(connection)
            crowd.say(connection, data)


def noise(crowd: Crowd) -> None:
    """Random bytes, behind an opening or instead of one."""
    for number, connection in enumerate(crowd.come(crowd.size // 4)):
        data = crowd.rng.randbytes(crowd.rng.randrange(1, 3000))
        crowd.say(connection, opening(crowd.door) + data if number % 2 else data)


def deaf(crowd: Crowd) -> None:
    """They say what belongs there again and again, and read nothing."""
    data = opening(crowd.door)
    for connection in crowd.come(crowd.size // 25):
        for _ in range(50):
            if not crowd.say(connection, data):
                break


ATTACKS: Mapping[str, Callable[[Crowd], None]] = {
    attack.__name__: attack
    for attack in (idle, half_open, one_byte_at_a_time, gone_at_once, truncated, huge, noise, deaf)
}
