"""Processes that match grammars: what a grammar may cost, what is beside it, and what ends them. F81, F82."""

import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traffic import wait_until_true

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import GrammarGivenUp, InvalidRequest
from pdkv.grammar.matching import workers
from pdkv.grammar.matching.host import GrammarHost
from pdkv.grammar.matching.state import Known
from pdkv.host.process_info import process_cpu_ns
from pdkv.models.config import load_model_config
from pdkv.sampling.shape import Grammar
from pdkv.testing import VirtualClock
from pdkv.wire.types import RequestKey

CONFIG = load_model_config(DEFAULT_MODEL)
A, B = ("a", 0), ("b", 0)
AMPLE_S = 120.0


def lark(rules: str) -> Grammar:
    return Grammar("text", '%llguidance {"no_forcing": true}\n' + rules)


BITS, LETTERS = lark("start: /[01]{40}/"), lark("start: /[ab]+/")


class Host:
    """A host, and what its engine's loop does."""

    def __init__(self, **options: Any) -> None:
        self.news, self.clock = threading.Event(), VirtualClock()
        self.host = GrammarHost(
            DEFAULT_MODEL, CONFIG.vocab_size, CONFIG.eos_token_ids, self.news.set,
            num_requests=8, num_drafts=2, clock=self.clock, **options,
        )  # fmt: skip

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + AMPLE_S
        while not is_so():
            assert self.news.wait(deadline - time.monotonic()), "no news"
            self.news.clear()

    def ask(self, grammar: Grammar, tenant: str = "") -> Known:
        ticket = self.host.ask(grammar, tenant)
        self.wait(lambda: ticket.done)
        return ticket

    def open(self, key: RequestKey, grammar: Grammar, tenant: str = "", tokens: list[int] | None = None) -> None:
        ticket = self.ask(grammar, tenant)
        assert ticket.error is None
        self.host.open(key, ticket.number, tokens or [], [])

    def allowed(self, key: RequestKey) -> list[set[int]]:
        """By mask, once they are there."""
        while (words := self.host.masks([key])[0]) is None:
            self.wait(lambda: self.host.is_in(key))
            assert not self.host.has_failed, self.host.take_failed()
        return [set(np.flatnonzero(np.unpackbits(w.view(np.uint8), bitorder="little")).tolist()) for w in words]

    @property
    def pids(self) -> list[int]:
        """Of the workers, in the order of their beginning."""
        process = self.host._workers._process
        assert process is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return sorted(map(int, children.split()))


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.host.close()


def test_masks_follow_an_answer_and_its_drafts(host: Host) -> None:
    host.open(A, BITS)
    [both] = host.allowed(A)
    zero, one = sorted(both)
    host.host.go_on([(A, [zero, one], [one, min(set(range(99)) - both), zero])])
    assert host.allowed(A) == [both, both]  # behind the draft that the grammar refuses is none
    host.host.go_on([(A, [zero] * 38, [])])
    assert host.allowed(A) == [set(CONFIG.eos_token_ids)]


def test_a_wrong_grammar_is_refused_and_an_output_that_its_grammar_refuses_fails(host: Host) -> None:
    assert isinstance(host.ask(lark("start: undefined")).error, InvalidRequest)
    host.open(A, BITS)
    [both] = host.allowed(A)
    wrong = min(set(range(99)) - both)
    host.host.go_on([(A, [min(both), wrong], [])])
    host.wait(lambda: host.host.has_failed)
    assert f"the token {wrong} in a place" in str(host.host.take_failed()[A])


@pytest.mark.parametrize("what", ["worker", "all"])
def test_what_is_killed_goes_on_where_it_was(host: Host, what: str) -> None:
    """Nothing is given up: the next process replays the answer."""
    host.open(A, BITS)
    [both] = host.allowed(A)
    host.host.go_on([(A, [min(both)] * 39, [])])
    host.allowed(A)
    process = host.host._workers._process
    assert process is not None
    os.kill(process.pid if what == "all" else host.pids[0], signal.SIGKILL)
    host.host.go_on([(A, [min(both)], [])])
    assert host.allowed(A) == [set(CONFIG.eos_token_ids)]


