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
from typing import Any

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.rank import HostedRank, resource_usage
from pdkv.connectors.base import ConnectorConfig
from pdkv.errors import ConfigError, IncompatiblePeers

STACKS_SIGNAL = signal.SIGUSR1
"""The signal that makes a host write the stacks of its threads to its file."""


class Host:
    """Answers calls one at a time on the main thread, which is every engine's step thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._hosted: dict[str, Any] = {}  # with a method `close`, and those that the kit calls
        self._is_ending = False

    def serve(self) -> None:
        """Serve calls until `exit`, or until the kit is gone."""
        while not self._is_ending:
            try:
                asked = p.decode_asked(self._connection.recv_bytes())
            except EOFError:
                return
            self._send(self._answer(asked))

    def _answer(self, asked: p.Asked) -> p.AnyAnswer:
        try:
            return p.carry_out(self._hosted[asked.engine] if asked.engine else self, asked)
        except Exception as error:  # any error of the connector is a finding, which the kit judges
            trace = "".join(traceback.format_exception(error))
            incompatible, config = isinstance(error, IncompatiblePeers), isinstance(error, ConfigError)
            return p.Raised(type(error).__name__, str(error), trace, incompatible, config)

    # --- called by the kit ----------------------------------------------------------------------------------------

    def build(self, engine: str, rank: str, config: ConnectorConfig) -> p.Built:
        """Make a connector and its sides for one rank of the class `rank`, "module:Class", and a pool."""
        built: HostedRank = resolve_name(rank)(config, self._notifier(engine))
        self._hosted[engine] = built
        return built.built()

    def open_bare(self, name: str, spec: p.BareSpec) -> bytes:
        """Open one side of a bare transport; returns its address, if it has the data."""
        self._hosted[name] = side = resolve_name(spec.side)(spec)
        address: bytes = side.address
        return address

    def usage(self) -> p.Usage:
        """The descriptors, threads and memory of the process."""
        gc.collect()
        return resource_usage()

    def drop(self, engine: str) -> None:
        """Forget an engine without a word, as far as a living process can (`one_process` only)."""
        del self._hosted[engine]

    def close(self, engine: str) -> None:
        """Shut both sides and the connector down, twice: shutdown is idempotent."""
        self._hosted.pop(engine).close()

    def exit(self) -> None:
        """End the process."""
        self._is_ending = True

    # --- answers --------------------------------------------------------------------------------------------------

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
