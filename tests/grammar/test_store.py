"""The store and its processes: what grammars cost, and that none of them, however hostile, costs anybody else."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from traffic import held_by_process, wait_until_true, wait_until_within

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import InvalidRequest, ServerBusy
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.options import GrammarOptions
from pdkv.grammar.spec import Grammar
from pdkv.grammar.store import GrammarStore, GrammarTicket

TIMEOUT_S = 180.0

ABC = Grammar("regex", "abc")
SLOW = Grammar("ebnf", f'root ::= "{"a" * 500_000}"')
"""Takes longer than `hurried` waits."""

OVERFLOWING = '{"not":' * 9_000 + "{}" + "}" * 9_000


class Engine:
    """Who asks: it sleeps until it is notified."""

    def __init__(self, options: GrammarOptions, model: Path = DEFAULT_MODEL) -> None:
        self._woken = threading.Event()
        self._earlier = {*descendants(os.getpid())}
        self.store = GrammarStore(model, 512, [1], options, self._woken.set)

    def wait(self, ticket: GrammarTicket, timeout_s: float = TIMEOUT_S) -> CompiledGrammar:
        deadline = time.monotonic() + timeout_s
        while not ticket.done:
            assert self._woken.wait(deadline - time.monotonic()), "the ticket was never done"
            self._woken.clear()
        ticket.close()
        return ticket.result()

    def get(self, grammar: Grammar, timeout_s: float = TIMEOUT_S) -> CompiledGrammar:
        return self.wait(self.store.ask(grammar), timeout_s)

    def process(self) -> int:
        """The one of its processes that forks workers."""
        found: list[int] = []
        for pid in descendants(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a worker that has ended meanwhile
                if pid not in self._earlier and Path(f"/proc/{pid}/comm").read_text() == "pdkv-grammar\n":
                    found.append(pid)
        return found[0]

    def refused(self, grammar: Grammar) -> str:
        with pytest.raises(InvalidRequest) as refusal:
            self.get(grammar)
        return str(refusal.value)


def descendants(pid: int) -> list[int]:
    """Processes below this one, parents first; the order changes when a thread that started one ends."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *descendants(child)]
    return found


def await_worker(host: int) -> int:
    """A worker that compiles: one that has left its first tenth of a second behind."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in descendants(host):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) > 10:  # ticks of 10 ms
                    return pid
        threading.Event().wait(0.02)
    raise AssertionError("there is no worker")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """It has time for what is compiled at the lowest priority beside all that a machine does."""
    engine = Engine(GrammarOptions(compile_timeout_s=60.0))
    engine.get(ABC)
    yield engine
    engine.store.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One that gives up soon, and has no lane for what is compiled fast."""
    monkeypatch.setattr("pdkv.grammar.store.FIRST_SLICE_S", TIMEOUT_S)
    engine = Engine(GrammarOptions(compile_timeout_s=3.0))
    engine.get(ABC)
    yield engine
    engine.store.close()


def test_a_grammar_is_compiled_once_for_all_who_wait_and_for_who_comes_later(engine: Engine) -> None:
    grammar = Grammar("regex", "x{3}y")
    first, second = engine.store.ask(grammar), engine.store.ask(grammar)
    assert engine.wait(first) is engine.wait(second)
    third = engine.store.ask(grammar)
    assert third.done
    assert third.result() is first.result()
    assert len(third.result().matcher().forced(10)) > 1


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("ebnf", 'root ::= "a" b'), 'line 1, column 14: Rule "b" is not defined'),
        (Grammar("ebnf", "root ::= root"), "no text of the model's tokens fulfils it"),
        (Grammar("regex", "a(b"), "position 4: The parenthesis is not closed"),
        (Grammar("regex", "a\x00b"), "must not contain null characters"),
        (Grammar("json_schema", '{"type":"strin"}'), 'Unsupported type "strin"'),
        (Grammar("json_schema", '{"enum":[]}'), "enum"),
        (Grammar("json_schema", "{"), "JSON"),
        (Grammar("json_schema", OVERFLOWING), "the "),  # whichever bound it meets first
        (Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"x"}}'), "Format type not recognized: x"),
        (Grammar("ebnf", f"root ::= {'(' * 200_000}"), "Nest layer exceeded"),
        (Grammar("regex", "a\ud800"), "no valid text"),
    ],
    ids=lambda value: "" if isinstance(value, Grammar) else value,
)
def test_what_is_wrong_is_said_and_said_again_at_once(engine: Engine, grammar: Grammar, words: str) -> None:
    host = engine.process()
    said = engine.refused(grammar)
    assert words in said
    assert "/project/" not in said
    again = engine.store.ask(grammar)
    assert again.done
    with pytest.raises(InvalidRequest) as refusal:
        again.result()
    assert str(refusal.value) == said
    assert engine.process() == host, "the process ended, and not only its worker"
    assert engine.get(ABC)


def test_what_takes_too_long_is_refused_and_remembered(hurried: Engine) -> None:
    host = hurried.process()
    assert "takes more than 3 s to compile (--grammar-compile-timeout-s)" in hurried.refused(SLOW)
    assert hurried.store.ask(SLOW).done
    assert hurried.process() == host, "the process ended, and not only its worker"


def test_a_grammar_that_takes_more_memory_than_it_may_is_refused() -> None:
    engine = Engine(GrammarOptions(compile_timeout_s=30.0, compile_memory_bytes=24 << 20))
    try:
        engine.get(ABC)
        processes = {*descendants(os.getpid())}
        assert engine.refused(SLOW) == "the grammar takes more than 24 MiB to compile"
        assert engine.get(Grammar("regex", "still"))
        assert {*descendants(os.getpid())} == processes, "the process ended, and not only its worker"
    finally:
        engine.store.close()


