"""Hosts made of namespaces. Where the kernel allows none, tests that need them are skipped and say why."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hosts import agent
from hosts.wire import Wire

ADDRESSES = ("10.77.0.1", "10.77.0.2")

_START_S = 30.0


class NoNamespaces(Exception):
    """This machine lets us make none."""


class Host:
    """One host: an address, and a way to run programs there. Files and process ids are those of the machine."""

    def __init__(self, address: str) -> None:
        """Raises NoNamespaces."""
        self.address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.router_url = (
            f"http://127.0.0.1:{self._listener.getsockname()[1]}"  # from outside, of a router at port 8000
        )
        self._control, theirs = socket.socketpair()
        self._directory = Path(tempfile.mkdtemp(prefix="host-"))
        (self._directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
        fds = theirs.fileno(), self._listener.fileno()
        self._agent = subprocess.Popen(
            [
                *("unshare", "--user", "--map-root-user", "--net", "--mount", "--ipc"),
                *(sys.executable, "-P", agent.__file__, address, str(self._directory / "boot_id"), *map(str, fds)),
            ],
            pass_fds=fds, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        theirs.close()
        self._control.settimeout(_START_S)
        try:
            said, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
            if said != b"ready":
                raise NoNamespaces(said.decode() or self._last_words())
        except BaseException:
            self.close()
            raise
        (self.packets,) = fds  # a descriptor: what the host sends, and what it shall receive

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs there."""
        enter = ("nsenter", "--target", str(self._agent.pid), "--user", "--net", "--mount", "--ipc")
        return [*enter, "--preserve-credentials", "--", *arguments]

    def close(self) -> None:
        """End it, when nothing runs there any more. Idempotent."""
        self._control.close()
        self._listener.close()
        self._agent.wait(_START_S)
        assert self._agent.stderr is not None
        self._agent.stderr.close()
        if hasattr(self, "packets"):
            os.close(self.packets)
            del self.packets
        shutil.rmtree(self._directory, ignore_errors=True)

    def _last_words(self) -> str:
        assert self._agent.stderr is not None
        return self._agent.stderr.read().strip()[-500:]


class Hosts:
    """Two hosts and the wire between them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.first, self.second = hosts
        self.wire = Wire([host.packets for host in hosts])

    def close(self) -> None:
        """End them."""
        self.wire.close()
        for host in (self.first, self.second):
            host.close()


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts for a block. Raises NoNamespaces."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for address in ADDRESSES:
            hosts.append(Host(address))
            stack.callback(hosts[-1].close)
        pair = Hosts(hosts)
        stack.callback(pair.wire.close)
        yield pair


@contextlib.contextmanager
def hosts_or_skip() -> Iterator[Hosts]:
    """The same for a test or a fixture, which are skipped where there can be no hosts."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except (NoNamespaces, FileNotFoundError) as error:
            pytest.skip(f"needs network namespaces of its own (unshare --user --net, /dev/net/tun): {error}")
        yield hosts
