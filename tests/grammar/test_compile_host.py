"""Jobs that run at once in the process that compiles grammars."""

import threading
from concurrent.futures import ThreadPoolExecutor

from pdkv.config import DEFAULT_MODEL
from pdkv.grammar.compile_host import CompileHost, Ended
from pdkv.grammar.compile_process import Job
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
            assert short.result(timeout=30.0) == Ended("time")
            assert not long.done()
        finally:
            host.close()
        assert isinstance(long.result(timeout=30.0), Ended)
