"""Programs forked from a process that has imported what launches need: most of their processor time is imports.

`WarmPopen` is `subprocess.Popen`, except that the interpreter of `python -P -m pdkv.cli …`, `python -P -c …` or
`python -P program.py …` has been started before, and so have those of a launcher's children. They are processes as
otherwise: children of whoever starts them, with their own arguments, environment, working directory, descriptors,
sessions and signals, and they end as interpreters do. What an interpreter or a library reads when it is started or
loaded cannot be given to one that runs already: where the environment says another thing of it than this process's own
did, a real one is started. Folders in PYTHONPATH can, unless they hold what has been imported.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from pdkv.launch.fork_server import ENVIRONMENT, PRELOADED
from pdkv.testing.deployment import MARK

PYTHON = [sys.executable, "-P"]
COMMAND = [*PYTHON, "-m", "pdkv.cli"]
READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_")
"""How variables begin that are read when an interpreter starts or a library is loaded."""

MODULES = (
    "pdkv.cli.main", "pdkv.launch.launcher", "pdkv.launch.router_process", "pydantic.v1", "pdkv.parsers.hermes",
    "pdkv.parsers.llama3_json", "pdkv.parsers.mistral", "pdkv.parsers.pythonic", "pdkv.connectors.multi.connector",
    "pdkv.connectors.p2p.connector", "pdkv.connectors.shared_memory.connector", "pdkv.connectors.store.url",
)  # fmt: skip
"""What most launchers and routers import when they start, beside what fork servers do."""

IMPORTED = ("sitecustomize.py", "pdkv")

_MAX_REQUEST_BYTES = 128 * 1024
_PR_SET_CHILD_SUBREAPER = 36
_UNMARKED = "0" * 32


class WarmPopen(subprocess.Popen[Any]):
    """A command, forked where it is `pd`."""

    around: Mapping[str, str] = os.environ
    """The environment of the process that forks: one that a test has changed would not serve the others."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """What starts the process, of the standard library's class."""
        _, preexec_fn, _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[
            :15
        ]
        environment = dict(os.environ if env is None else env)
        forks = _can_be_forked(args) and not preexec_fn and not pass_fds
        if not forks or not (warm := _warm()).serves(environment):
            super()._execute_child(args, *rest)
            return
        ends = [own if own >= 0 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = warm.fork(args[len(PYTHON) :], environment, os.fspath(cwd or os.getcwd()), ends)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(arguments: Sequence[str], **how: Any) -> "subprocess.CompletedProcess[str]":
    """A command that ends, and what it wrote: `subprocess.run` with a `WarmPopen`."""
    with WarmPopen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        try:
            out, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


def _can_be_forked(arguments: Sequence[str]) -> bool:
    command = list(arguments[: len(COMMAND)])
    return command == COMMAND or command[:-1] == [*PYTHON, "-c"] or (command[:2] == PYTHON and command[2][-3:] == ".py")


class _Warm:
    """This process's side of the one that forks."""

    def __init__(self) -> None:
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**ENVIRONMENT, **WarmPopen.around, MARK: _UNMARKED}
        self._lock = threading.Lock()
        path = [*sys.path, os.environ.get("PYTHONPATH")]  # which a test may have set behind this interpreter's start
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
        there.close()
        self._control.settimeout(600.0)  # imports take minutes on a busy host; one that died has closed its end
        assert self._control.recv(16) == b"ready", "the process that forks launches has died"
        atexit.register(self._close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether one that runs already can have this environment."""
        same = _read_at_start({**ENVIRONMENT, **environment}) == _read_at_start(self._environment)
        return same and not any(os.path.exists(f"{folder}/{n}") for folder in _folders(environment) for n in IMPORTED)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: str, ends: Sequence[int]) -> int:
        """The pid of a child of this process that runs a program; `ends` are its first descriptors."""
        with self._lock, _adopting():
            request = json.dumps([list(arguments), dict(environment), cwd]).encode()
            socket.send_fds(self._control, [request], list(ends))
            pid = int(self._control.recv(64))
            assert self._control.recv(64) == b"orphaned"
        return pid

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def _warm() -> _Warm:
    return _Warm()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """For the block, orphaned descendants become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if n.startswith(READ_AT_START) and n != "PYTHONPATH"}


def _folders(environment: Mapping[str, str]) -> list[str]:
    """Of PYTHONPATH, those that are not searched yet."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [folder for folder in folders if folder and folder not in sys.path]


def _main(control_fd: int) -> None:
    """Import, then fork until nobody asks any more; in what was forked, run the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in (*PRELOADED, *MODULES):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it marks
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started by an import: what is forked would hang"
    control = socket.socket(fileno=control_fd)
    control.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
        if not data:
            return
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                break
            control.send(str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        control.send(b"orphaned")
        for fd in fds:
            os.close(fd)
    control.close()
    arguments, environment, cwd = json.loads(data)
    _become(environment, cwd, fds)
    _live(_program(arguments))


def _program(arguments: list[str]) -> Callable[[], Any]:
    """What `python -P` would run with these arguments, which the program gets."""
    match arguments:
        case ["-m", _, *rest]:
            from pdkv.cli import main

            sys.argv[:] = [str(Path(main.__file__).with_name("__main__.py")), *rest]
            return main.main
        case ["-c", code, *rest]:
            sys.argv[:] = ["-c", *rest]
            return partial(exec, code, {"__name__": "__main__"})
        case _:
            sys.argv[:] = arguments
            return lambda: runpy.run_path(arguments[0], run_name="__main__") and 0


def _live(run: Callable[[], Any]) -> NoReturn:
    """Run it and end this process as interpreters end, except that memory goes as a whole and not object by object."""
    code: Any = 1
    try:
        code = run() or 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:  # the process ends here: nothing above could report it
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _become(environment: dict[str, str], cwd: str, fds: Sequence[int]) -> None:
    """Give this process what an interpreter would begin with."""
    from pdkv.base import trace_context
    from pdkv.launch import children

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    mark = environment.get(MARK, _UNMARKED).encode()
    assert len(mark) == len(_UNMARKED), mark
    ctypes.memmove(libc.getenv(MARK.encode()), mark, len(mark))  # where the kernel reads /proc/PID/environ
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = _folders(environment)
    os.chdir(cwd)
    trace_context._generator.seed()
    children._spawn = _spawn


def _spawn(module: str, arguments: Sequence[int | str], fds: Sequence[int], spec: bytes = b"") -> Any:
    """In place of the launcher's own: what it starts is forked from it, and begins as an interpreter would."""
    if pid := os.fork():
        return SimpleNamespace(pid=pid, returncode=None)
    _live(partial(_begin, module, arguments, fds, spec))


def _begin(module: str, arguments: Sequence[int | str], fds: Sequence[int], spec: bytes) -> int | None:
    """What a child of the launcher would begin with and do, in a process group of its own."""
    from pdkv.launch.child import run

    gc.freeze()  # nothing of the launcher's closes its descriptors here
    _forget_signals()
    os.setpgid(0, 0)
    with open(os.memfd_create("pdkv-spec"), "w+b", closefd=False) as stdin:
        stdin.write(spec)
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    os.dup2(2, 1)
    first = 3
    for fd in sorted(fds):
        os.closerange(first, fd)
        os.set_inheritable(fd, True)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    os.environ.update({**ENVIRONMENT, **os.environ})
    return run(os.getppid(), module, [*map(str, arguments)])


def _forget_signals() -> None:
    """Handlers are gone after exec; what was ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
