"""A process that hosts a connector and acts as one rank of an engine (if `one_process`: as several engines)."""

import faulthandler
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Protocol

import msgspec

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.rank import HostedRank, resource_usage
from pdkv.errors import ConfigError, IncompatiblePeers

STACKS_SIGNAL = signal.SIGUSR1
"""The signal that makes a host write the stacks of its threads to its file."""


class Hosted(Protocol):
    """The object hosted under an engine's name."""

    def run(self, command: p.AnyCommand) -> object:
        """Execute one command of the kit."""

    def close(self) -> None:
        """Release all resources."""


class Host:
    """Answers commands one at a time on the main thread, which is every engine's step thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._ranks: dict[str, Hosted] = {}

    def serve(self) -> None:
        """Serve commands until Exit, or until the kit is gone."""
        while True:
            try:
                asked = p.decode_command(self._connection.recv_bytes())
            except EOFError:
                return
            try:
                said = None if isinstance(asked.command, p.Exit) else self._run(asked.engine, asked.command)
                answer: p.AnyAnswer = p.Answered(msgspec.Raw(p.encode(said)))
            except Exception as error:  # any error of the connector is a finding, which the kit judges
                trace = "".join(traceback.format_exception(error))
                incompatible = isinstance(error, IncompatiblePeers)
                config = isinstance(error, ConfigError)
                answer = p.Raised(type(error).__name__, str(error), trace, incompatible, config)
            self._send(answer)
            if isinstance(asked.command, p.Exit):
                return

    def _run(self, engine: str, command: p.AnyCommand) -> object:
        match command:
            case p.Build():
                rank: HostedRank = resolve_name(command.rank)(command, self._notifier(engine))
                self._ranks[engine] = rank
                return rank.built()
            case p.OpenBare():
                self._ranks[engine] = side = resolve_name(command.side)(command)
                return side.address
            case p.GetUsage():
                gc.collect()
                return resource_usage()
            case p.Drop():
                del self._ranks[engine]
                return None
            case p.Close():
                self._ranks.pop(engine).close()
                return None
        return self._ranks[engine].run(command)

    def _notifier(self, engine: str) -> Callable[[], None]:
        def notify() -> None:
            self._send(p.Woken(engine))

        return notify

    def _send(self, answer: p.AnyAnswer) -> None:
        data = p.encode(answer)
        with self._send_lock:
            self._connection.send_bytes(data)


def main(fd: int, stacks_path: str) -> None:
    """Serve the kit at the other end of `fd`."""
    stacks = open(stacks_path, "wb", buffering=0)  # noqa: SIM115 -- as long as the process lives
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kit ends its hosts itself
    connection = Connection(os.dup(fd))
    os.close(fd)
    Host(connection).serve()
