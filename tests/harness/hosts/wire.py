"""The wire between two hosts: passes IP packets on, and does to them what a bad network does.

It is a process of its own: its arguments are two descriptors of packets, commands are JSON lines on standard input,
each of which it answers, and there is a line for every event that was asked for. It lives below TCP, so connections are
held up, retransmit and are reset as between real hosts.
"""

import json
import os
import queue
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WAIT_S = 20.0

CONTROL_PORTS = {7000, 7001}
"""At which engines listen for routers."""

_MAX_PACKET_BYTES = 1 << 16
_MAX_QUEUED_BYTES = 64 << 20
_TCP = 6
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16

Flow = tuple[bytes, bytes]
"""(addresses, ports) of one direction of a TCP connection."""


class Wire:
    """The owner's side: starts the process and gives it orders."""

    def __init__(self, fds: Sequence[int]) -> None:
        """`fds`: the packets of each host. They stay the caller's."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *map(str, fds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=tuple(fds),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )  # fmt: skip
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def delay(self, one_way_s: float) -> None:
        """Each packet arrives so much later."""
        self._ask("delay", one_way_s)

    def limit(self, bytes_per_s: float | None) -> None:
        """Bandwidth, each way; None: as fast as it can."""
        self._ask("limit", bytes_per_s)

    def lose(self, what: str = "all", share: float = 1.0) -> None:
        """From now on such packets do not arrive, and nobody is told.

        `what`: "all"; "control", between routers and engines; or "kv", all other. `share`: the part of them, by chance.
        """
        self._ask("lose", what, share)

    def cut(self) -> None:
        """Reset every connection that there is; new ones may be made."""
        self._ask("cut")

    def mend(self) -> None:
        """Everything arrives again."""
        self._ask("mend")

    def after(self, num_bytes: int, what: str) -> None:
        """Do `what` ("lose" or "cut") by itself when so many more bytes have passed from one host, the sum of both."""
        self._ask("after", num_bytes, what)

    def wait(self, what: str) -> None:
        """Until what `after` was told has been done."""
        found = self._events.get(timeout=WAIT_S)
        assert found == what, f"{found} instead of {what}"

    def num_bytes(self) -> list[int]:
        """Bytes that arrived so far, from the first host and from the second."""
        counts: list[int] = self._ask("count")
        return counts

    def close(self) -> None:
        """End it. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._reader.join()
        self._process.stdout.close()

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        return self._answers.get(timeout=WAIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            (self._events if "event" in message else self._answers).put(next(iter(message.values())))


class _Segment(NamedTuple):
    """What is looked at of a TCP packet."""

    flow: Flow
    ack: int
    flags: int

    @classmethod
    def of(cls, packet: bytes) -> "_Segment | None":
        """None: it is no TCP over IPv4."""
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
            return None
        start = (packet[0] & 15) * 4
        flow = (packet[12:20], packet[start : start + 4])
        return cls(flow, *struct.unpack_from(">IxB", packet, start + 8))

    @property
    def is_control(self) -> bool:
        """Whether it is between a router and an engine."""
        return not CONTROL_PORTS.isdisjoint(struct.unpack(">HH", self.flow[1]))


def _reversed(flow: Flow) -> Flow:
    addresses, ports = flow
    return addresses[4:] + addresses[:4], ports[2:] + ports[:2]


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def _reset(flow: Flow, seq: int) -> bytes:
    """The packet of this flow that ends a connection whose receiver expects byte `seq`."""
    addresses, ports = flow
    head = struct.pack(">BBHHHBBH8s", 0x45, 0, 40, 0, 0, 64, _TCP, 0, addresses)
    tcp = struct.pack(">4sIIBBHHH", ports, seq, 0, 0x50, _RST, 0, 0, 0)
    pseudo = addresses + struct.pack(">BBH", 0, _TCP, len(tcp))
    head = head[:10] + struct.pack(">H", _checksum(head)) + head[12:]
    return head + tcp[:16] + struct.pack(">H", _checksum(pseudo + tcp)) + tcp[18:]


class _Lane:
    """One direction: packets on their way, the earliest first."""

    def __init__(self, target_fd: int) -> None:
        self.target_fd = target_fd
        self.num_bytes = 0  # that have arrived
        self.queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._sent_at = 0.0  # when the last one has left the sender, with a limit

    def put(self, packet: bytes, now: float, delay_s: float, limit: float | None) -> None:
        """Send a packet on its way. What is too much is lost."""
        if limit is not None:
            now = self._sent_at = max(now, self._sent_at) + len(packet) / limit
        if not self.queue and not delay_s and limit is None:
            self._arrive(packet)
        elif self._queued_bytes < _MAX_QUEUED_BYTES:
            self._queued_bytes += len(packet)
            self.queue.append((now + delay_s, packet))

    def deliver(self, now: float) -> None:
        """What is due arrives."""
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            self._queued_bytes -= len(packet)
            self._arrive(packet)

    def clear(self) -> None:
        """What is on its way is lost."""
        self.queue.clear()
        self._queued_bytes = 0

    def _arrive(self, packet: bytes) -> None:
        self.num_bytes += len(packet)
        os.write(self.target_fd, packet)


class _Process:
    """Reads packets of both hosts and orders until the orders end."""

    def __init__(self, fds: Sequence[int]) -> None:
        first, second = fds
        self._lanes = {first: _Lane(second), second: _Lane(first)}
        self._delay_s = 0.0
        self._limit: float | None = None
        self._loses: tuple[str, float] = ("all", 0.0)
        self._chance = random.Random(0)
        self._acks: dict[Flow, tuple[int, int]] = {}  # by what a host sends: (its descriptor, byte it expects next)
        self._dead: set[Flow] = set()
        self._after: tuple[int, str] | None = None

    def run(self) -> None:
        """Serve."""
        orders = sys.stdin.fileno()
        while True:
            dues = [lane.queue[0][0] for lane in self._lanes.values() if lane.queue]
            timeout_s = max(min(dues) - time.monotonic(), 0.0) if dues else None
            readable, _, _ = select.select([*self._lanes, orders], [], [], timeout_s)
            for fd in readable:
                if fd != orders:
                    self._take(fd, os.read(fd, _MAX_PACKET_BYTES))
                elif line := sys.stdin.readline():
                    print(json.dumps({"answer": self._obey(*json.loads(line))}), flush=True)
                else:
                    return
            for lane in self._lanes.values():
                lane.deliver(time.monotonic())

    def _take(self, fd: int, packet: bytes) -> None:
        segment = _Segment.of(packet)
        if segment is not None and self._is_dead(fd, segment):
            return
        if not self._is_lost(segment):
            self._lanes[fd].put(packet, time.monotonic(), self._delay_s, self._limit)
        if self._after is not None and self._count() >= self._after[0]:
            what, self._after = self._after[1], None
            self._obey(what)
            print(json.dumps({"event": what}), flush=True)

    def _is_lost(self, segment: _Segment | None) -> bool:
        what, share = self._loses
        of_them = what == "all" or (what == "control") == (segment is not None and segment.is_control)
        return of_them and self._chance.random() < share

    def _is_dead(self, fd: int, segment: _Segment) -> bool:
        """Whether the packet belongs to a connection that was cut: then its sender is told."""
        if segment.flags & _SYN:
            self._dead.discard(segment.flow)
            self._dead.discard(_reversed(segment.flow))
        if segment.flow in self._dead:
            if not segment.flags & _RST:
                os.write(fd, _reset(_reversed(segment.flow), segment.ack))
            return True
        if segment.flags & _ACK:
            self._acks[segment.flow] = fd, segment.ack
        if segment.flags & _RST:
            self._acks.pop(segment.flow, None)
            self._acks.pop(_reversed(segment.flow), None)
        return False

    def _obey(self, command: str, *arguments: Any) -> Any:
        match command, arguments:
            case "delay", (seconds,):
                self._delay_s = seconds
            case "limit", (limit,):
                self._limit = limit
            case "lose", (*which,):
                self._loses = tuple(which) or ("all", 1.0)  # type: ignore[assignment]
            case "mend", ():
                self._loses = ("all", 0.0)
            case "cut", ():
                self._cut()
            case "after", (num_bytes, what):
                self._after = self._count() + num_bytes, what
            case "count", ():
                return [lane.num_bytes for lane in self._lanes.values()]
            case _:
                raise ValueError(f"no such command: {command} {arguments}")
        return None

    def _count(self) -> int:
        return sum(lane.num_bytes for lane in self._lanes.values())

    def _cut(self) -> None:
        for lane in self._lanes.values():
            lane.clear()
        for flow, (fd, expected) in self._acks.items():
            self._dead.add(flow)
            os.write(fd, _reset(_reversed(flow), expected))
        self._acks.clear()


if __name__ == "__main__":
    _Process([int(fd) for fd in sys.argv[1:]]).run()
