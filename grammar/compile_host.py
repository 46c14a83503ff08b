"""The engine's side of `compile_process.py`: starts it, gives it one grammar after the other, and ends it."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pdkv.errors import ConfigError, InvalidRequest, StartupError
from pdkv.grammar.compile_process import END, MAX_CONTROL_BYTES, OUT_OF_MEMORY, TOKEN_BYTES, Job, Ready, Reply, Start

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For imports and the vocabulary on a machine that is busy."""

_GRACE_S = 5.0
"""How much later than its bounds a worker may answer, or be reported dead."""

_CHUNK_BYTES = 1 << 20


class Ended(NamedTuple):
    """A worker's end without an answer."""

    reason: Literal["time", "memory", "crash", "lost"]  # lost: killed from outside, or with the whole process
    detail: str = ""


class CompileHost:
    """Owns the process. Thread-safe: several threads may run jobs at once, each in a worker of its own."""

    def __init__(self, model_dir: Path, vocab_size: int, stop_token_ids: Sequence[int], memory_bytes: int) -> None:
        """Starts nothing."""
        self._start = Start(str(model_dir), vocab_size, tuple(stop_token_ids), memory_bytes)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def run(self, job: Job) -> bytes | Ended:
        """Compile a grammar; the bytes of a `CompiledGrammar`, or of the `Vocabulary`.

        Returns after the job's `wall_s` and some seconds at the latest; where the process has to be started first,
        START_TIMEOUT_S more.

        Raises:
            InvalidRequest: the grammar is wrong.
            ConfigError: no grammar can be compiled here.
            StartupError: the process did not start.
        """
        try:
            order = msgspec.msgpack.encode(job)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the grammar is no valid text: {error}", param="structured_outputs") from None
        token = os.urandom(TOKEN_BYTES)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                control = self._running()
                try:
                    socket.send_fds(control, [token], [theirs.fileno()])
                except OSError:
                    return self._lost(control)
            deadline = time.monotonic() + job.wall_s + _GRACE_S
            try:
                ours.settimeout(job.wall_s + _GRACE_S)
                ours.sendall(order)
                ours.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # a worker that is gone: what there is to read says why
            answer = _read_all(ours, deadline)
        if answer is None or len(answer) < END.size:
            return self._lost(control)
        repeated, status = END.unpack_from(answer, len(answer) - END.size)
        if repeated != token:  # the process was killed, and with it a worker in the midst of its reply
            return self._lost(control)
        return _answer(status, memoryview(answer)[: -END.size])

    def close(self) -> None:
        """End the process; jobs under way are lost."""
        self._is_closed = True
        starting = self._process
        if starting is not None:
            starting.kill()  # who waits for it, and holds the lock, sees that
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        """The control socket of a process that is ready."""
        with self._lock:
            if self._is_closed:
                raise StartupError("the engine is about to stop")
            if self._control is None:
                self._begin()
            assert self._control is not None
            return self._control

    def _begin(self) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "pdkv.grammar.compile_process", str(theirs.fileno())]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._control = control
        control.settimeout(START_TIMEOUT_S)
        try:
            if self._is_closed:
                raise OSError("it is not wanted any more")
            control.send(msgspec.msgpack.encode(self._start))
            answer = control.recv(MAX_CONTROL_BYTES)
            ready = msgspec.msgpack.decode(answer, type=Ready) if answer else None
        except OSError as error:
            self._end()
            raise StartupError(f"the process that compiles grammars did not start: {error}") from error
        if ready is None:
            code = self._end()
            raise StartupError(f"the process that compiles grammars ended with {code} before it was ready")
        if ready.error:
            self._end()
            raise ConfigError(ready.error)

    def _lost(self, control: socket.socket) -> Ended:
        """The process went away or hangs: the next job has a new one."""
        with self._lock:
            if self._control is control:
                self._end()
        return Ended("lost", "the process that compiles grammars went away")

    def _end(self) -> int | None:
        """Its exit status."""
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is None:
            return None
        process.kill()
        try:
            return process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process that compiles grammars (%d) does not end though it was killed", process.pid)
            return None


def _read_all(stream: socket.socket, deadline: float) -> bytearray | None:
    """Everything up to the end of `stream`; None where that does not come in time."""
    received = bytearray()
    try:
        while (left := deadline - time.monotonic()) > 0:
            stream.settimeout(left)
            chunk = stream.recv(_CHUNK_BYTES)
            if not chunk:
                return received
            received += chunk
    except ConnectionResetError:
        return received  # an end, too: the worker ended before it had read the whole job
    except OSError:
        pass
    return None


def _answer(status: int, reply: memoryview) -> bytes | Ended:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGPROF, signal.SIGALRM):
            return Ended("time")
        if number == signal.SIGKILL:
            return Ended("lost", "the worker was killed")
        return Ended("crash", signal.strsignal(number) or f"signal {number}")
    if os.WEXITSTATUS(status) == OUT_OF_MEMORY:
        return Ended("memory")
    if os.WEXITSTATUS(status) != 0:
        return Ended("crash", f"exit status {os.WEXITSTATUS(status)}")
    said = msgspec.msgpack.decode(reply, type=Reply)
    if said.refused:
        raise InvalidRequest(said.refused, param="structured_outputs")
    return said.data