def test_a_worker_that_is_killed_gets_a_successor(hurried: Engine) -> None:
    host = hurried.process()
    ticket = hurried.store.ask(Grammar("ebnf", f'root ::= "{"b" * 500_000}"'))
    os.kill(await_worker(host), signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="takes more than 3 s"):
        hurried.wait(ticket)
    assert hurried.process() == host


def test_a_worker_that_is_killed_twice_is_the_servers_fault_and_not_remembered(hurried: Engine) -> None:
    grammar, host = Grammar("ebnf", f'root ::= "{"c" * 500_000}"'), hurried.process()
    ticket = hurried.store.ask(grammar)
    os.kill(first := await_worker(host), signal.SIGKILL)
    while (second := await_worker(host)) == first:
        threading.Event().wait(0.02)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(ServerBusy, match="the worker was killed"):
        hurried.wait(ticket)
    again = hurried.store.ask(grammar)
    assert not again.done
    again.close()


def test_a_process_that_is_killed_is_started_again(hurried: Engine) -> None:
    host = hurried.process()
    ticket = hurried.store.ask(Grammar("ebnf", f'root ::= "{"d" * 500_000}"'))
    await_worker(host)
    os.kill(host, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="takes more than 3 s"):
        hurried.wait(ticket)
    assert hurried.get(Grammar("regex", "still"))
    assert hurried.process() != host


def test_a_process_that_is_stopped_is_given_up_at_the_deadline(hurried: Engine) -> None:
    host = hurried.process()
    os.kill(host, signal.SIGSTOP)
    assert hurried.get(Grammar("regex", "on"))
    assert hurried.process() != host


def test_an_honest_grammar_comes_through_between_200_hostile_ones(engine: Engine) -> None:
    hostile = [engine.store.ask(Grammar("ebnf", f'root ::= "{"e" * 400_000}{i}"')) for i in range(200)]
    properties = {f"p{i}": {"type": ["string", "integer", "boolean"][i % 3]} for i in range(50)}
    for i in range(5):
        schema = {"type": "object", "properties": properties, "required": [f"p{i}"], "additionalProperties": False}
        assert engine.get(Grammar("json_schema", json.dumps(schema)), timeout_s=20.0)
    assert sum(ticket.done for ticket in hostile) < 100
    for ticket in hostile:
        ticket.close()
    engine.get(Grammar("ebnf", f'root ::= "{"f" * 5_000}"'), timeout_s=30.0)  # behind them all, were they still there


def test_more_than_may_wait_are_turned_away_and_may_come_again(engine: Engine) -> None:
    engine_with_room_for_two = Engine(GrammarOptions(max_waiting=2))
    try:
        grammars = [Grammar("regex", f"a{i}") for i in range(40)]
        tickets = [engine_with_room_for_two.store.ask(grammar) for grammar in grammars]
        with pytest.raises(ServerBusy, match="too many grammars wait"):
            engine_with_room_for_two.wait(tickets[-1])
        engine_with_room_for_two.wait(tickets[0])
        assert engine_with_room_for_two.get(grammars[-1])
    finally:
        engine_with_room_for_two.store.close()


def test_what_is_kept_has_a_bound_and_what_was_used_last_stays() -> None:
    engine = Engine(GrammarOptions(cache_bytes=20_000))
    try:
        grammars = [Grammar("regex", f"a{i}") for i in range(20)]
        first = engine.get(grammars[0])
        for grammar in grammars[1:]:
            engine.get(grammar)
            assert engine.store.ask(grammars[0]).done, "it was used all the time"
        assert not engine.store.ask(grammars[1]).done
        assert engine.store.num_bytes <= 20_000
        assert engine.get(grammars[0]) is first
    finally:
        engine.store.close()


def test_closing_ends_processes_and_waits_and_leaves_nothing_open() -> None:
    held, processes = held_by_process(), {*descendants(os.getpid())}
    engine = Engine(GrammarOptions())
    engine.get(ABC)
    tickets = [engine.store.ask(Grammar("ebnf", f'root ::= "{"g" * 400_000}{i}"')) for i in range(5)]
    await_worker(engine.process())
    engine.store.close()
    for ticket in (*tickets, engine.store.ask(Grammar("regex", "late"))):
        with pytest.raises(ServerBusy, match="about to stop"):
            engine.wait(ticket)
    wait_until_true(lambda: {*descendants(os.getpid())} <= processes, "its processes have ended")
    wait_until_within(held)


def test_an_engine_that_is_killed_leaves_no_process() -> None:
    code = f"from {__name__.rpartition('.')[2]} import *; engine = Engine(GrammarOptions()); engine.get(ABC); "
    code += "engine.store.ask(SLOW); print(engine.process(), await_worker(engine.process()), flush=True); input()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        pids = [os.pidfd_open(int(pid)) for pid in killed.stdout.readline().split()]
        killed.kill()
    assert len(pids) == 2
    for pid in pids:
        ended, _, _ = select.select([pid], [], [], TIMEOUT_S)
        os.close(pid)
        assert ended, "it lives on"


def test_closing_does_not_wait_for_a_process_that_is_starting() -> None:
    engine = Engine(GrammarOptions())
    ticket = engine.store.ask(ABC)
    began = time.monotonic()
    engine.store.close()
    assert time.monotonic() - began < 8.0
    with pytest.raises(ServerBusy, match="about to stop"):
        engine.wait(ticket)


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    engine = Engine(GrammarOptions(), tmp_path)
    try:
        assert "this server cannot enforce grammars" in (said := engine.refused(ABC))
        assert "tokenizer.json is missing" in said
    finally:
        engine.store.close()
