"""Runs the processes that match grammars, on a separate thread.

A worker ends when a grammar has used up its time or memory, when a grammar crashes the library, or when something kills
the worker. In the first two cases the grammar is given up. In all cases another worker takes the place, and the other
answers are replayed from their tokens.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.service_thread import ServiceThread
from pdkv.errors import GrammarGivenUp, InvalidRequest, PdkvError, ServerBusy
from pdkv.grammar.matching.messages import (
    MAX_CONTROL_BYTES,
    Ended,
    Learned,
    Order,
    Place,
    Ready,
    Refused,
    Start,
    encode,
)
from pdkv.grammar.matching.slab import Slab, size_bytes
from pdkv.grammar.matching.state import Known, Row, WorkerState
from pdkv.host.process_info import process_cpu_ns
from pdkv.sampling.shape import Grammar
from pdkv.wire.types import RequestKey

START_TIMEOUT_S = 120.0
"""Seconds for imports and the vocabulary on a busy machine."""

STUCK_S = 10.0
"""Seconds after which a worker that gets nothing done and uses no processor time, such as a stopped one, is replaced.
One that computes ends by its bound of processor time, however long a busy host takes to give it that.
"""

REMEMBER_S = 60.0
"""Seconds for which a given-up grammar is refused by its digest."""

MAX_LOST = 3
"""Kills of its worker from outside after which a grammar is given up, too: memory may be short."""

_GRACE_S = 5.0
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


class Workers:
    """The thread, the processes and their state, which `lock` guards."""

    def __init__(self, start: Start, notify: Callable[[], None], clock: Clock = MONOTONIC) -> None:
        """Starts nothing."""
        self.lock = threading.RLock()
        self.all: list[WorkerState] = []
        self.numbers: dict[int, Known] = {}  # grammars that a worker or a request has
        self.failed: dict[RequestKey, PdkvError] = {}
        self.slab: Slab | None = None
        self.event_fd = -1  # raised by workers for masks that are waited for
        self._slab_fd = self._wake_fd = -1
        self._start = start
        self._notify = notify
        self._now = clock.now
        self._has_news = False
        self._tenants: dict[str, WorkerState] = {}
        self._given_up: dict[bytes, float] = {}  # until when, by digest; in order
        self._broken: PdkvError | None = None  # why no grammar can be matched
        self._thread = ServiceThread(self._run, self._wake, "grammars")
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    # --- books; the caller holds the lock -------------------------------------------------------------------------

    def begin(self, grammar: Grammar) -> None:
        """Start the thread if needed. Raises GrammarGivenUp, InvalidRequest and ServerBusy if that is not possible."""
        if self._thread.stopping.is_set():
            raise ServerBusy("the engine is about to stop")
        if self._broken is not None:
            raise self._broken.anew()
        if self._given_up.get(grammar.digest, 0.0) > self._now():
            text = f"the grammar was given up less than {REMEMBER_S:g} s ago: it costs too much to match"
            raise GrammarGivenUp(text, param="structured_outputs")
        if self.slab is not None:
            return
        try:
            self._slab_fd = os.memfd_create("pdkv-masks", os.MFD_CLOEXEC)
            os.ftruncate(self._slab_fd, size_bytes(self._start.shape))
            self.slab = Slab(self._slab_fd, self._start.shape)
            self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread.start()
        except (OSError, ServerBusy) as error:
            self._close_fds()
            raise ServerBusy(f"no process can be started to match grammars: {error}") from None

    def worker_of(self, tenant: str) -> WorkerState:
        """A tenant's own worker or, if there are too many tenants, one that few others share."""
        worker = self._tenants.get(tenant)
        if worker is None:
            if len(self.all) < self._start.shape.num_workers:
                self.all.append(WorkerState(len(self.all), self._start.shape.rows_per_worker, self._now))
            worker = self._tenants[tenant] = min(self.all, key=lambda one: one.num_tenants)
            worker.num_tenants += 1
        return worker

    def send(self, worker: WorkerState, message: Order, *, is_awaited: bool = False) -> None:
        """Send a message. Never blocks; a worker that does not exist yet is sent everything once it does."""
        worker.send(message, is_awaited=is_awaited)
        if (is_awaited or worker.outbox or worker.sock is None) and not self._thread.stopping.is_set():
            os.eventfd_write(self._wake_fd, 1)

    def add_row(self, row: Row) -> None:
        """Add an answer."""
        row.worker.rows[row.place] = row
        if row.known.error is not None:
            self._fail(row, row.known.error)
        else:
            self.send(row.worker, row.opening())

    def _fail(self, row: Row, error: PdkvError) -> None:
        row.has_failed = self._has_news = True
        self.failed[row.key] = error.anew()

    def _drop(self, known: Known, error: PdkvError) -> None:
        """Note that no request can have it."""
        known.error = error
        self._has_news = True
        known.worker.drop(known)
        for row in known.worker.rows.values():
            if row.known is known and not row.has_failed:
                self._fail(row, error)

    def _give_up(self, known: Known, why: str) -> None:
        """Fail all requests that have a grammar, and refuse it for a while."""
        logger.warning("a grammar of %d characters was given up: it %s", len(known.grammar.text), why)
        now = self._now()
        self._given_up = {digest: until for digest, until in self._given_up.items() if until > now}
        self._given_up[known.grammar.digest] = now + REMEMBER_S
        self._drop(known, GrammarGivenUp(f"the grammar {why}", param="structured_outputs"))

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                idle = self._missing()
                if not idle or self._control is not None or self._begin_process():
                    self._turn(idle)
                if self._has_news:
                    self._has_news = False
                    self._notify()
        except Exception as error:
            logger.exception("grammars cannot be matched any more")
            self._break(ServerBusy(f"grammars cannot be matched any more: {error}"), is_final=True)
        finally:
            self._end_process()

    def _missing(self) -> list[WorkerState]:
        """Workers that have something to do and do not exist."""
        with self.lock:
            return [worker for worker in self.all if worker.sock is None and worker.is_wanted]

    def _turn(self, idle: Sequence[WorkerState]) -> None:
        """Start workers, wait for news, and handle it."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        with self.lock:
            for worker in idle:
                self._fork(worker)
            there = [(sock.fileno(), worker) for worker in self.all if (sock := worker.sock) and not worker.is_deaf]
            deadlines = [worker.waits_since + STUCK_S for _, worker in there if worker.num_awaited]
            for fd, worker in there:
                poll.register(fd, select.POLLIN | (select.POLLOUT if worker.outbox else 0))
        left = math.ceil(1000 * max(0.0, min(deadlines) - self._now())) if deadlines else None
        events = dict(poll.poll(left))
        with self.lock:
            self._take_in(events, there)

    def _take_in(self, events: Mapping[int, int], there: Sequence[tuple[int, WorkerState]]) -> None:
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        for fd, worker in there:
            if events.get(fd, 0) & select.POLLOUT:
                worker.flush()
            if events.get(fd, 0) & ~select.POLLOUT:
                self._hear(worker)
            self._look_after(worker)
        if self._control is not None and self._control.fileno() in events:
            self._hear_control(self._control)

    def _hear(self, worker: WorkerState) -> None:
        for answer in worker.receive():
            match answer:
                case Learned(number=number, refused=refused):
                    self._learned(self.numbers.get(number), refused)
                case Refused(row=place, reason=reason):
                    row = worker.rows.get(place)
                    if row is not None and not row.has_failed:
                        self._fail(row, InvalidRequest(reason, param="structured_outputs"))
                case _:
                    self._has_news = True

    def _learned(self, known: Known | None, refused: str) -> None:
        if known is None:
            return
        known.is_learned = self._has_news = True
        if refused:
            self._drop(known, InvalidRequest(refused, param="structured_outputs"))
        if not known.num_users and known.worker.known.get(known.grammar) is not known:
            del self.numbers[known.number]

    def _hear_control(self, control: socket.socket) -> None:
        """Handle the end of a worker, or of the process with all of them."""
        try:
            data = control.recv(MAX_CONTROL_BYTES)
        except OSError:
            data = b""
        if data:
            ended = msgspec.msgpack.decode(data, type=Ended)
            self._ended(self.all[ended.worker], ended.status)
            return
        self._end_process()
        for worker in self.all:
            if worker.sock is not None:
                self._ended(worker, signal.SIGKILL)

    def _ended(self, worker: WorkerState, status: int) -> None:
        """Give up the grammar that ended it, if one did. Another worker starts if requests need it."""
        assert self.slab is not None
        known = self.numbers.get(int(self.slab.working[worker.index]) - 1)
        self._clear(worker)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if known is None:
            if worker.num_ends > MAX_LOST:
                self._drop_all(worker, ServerBusy("the process that matches grammars keeps ending"))
            return
        if number == signal.SIGPROF:
            why = f"takes more than {self._start.time_s:g} s of processor time to match (--grammar-time-s)"
        else:
            what = signal.strsignal(number) if number else f"exit status {os.waitstatus_to_exitcode(status)}"
            most = f"{self._start.memory_bytes >> 20} MiB of memory (--grammar-memory)"
            why = f"takes more than {most}, or breaks the library: {what}"
        known.num_lost += 1
        if known.error is None and (number not in _FROM_OUTSIDE or known.num_lost >= MAX_LOST):
            self._give_up(known, why)

    def _drop_all(self, worker: WorkerState, error: PdkvError) -> None:
        for known in list(worker.known.values()):
            self._drop(known, error)

    def _clear(self, worker: WorkerState) -> None:
        """Clear its rows, to which nothing writes now."""
        assert self.slab is not None
        worker.end()
        self.slab.clear(worker.index)
        for known in [one for one in self.numbers.values() if one.worker is worker and not one.num_users]:
            del self.numbers[known.number]

    def _look_after(self, worker: WorkerState) -> None:
        """Replace a worker that makes no progress; if that has no effect, the process with it."""
        assert self.slab is not None
        if not worker.num_awaited:
            return
        now, pid = self._now(), self.slab.pids[worker.index]
        progress = self.slab.calls[worker.index], process_cpu_ns(pid) if pid else 0
        if progress != worker.progress:
            worker.progress, worker.waits_since = progress, now
        elif now >= worker.waits_since + STUCK_S:
            logger.warning("a process that matches grammars has made no progress for %g s: it is replaced", STUCK_S)
            worker.waits_since = now
            if worker.is_killed and self._process is not None:
                self._process.kill()
            elif self._control is not None:
                worker.is_killed = True
                with contextlib.suppress(OSError):  # the process is gone, as its socket will tell
                    self._control.send(encode(Place(worker.index)))

    # --- the process ----------------------------------------------------------------------------------------------

    def _begin_process(self) -> bool:
        """Start the process. Returns whether it exists now. If it cannot, everything that waits for it has failed."""
        try:
            error = self._launch()
            if not error:
                return True
            error = f"this server cannot enforce grammars: {error}"
            broken: PdkvError = InvalidRequest(error, param="structured_outputs")
        except OSError as failure:
            broken = ServerBusy(f"the process that matches grammars did not start: {failure}")
        self._end_process()
        self._break(broken, is_final=isinstance(broken, InvalidRequest))
        return False

    def _launch(self) -> str:
        """Launch it. Returns why it can never work. Raises OSError."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = control
        control.settimeout(START_TIMEOUT_S)
        with theirs:
            fds = [theirs.fileno(), self._slab_fd, self.event_fd]
            start = msgspec.json.encode(self._start).decode()
            command = [sys.executable, "-m", "pdkv.grammar.matching.zygote", start, *map(str, fds)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment, process_group=0
            )  # out of a terminal's reach: the engine says when to end
        if self._thread.stopping.is_set():
            raise ConnectionError("it is not wanted any more")
        answer = control.recv(MAX_CONTROL_BYTES)
        if not answer:
            raise ConnectionError("it ended before it was ready")
        return msgspec.msgpack.decode(answer, type=Ready).error

    def _fork(self, worker: WorkerState) -> None:
        """Fork a worker, which is told everything that it needs to know."""
        if self._control is None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [encode(Place(worker.index))], [theirs.fileno()])
            except OSError:  # the process is gone, as its socket will tell
                ours.close()
                return
        worker.begin(ours)

    def _break(self, error: PdkvError, *, is_final: bool) -> None:
        """Note that nothing can be matched now, or ever."""
        with self.lock:
            self._broken = error if is_final else None
            for worker in self.all:
                self._clear(worker)
                self._drop_all(worker, error)
        self._notify()

    def _end_process(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is None:
            return
        process.kill()
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process that matches grammars (%d) does not end though it was killed", process.pid)

    def close(self) -> None:
        """End thread and processes; everything still waiting gets an error. Idempotent."""
        self._thread.stop(_GRACE_S)
        if self.slab is not None:
            self._break(ServerBusy("the engine is about to stop"), is_final=False)
            self._close_fds()

    def _wake(self) -> None:
        with self.lock:
            process = self._process
            if process is not None:
                process.kill()  # if it is about to start, the thread waits for that
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_fds(self) -> None:
        for fd in (self._slab_fd, self.event_fd, self._wake_fd):
            if fd >= 0:
                os.close(fd)
        self._slab_fd = self.event_fd = self._wake_fd = -1
        self.slab = None
