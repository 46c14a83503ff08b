"""The kit's fork server: it has imported torch, and forks a host for every datagram that it receives.

Hosts die with it (by signal, so that a stopped one dies too), and it dies with the kit, whose end of the socket it
watches.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback

from pdkv.host.linux import die_with_parent

PRELOADED = ("torch", "numpy", "pdkv.connector_kit.rig.host", "pdkv.connectors.memory.connector")
MAX_REQUEST_BYTES = 4096


def main(control_fd: int) -> None:
    """Import, then fork hosts until the kit is gone. A request is a path for stacks, and a host's end of its pipe."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: the kit watches its hosts by their pidfds
    control = socket.socket(fileno=control_fd)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started by an import: forked hosts would hang"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the kit did not wait for an answer
        _serve(control)


def _serve(control: socket.socket) -> None:
    control.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not data:
            return
        if os.fork() == 0:
            _host(control, fds[0], data.decode())
        os.close(fds[0])


def _host(control: socket.socket, fd: int, stacks_path: str) -> None:
    """The life of a host; never returns.

    It reports its pid to the kit only once it is bound to die with this process: the kit may stop it at once.
    """
    code = 1
    try:
        die_with_parent()
        control.send(str(os.getpid()).encode())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        os.setsid()
        from pdkv.connector_kit.rig.host import main as serve

        serve(fd, stacks_path)
        code = 0
    except BaseException:  # the process ends here: no caller could report it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