def test_a_worker_that_is_stopped_is_replaced(host: Host) -> None:
    host.open(A, BITS, "one")
    host.open(B, LETTERS, "two")
    [both] = host.allowed(A)
    letters = host.allowed(B)
    stopped = host.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    host.host.go_on([(A, [min(both)], []), (B, [min(letters[0])], [])])
    assert host.allowed(B)  # another tenant's is not held up

    books = host.host._workers
    worker = books.worker_of("one")

    def is_replaced() -> bool:
        host.host.masks([A])  # their worker is looked at
        with books.lock:  # once: at the next time the process would be replaced with all workers
            if not worker.is_killed and stopped in host.pids:
                host.clock.advance(workers.STUCK_S)
        return stopped not in host.pids

    wait_until_true(is_replaced, "it is replaced")
    assert host.allowed(A) == [both]


@cache
def costly() -> Grammar:
    return lark(
        "start: " + "|".join(f"r{i}" for i in range(20_000)) + "".join(f'\nr{i}: "x{i}"' for i in range(20_000))
    )


@cache
def deep() -> Grammar:
    """It overflows the library's stack."""
    return lark("start: r0" + "".join(f'\nr{i}: "a" r{i + 1}' for i in range(50_000)) + '\nr50000: "b"')


def test_a_worker_that_gets_little_processor_time_is_not_replaced() -> None:
    """A busy host: between two looks it computes, but ends no call."""
    made = Host()
    try:
        made.ask(BITS)
        [pid] = made.pids
        os.kill(pid, signal.SIGSTOP)
        ticket, books = made.host.ask(costly(), ""), made.host._workers
        for _ in range(2 * workers.MAX_LOST):
            with books.lock:  # the thread that looks after it has no turn meanwhile
                before, deadline = process_cpu_ns(pid), time.monotonic() + 60.0
                os.kill(pid, signal.SIGCONT)
                while process_cpu_ns(pid) == before:  # looked at all the time: it must not come to its end
                    assert time.monotonic() < deadline, "it does not compute"
                os.kill(pid, signal.SIGSTOP)
                made.clock.advance(workers.STUCK_S)
                books._look_after(books.worker_of(""))
        os.kill(pid, signal.SIGCONT)
        made.wait(lambda: ticket.done)
        assert ticket.error is None
        assert made.pids == [pid]
    finally:
        made.host.close()


@pytest.mark.parametrize(
    ("make", "why"),
    [(costly, r"more than 0.1 s of processor time to match \(--grammar-time-s\)"), (deep, "breaks the library")],
    ids=["time", "crash"],
)
def test_a_grammar_that_costs_too_much_is_given_up_and_no_other(make: Callable[[], Grammar], why: str) -> None:
    """What goes on beside it in the same process is replayed; the grammar is refused for every tenant at once."""
    grammar, made = make(), Host(time_s=0.1 if make is costly else 20.0)
    try:
        made.open(A, BITS)
        [both] = made.allowed(A)
        error = made.ask(grammar).error
        assert isinstance(error, GrammarGivenUp)
        assert re.search(why, str(error))
        with pytest.raises(GrammarGivenUp, match="less than 60 s ago"):
            made.host.ask(grammar, "another")
        made.clock.advance(workers.REMEMBER_S)
        assert isinstance(made.ask(grammar, "another").error, GrammarGivenUp), "it is tried again"
        made.host.go_on([(A, [min(both)] * 40, [])])
        assert made.allowed(A) == [set(CONFIG.eos_token_ids)]
    finally:
        made.host.close()


def test_one_tenants_grammars_wait_for_no_other_tenants(host: Host) -> None:
    """Whose worker stands still meanwhile."""
    host.ask(BITS, "busy")
    os.kill(host.pids[0], signal.SIGSTOP)
    waiting = [host.host.ask(lark(f"start: /a{{{i}}}/"), "busy") for i in range(1, 61)]
    host.open(B, LETTERS, "polite")
    assert host.allowed(B)
    assert not any(ticket.done for ticket in waiting)


def test_nothing_is_left(host: Host) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = Host()
    made.open(A, BITS)
    process, pids = made.host._workers._process, made.pids
    assert process is not None
    made.host.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert process.returncode is not None
    for pid in pids:
        fd = -1
        try:
            fd = os.pidfd_open(pid)
            assert select.select([fd], [], [], AMPLE_S)[0]
        except ProcessLookupError:
            pass
        finally:
            if fd >= 0:
                os.close(fd)
