"""One bare TCP connection from the first host to the second: what the wire gives to a message, timed by its sender.

As a program: "receive ADDRESS SIZE" prints its port, "send ADDRESS PORT SIZE" a number of seconds for each line that it
reads.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hosts.machine import Hosts

WAIT_S = 60.0


class BareStream:
    """The owner's side. A context manager."""

    def __init__(self, hosts: "Hosts", num_bytes: int) -> None:
        address = hosts.second.address
        self._receiver = self._start(hosts.second.command, "receive", address, str(num_bytes))
        port = self._read(self._receiver)
        self._sender = self._start(hosts.first.command, "send", address, port, str(num_bytes))

    def __enter__(self) -> "BareStream":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._sender, self._receiver):
            process.communicate(timeout=WAIT_S)

    def move(self) -> float:
        """Send the message; seconds until all of it was read there and the sender knows."""
        assert self._sender.stdin is not None
        self._sender.stdin.write("\n")
        return float(self._read(self._sender))

    def _start(self, command: Callable[..., list[str]], *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command(sys.executable, "-P", __file__, *arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def _read(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the bare stream has ended"
        return line.strip()


# --- on the hosts -------------------------------------------------------------------------------------------------


def _receive(address: str, num_bytes: int) -> None:
    memory = memoryview(bytearray(num_bytes))
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        while True:
            received = 0
            while received < num_bytes:
                if not (count := connection.recv_into(memory[received:])):
                    return
                received += count
            connection.sendall(b"\1")


def _send(address: str, port: int, num_bytes: int) -> None:
    memory = bytes(num_bytes)
    with socket.create_connection((address, port)) as connection:
        for _ in sys.stdin:
            began = time.perf_counter()
            connection.sendall(memory)
            if connection.recv(1):
                print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2], int(sys.argv[3]))
    else:
        _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
