"""Jobs that run at once in the process that compiles grammars."""

import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from pdkv.config import DEFAULT_MODEL
from pdkv.grammar.compile_host import CompileHost, Ended
from pdkv.grammar.compile_process import END, MAX_CONTROL_BYTES, Job
from pdkv.grammar.spec import Grammar

ABC = Grammar("regex", "abc")
SLOW = Grammar("ebnf", f'root ::= "{"a" * 500_000}"')
"""Takes longer than any job here has."""


def test_a_job_does_not_wait_for_one_that_began_later() -> None:
    host = CompileHost(DEFAULT_MODEL, 512, [1], 128 << 20)
    with ThreadPoolExecutor(2) as threads:
        try:
            assert isinstance(host.run(Job(ABC, cpu_s=30.0, wall_s=30.0)), bytes)
            short = threads.submit(host.run, Job(SLOW, cpu_s=1.0, wall_s=60.0))
            threading.Event().wait(0.2)  # it has its worker
            long = threads.submit(host.run, Job(SLOW, cpu_s=30.0, wall_s=60.0))
            assert short.result(timeout=90.0) == Ended("time")
            assert not long.done()
        finally:
            host.close()
        assert isinstance(long.result(timeout=90.0), Ended)


def test_the_last_bytes_of_a_reply_that_was_cut_off_are_no_exit_status() -> None:
    host = CompileHost(DEFAULT_MODEL, 512, [1], 128 << 20)
    control, host._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ThreadPoolExecutor(1) as threads, control:
        running = threads.submit(host.run, Job(ABC, cpu_s=30.0, wall_s=30.0))
        _, fds, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1)
        with socket.socket(fileno=fds[0]) as job:
            job.sendall(END.pack(bytes(16), 115))  # as if it were killed by a signal of that number
        assert running.result(30.0) == Ended("lost", "the process that compiles grammars went away")


def test_any_signal_that_ends_a_worker_is_a_crash() -> None:
    host = CompileHost(DEFAULT_MODEL, 512, [1], 128 << 20)
    control, host._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ThreadPoolExecutor(1) as threads, control:
        for number in (signal.SIGSEGV, signal.SIGRTMIN + 1):  # the second has no name
            running = threads.submit(host.run, Job(ABC, cpu_s=30.0, wall_s=30.0))
            token, fds, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1)
            with socket.socket(fileno=fds[0]) as job:
                job.sendall(END.pack(token, number))
            ended = running.result(30.0)
            assert isinstance(ended, Ended)
            assert ended.reason == "crash"
            assert ended.detail == signal.strsignal(number)
        host.close()
