"""By which doors others could reach a deployment's processes: sockets that listen, and memory with a name, from /proc.

A door's label, such as "unix: control.sock", is what SECURITY.md calls it in its table.
"""

import contextlib
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from deployments import Running

from pdkv.connector_kit.rig.sockets import Listener, listeners

SECURITY_PAGE = Path(__file__).parents[2] / "SECURITY.md"
_LABEL = re.compile(r"`((?:tcp|udp|unix|abstract|memfd|shm|fifo): [^`]+)`")
_DELETED = " (deleted)"
_OF_OPTIONS = {"--join-listen", "--publish-kv-events"}


def documented_doors() -> set[str]:
    """The labels in SECURITY.md."""
    return set(_LABEL.findall(SECURITY_PAGE.read_text()))


def processes_of(deployment: Running) -> list[psutil.Process]:
    """The launcher and all that runs below it, and the same of engines elsewhere."""
    launchers = [psutil.Process(running.process.pid) for running in (deployment, *deployment.elsewhere)]
    return [process for launcher in launchers for process in (launcher, *launcher.children(recursive=True))]


def doors_of(deployment: Running) -> Mapping[str, set[int]]:
    """All doors of a deployment by label, each with the processes that have it."""
    named = {("127.0.0.1", urlsplit(deployment.url).port): "tcp: --port"}
    for host, port in (engine.listen for engine in deployment.elsewhere if engine.listen is not None):
        named |= {(host, port): "tcp: --listen", (host, port + 1): "tcp: --listen, the port above"}
    command = [str(part) for part in deployment.process.args]
    for option in _OF_OPTIONS.intersection(command):
        where = urlsplit(command[command.index(option) + 1])
        named |= {(where.hostname or "", where.port): f"tcp: {option}"}
    engines = deployment.pids()
    found: dict[str, set[int]] = {}
    for process in processes_of(deployment):
        labels = {_listener_label(listener, named) for listener in listeners(process.pid)}
        labels.update(_udp(process.pid), _memory(process.pid))
        for label in labels:
            for name in engines:
                label = re.sub(rf"\b{re.escape(name)}\b", "ENGINE", label)
            found.setdefault(label, set()).add(process.pid)
    return found


def _listener_label(listener: Listener, named: Mapping[Any, str]) -> str:
    if listener.family != socket.AF_UNIX:
        return named.get(listener.address, f"tcp: {listener.address[0]}")
    path = str(listener.address)
    if path.startswith("\0"):
        if listener.type == socket.SOCK_DGRAM:
            return "abstract: datagrams"
        return "abstract: " + re.sub(r"-[0-9a-f]+$", "-*", path[1:])
    return f"unix: {Path(path).name}"


def _udp(pid: int) -> Iterator[str]:
    for connection in psutil.Process(pid).net_connections("udp"):
        yield f"udp: {connection.laddr}"


def _memory(pid: int) -> Iterator[str]:
    """Memory files that are open or mapped, and pipes with a name."""
    paths = {line.split(None, 5)[5].strip() for line in _lines(pid, "maps") if len(line.split(None, 5)) > 5}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            paths.add(link)
            if link.startswith("/") and stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode):
                yield f"fifo: {Path(link).name}"
    for path in paths:
        if path.startswith("/memfd:"):
            yield "memfd: " + path.removeprefix("/memfd:").removesuffix(_DELETED)
        elif path.startswith("/dev/shm/"):
            name = path.removeprefix("/dev/shm/")
            yield "shm: " + re.sub(r"_[0-9a-f]+$", "_*", name.removesuffix(_DELETED)) + _still(name)


def _still(name: str) -> str:
    """What can still be opened by its name is another door than what cannot."""
    return "" if name.endswith(_DELETED) else ", with its name"


def _lines(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().splitlines()
