"""The fork server: imports torch and the engine once, then forks engines that are ready to compute at once.

It runs no operation, starts no thread and opens no ZeroMQ context: after one parallel torch operation before a fork,
the child's first one hangs for good. An engine is forked twice, so that it becomes the launcher's own child (a
subreaper) and outlives this process.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback

from pdkv.host.linux import set_process_name
from pdkv.launch.specs import EngineSpec, decode

PRELOADED = ("torch", "pdkv.assemble.engine", "pdkv.launch.engine_process")
MAX_SPEC_BYTES = 64 * 1024
MAX_FDS = 250  # descriptors of one request; the kernel allows 253
ENVIRONMENT = {
    # Idle OpenMP threads sleep, since engines share the cores. Must be set before torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    # numpy's BLAS starts its threads when it is imported; a forked child would miss them.
    "OPENBLAS_NUM_THREADS": "1",
}


def main(control_fd: str, lifeline_fd: str, connector_target: str) -> None:
    """Import, then serve until the launcher closes its end of the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name("pd fork-server")
    _preload(connector_target)
    try:
        _serve(socket.socket(fileno=int(control_fd)), int(lifeline_fd))
    except (BrokenPipeError, ConnectionResetError):
        return  # the answer is no longer awaited


def _preload(connector_target: str) -> None:
    """Import what engines need. Raises RuntimeError if that started a thread."""
    for module in PRELOADED:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # the engines will report the error
        importlib.import_module(connector_target.partition(":")[0])
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it marks
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: a forked engine would hang")


def _serve(control: socket.socket, lifeline_fd: int) -> None:
    """Serve requests. Each is one datagram: an engine spec, the descriptor on which the engine acknowledges, its ranks'
    sockets.

    The answer is the engine's pid as text; the first answer, "ready", says that the imports are done.
    """
    control.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_SPEC_BYTES, MAX_FDS)
        if not data:
            return
        pid = _fork_engine(data, control, fds, lifeline_fd)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _fork_engine(spec: bytes, control: socket.socket, fds: list[int], lifeline_fd: int) -> int:
    """Fork an engine and return its pid; when this returns, only the subreaper is its parent."""
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(write_fd, str(pid).encode())
            os._exit(0)
        os.close(read_fd)
        os.close(write_fd)
        control.close()
        _engine(spec, fds, lifeline_fd)
    os.close(write_fd)
    os.waitpid(middle, 0)
    with os.fdopen(read_fd) as reader:
        return int(reader.read())


def _engine(spec: bytes, fds: list[int], lifeline_fd: int) -> None:
    """The life of a forked engine; never returns into the server's frames."""
    code = 1
    try:
        from pdkv.launch.engine_process import run_engine

        os.setpgid(0, 0)
        ack_fd, *rank_fds = fds
        code = run_engine(decode(spec, EngineSpec), ack_fd, lifeline_fd, rank_fds)
    except BaseException:  # the process ends here: no caller could report it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
