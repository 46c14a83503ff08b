"""The process that compiles grammars: it holds the library and the vocabulary, and forks a worker for each grammar.

A worker has bounds on time and memory that the kernel enforces, so that nothing that a grammar makes the library do
(loop, abort, overflow its stack, take all memory) harms more than the worker. Workers die with this process, and it
ends when the engine's end of the control socket is closed.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from pdkv.errors import ConfigError, InvalidRequest
from pdkv.grammar.compiled import serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.library import own_process
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary
from pdkv.host.linux import die_with_parent, set_process_name

MAX_CONTROL_BYTES = 1 << 16
"""Of one message of the control socket."""

OUT_OF_MEMORY = 3
"""Exit status of a worker that was at its bound."""

TOKEN_BYTES = 16
"""Of the random message that a job's socket is sent with."""

END = struct.Struct(f"<{TOKEN_BYTES}si")
"""What a job's socket gives last: the job's token, and the worker's exit status as `waitpid` has it.

By the token a status is told from the last bytes of a reply that was cut off.
"""


class Start(msgspec.Struct, frozen=True):
    """First message to the process, which answers with `Ready`."""

    model_dir: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    memory_bytes: int  # that a worker may take


class Ready(msgspec.Struct, frozen=True):
    """The process takes jobs; or it cannot, for the reason given."""

    error: str = ""


class Job(msgspec.Struct, frozen=True):
    """A grammar to compile, over a socket of its own whose other end went to the process."""

    grammar: Grammar | None  # None: the vocabulary is asked for
    cpu_s: float  # time after which the worker is killed (SIGPROF)
    wall_s: float  # the same by the clock on the wall (SIGALRM)


class Reply(msgspec.Struct, frozen=True):
    """What the worker says before it exits with 0. END follows."""

    data: bytes = b""  # of a `CompiledGrammar`, or of the `Vocabulary`
    refused: str = ""  # why the grammar is wrong


def main(control_fd: int) -> None:
    """Serve until the engine is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the engine says when to end
    os.nice(10)
    set_process_name("pdkv-grammar")
    control = socket.socket(fileno=control_fd)
    request = control.recv(MAX_CONTROL_BYTES)
    if not request:
        return
    start = msgspec.msgpack.decode(request, type=Start)
    try:
        own_process()
        vocabulary = Vocabulary.load(Path(start.model_dir), start.vocab_size, start.stop_token_ids)
    except ConfigError as error:
        control.send(msgspec.msgpack.encode(Ready(error=str(error))))
        return
    compiler = Compiler(vocabulary)
    gc.collect()
    gc.freeze()  # what workers share with this process stays shared
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started by an import: forked workers would hang"
    control.send(msgspec.msgpack.encode(Ready()))
    _serve(control, compiler, start.memory_bytes)


def _serve(control: socket.socket, compiler: Compiler, memory_bytes: int) -> None:
    """Fork a worker for each socket that comes, and tell that socket how its worker ended. Warm up meanwhile."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    is_cold = True
    while True:
        ready = selector.select(0 if is_cold else None)
        if not ready:
            is_cold = compiler.warm_up()
        for key, _ in ready:
            if key.fileobj is not control:
                selector.unregister(key.fileobj)
                _tell_end(key.fd, *key.data)
                continue
            token, fds, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1)
            if not token:
                return
            job = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                _work(job, compiler, memory_bytes)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, job, token))


def _tell_end(pidfd: int, pid: int, job: socket.socket, token: bytes) -> None:
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    job.settimeout(1.0)  # so few bytes have room, unless nobody reads
    with job, contextlib.suppress(OSError):
        job.sendall(END.pack(token, status))
        job.shutdown(socket.SHUT_RDWR)  # workers that began meanwhile have it, too: to close it ends nothing


def _work(job: socket.socket, compiler: Compiler, memory_bytes: int) -> NoReturn:
    """A worker's life."""
    try:
        die_with_parent()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # the library's remarks on a client's grammar
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory is short, a worker goes first
        with job.makefile("rb") as stream:
            order = msgspec.msgpack.decode(stream.read(), type=Job)
        _bound(order, memory_bytes)
        reply = msgspec.msgpack.encode(_reply(compiler, order.grammar))
        signal.setitimer(signal.ITIMER_PROF, 0)
        job.sendall(reply)
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


def _bound(order: Job, memory_bytes: int) -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, order.wall_s)


def _reply(compiler: Compiler, grammar: Grammar | None) -> Reply:
    try:
        if grammar is None:
            return Reply(data=compiler.vocabulary.to_bytes())
        return Reply(data=serialize(compiler.compile(grammar), grammar))
    except (InvalidRequest, RuntimeError) as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        if isinstance(error, InvalidRequest):
            return Reply(refused=str(error))
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # at once, and workers with it: to take down what was loaded takes seconds
