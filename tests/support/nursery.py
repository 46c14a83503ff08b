"""Processes of tests that begin in milliseconds: forked by one that has imported what they need.

A script calls `run_nursery` as its main program; `Forked(script, …)` is one of its processes, which obeys lines of JSON
and answers each by one.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, TextIO

from traffic import stop_process


class _Nursery:
    """Forks a process for every datagram that it gets."""

    def __init__(self, script: str) -> None:
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen([sys.executable, script, str(there.fileno())], pass_fds=[there.fileno()])
        there.close()

    def fork(self, arguments: str) -> tuple[int, socket.socket]:
        """(pid, the socket on which it obeys)."""
        mine, theirs = socket.socketpair()
        socket.send_fds(self._control, [arguments.encode()], [theirs.fileno()])
        theirs.close()
        return int(self._control.recv(64)), mine

    def close(self) -> None:
        """End it."""
        self._control.close()
        self._process.wait()


@cache
def _nursery(script: str) -> _Nursery:
    nursery = _Nursery(script)
    atexit.register(nursery.close)
    return nursery


class Forked:
    """A process of a script, which says what it is (`said`) and then obeys."""

    def __init__(self, script: str, arguments: Any) -> None:
        self.pid, self._socket = _nursery(script).fork(json.dumps(arguments))
        self._pidfd = os.pidfd_open(self.pid)
        self._socket.settimeout(60.0)
        self._answers = self._socket.makefile("r")
        self.said = self.answer()

    def tell(self, *words: Any) -> None:
        """Say a line; its `answer` follows."""
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def ask(self, *words: Any) -> Any:
        """Say a line and wait for the answer."""
        self.tell(*words)
        return self.answer()

    def answer(self) -> Any:
        """The next line that it says."""
        return json.loads(self._answers.readline())

    def signal(self, number: int) -> None:
        """Send it a signal, and wait until it is stopped or has ended where that is what the signal does."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGSTOP:
                stop_process(self.pid)
            else:
                signal.pidfd_send_signal(self._pidfd, number)
        if number == signal.SIGKILL:
            self._wait_for_end()

    def close(self) -> None:
        """End it: by itself where it still can. Idempotent."""
        if self._answers.closed:
            return
        self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._wait_for_end()
        finally:
            self.signal(signal.SIGKILL)
            os.close(self._pidfd)
            self._answers.close()
            self._socket.close()

    def _wait_for_end(self) -> None:
        """Its end of the socket closes with it."""
        with contextlib.suppress(ConnectionResetError):
            while self._answers.readline():
                pass


def run_nursery(live: Callable[[Any, TextIO, Callable[[Any], None]], None]) -> None:
    """Fork until the control socket ends. A child calls `live(arguments, its lines, say)` and ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, fds, _, _ = socket.recv_fds(control, 64 * 1024, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _live(live, json.loads(data), socket.socket(fileno=fds[0]))
        os.close(fds[0])
        control.send(str(pid).encode())


def _live(live: Callable[..., None], arguments: Any, channel: socket.socket) -> None:
    """The life of a process; never returns. Two files: one for both would forget, at each answer, what it has read."""
    code = 1
    try:
        with channel.makefile("r") as lines, channel.makefile("w") as answers:

            def say(answer: Any) -> None:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()

            live(arguments, lines, say)
        code = 0
    except BaseException:  # the process ends here: nothing above could report it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
