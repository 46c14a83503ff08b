"""The process that an engine starts with its first grammar: it holds the library and the vocabulary, and forks workers.

A worker has bounds on time and memory that the kernel enforces, so nothing that a grammar makes the library do (loop,
abort, overflow its stack, take all memory) harms more than the worker. Workers end with this process, and it ends with
the engine.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from pdkv.errors import ConfigError
from pdkv.grammar.matching.messages import MAX_CONTROL_BYTES, Ended, Place, Ready, Start, encode
from pdkv.grammar.matching.slab import Slab
from pdkv.grammar.matching.vocabulary import Vocabulary
from pdkv.grammar.matching.worker import Worker
from pdkv.host.linux import die_with_parent, set_process_name


def main(start: Start, control_fd: int, slab_fd: int, event_fd: int) -> None:
    """Serve until the engine is gone."""
    die_with_parent()
    os.nice(10)
    set_process_name("pdkv-grammar")
    control = socket.socket(fileno=control_fd)
    try:
        vocabulary = Vocabulary.load(Path(start.model_dir), start.vocab_size, start.stop_token_ids)
    except ConfigError as error:
        control.send(encode(Ready(error=str(error))))
        return
    gc.collect()
    gc.freeze()  # what workers share with this process stays shared
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started by an import: forked workers would hang"
    control.send(encode(Ready()))
    _Zygote(control, start, vocabulary, Slab(slab_fd, start.shape), event_fd).serve()


class _Zygote:
    """Forks workers, and reports how they end."""

    def __init__(self, control: socket.socket, start: Start, vocabulary: Vocabulary, slab: Slab, event_fd: int) -> None:
        self._control = control
        self._start = start
        self._vocabulary = vocabulary
        self._slab = slab
        self._event_fd = event_fd
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # by worker

    def serve(self) -> None:
        """Until the engine is gone."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._selector.unregister(key.fileobj)
                    self._tell_end(key.fd, key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """Carry out the engine's next order; False: it is gone."""
        data, fds, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
        if not data:
            return False
        worker = msgspec.msgpack.decode(data, type=Place).worker
        if fds:
            with socket.socket(fileno=fds[0]) as sock:
                self._fork(worker, sock)
        elif worker in self._pids:
            os.kill(self._pids[worker], signal.SIGKILL)
        return True

    def _fork(self, worker: int, sock: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory
            self._control.send(encode(Ended(worker, signal.SIGKILL)))
            return
        if pid == 0:
            self._work(worker, sock)
        self._pids[worker] = pid
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, worker)

    def _tell_end(self, pidfd: int, worker: int) -> None:
        os.close(pidfd)
        _, status = os.waitpid(self._pids.pop(worker), 0)
        self._control.send(encode(Ended(worker, status)))

    def _work(self, worker: int, sock: socket.socket) -> NoReturn:
        """Run a worker."""
        try:
            die_with_parent()
            self._control.close()
            self._selector.close()
            self._slab.pids[worker] = os.getpid()
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 2)  # the library's remarks on a client's grammar
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")  # if memory is short, a worker goes first
            in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (in_use + self._start.memory_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            made = Worker(
                sock, worker, self._vocabulary, self._slab, event_fd=self._event_fd, time_s=self._start.time_s
            )
            made.run()
            os._exit(0)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Start), *map(int, sys.argv[2:]))
    os._exit(0)  # at once, and workers with it: to take down what was loaded takes time
