"""Between the end of a load and the first row of its request no step computes nothing: real engines and connectors."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdkv.connectors.transfer.worker import TransferWorker
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.testing import VirtualClock
from pdkv.testing.engine import InProcessEngine, make_core, of_type, run, submit
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    Allocated,
    Continue,
    EngineToRouter,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Peers,
    Release,
    Tokens,
)
from pdkv.wire.reports import LoadReport

PROMPT = list(range(5, 105))  # six blocks and a part of one
WAIT_S = 60.0
AMPLE = {"lookup_timeout_s": "60"}  # no step comes by the time, so that a lookup given up would bring none


class Stepped(InProcessEngine):
    """An engine whose steps are counted; none of them comes by the time."""

    computed: list[int]
    """Tokens of each step."""


def stepped(name: str, model: Path, connector: str, options: Mapping[str, str], stack: ExitStack) -> Stepped:
    engine = Stepped.of_model(model, connector, options, name=name, clock=VirtualClock(), kv_cache_memory=4 << 20)
    stack.callback(engine.close)
    engine.computed, execute = [], engine.core.executor.execute

    def counted(plan: StepPlan) -> StepOutput:
        engine.computed.append(plan.num_tokens)
        return execute(plan)

    engine.core.executor.execute = counted  # type: ignore[method-assign]
    return engine


class Gate:
    """Holds every job of all I/O threads while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        self._opened.set()
        run: Any = TransferWorker._run

        def held(worker: TransferWorker, *args: Any) -> None:
            assert self._opened.wait(WAIT_S)
            run(worker, *args)

        monkeypatch.setattr(TransferWorker, "_run", held)
        self.close, self.open = self._opened.clear, self._opened.set


def steps_behind_load(reader: Stepped, gate: Gate) -> list[int]:
    """Tokens of the reader's steps from the moment at which its load may end to the first one that computes."""
    assert not reader.core.has_work  # it waits for the load, and for nothing else
    reader.computed.clear()
    gate.open()
    reader.run_until(lambda: any(reader.computed))
    return reader.computed[: next(i for i, count in enumerate(reader.computed) if count) + 1]


def pair(model: Path, connector: str, options: Mapping[str, str], stack: ExitStack) -> tuple[Stepped, Stepped]:
    """Two engines that know each other."""
    source, reader = (stepped(name, model, connector, options, stack) for name in ("source", "reader"))
    source.tell(Peers([reader.core.card]))
    reader.tell(Peers([source.core.card]))
    return source, reader


def ticket_for(reader: Stepped) -> KVTicket:
    """Where the reader wants the prompt's KV pushed."""
    (allocated,) = of_type(reader.tell(submit(PROMPT, kv="await_peer")), Allocated)
    assert allocated.ticket is not None
    return KVTicket("a", 0, allocated.ticket)


def handed_off(sent: Sequence[EngineToRouter]) -> KVHandoff:
    """What the reader is told of a prompt that lies at its source."""
    (message,) = of_type(sent, HandedOff)
    return message.handoff


def first_token(sent: Sequence[EngineToRouter]) -> list[int]:
    (tokens,) = of_type(sent, Tokens)
    return tokens.token_ids


@pytest.mark.parametrize("connector", ["shared_memory", "nixl"])
def test_a_pulled_request_decodes_in_the_step_that_learns_of_its_kv(
    connector: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, connector, {}, stack)
        sent = source.tell(submit(PROMPT, until="first_token", kv="handoff"))
        handoff = handed_off(sent)
        gate.close()
        output = first_token(sent)
        reader.tell(submit(PROMPT, kv="await_peer", output_token_ids=output, handoff=handoff))
        assert steps_behind_load(reader, gate) == [1]


@pytest.mark.parametrize(("connector", "options"), [("p2p", {}), ("nixl", {"mode": "push"})])
def test_a_request_whose_kv_is_pushed_decodes_in_the_step_that_learns_of_it(
    connector: str, options: Mapping[str, str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, connector, options, stack)
        ticket = ticket_for(reader)
        gate.close()
        sent = source.tell(submit(PROMPT, until="first_token", kv="handoff"), ticket)
        reader.tell(Continue("a", 0, first_token(sent)))
        assert steps_behind_load(reader, gate) == [1]


def test_a_hit_in_a_store_is_continued_in_the_step_that_learns_of_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        options = {"url": "memory://no-empty-step", "tokens_per_value": "16", **AMPLE}
        source, reader = pair(tiny_model_dir, "store", options, stack)
        source.tell_until(Finished, submit(PROMPT, max_tokens=1))  # behind the store's answer
        rest(source)  # it saves
        gate.close()
        reader.tell(submit(PROMPT))
        reader.run_until(lambda: bool(reader.core.external.loads))  # the store answers whether it has the prompt
        assert steps_behind_load(reader, gate) == [len(PROMPT) % 16]


def test_a_pull_brings_one_empty_step_which_begins_it(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the request's end nor the lease's needs a step; what the source has computed is digested behind it."""
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, "shared_memory", {}, stack)
        sent = source.tell(submit(PROMPT, until="first_token", kv="handoff"))
        handoff = handed_off(sent)
        output = first_token(sent)
        gate.close()
        reader.tell(submit(PROMPT, kv="await_peer", output_token_ids=output, handoff=handoff))
        assert reader.computed == [0, 0]  # the one before is for its peers
        steps_behind_load(reader, gate)
        source.tell(Release(handoff.transfer_id, 0))
        assert (source.computed, reader.computed) == ([0, len(PROMPT), 0], [1, 1, 1])
        assert_nothing_is_held(source)
        assert_nothing_is_held(reader)


def rest(engine: Stepped) -> list[EngineToRouter]:
    """What an engine says until no transfer of its own is under way."""
    return engine.run_until(lambda: engine.core.external.is_idle)


def assert_nothing_is_held(engine: Stepped) -> None:
    counts = engine.core.scheduler.kv.pool.counts()
    assert counts.free + counts.cached == counts.total, counts


@pytest.mark.parametrize(("connector", "options"), [("p2p", {}), ("nixl", {"mode": "push"})])
def test_a_push_ends_and_is_counted_without_a_step(
    connector: str, options: Mapping[str, str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its release bring one: what is over is told with a step that somebody needs."""
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, connector, options, stack)
        ticket = ticket_for(reader)
        gate.close()
        asked = submit(PROMPT, until="first_token", kv="handoff")
        source.tell(asked, ticket)
        assert source.computed == [0, len(PROMPT), 0]  # the last one says that nothing more of it comes
        gate.open()
        sent = rest(source)
        (ready,) = of_type(sent, KVReady)
        assert ready.ok
        last = of_type(sent, LoadReport)[-1]
        assert last.connectors[connector].saves == 1
        source.tell(Release(asked.transfer_id, 0))
        assert source.computed == [0, len(PROMPT), 0]
        assert_nothing_is_held(source)


def test_a_release_cancels_a_push_under_way_with_a_step_of_its_own(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, "p2p", {}, stack)
        ticket = ticket_for(reader)
        gate.close()
        asked = submit(PROMPT, until="first_token", kv="handoff")
        source.tell(asked, ticket)
        source.tell(Release(asked.transfer_id, 0))
        rest(source)  # queued jobs end with the cancel: the threads are held all the time
        assert_nothing_is_held(source)
        gate.open()


@pytest.mark.parametrize("length", [96, 100])
def test_a_stored_hand_off_ends_without_a_step_but_for_its_tail(length: int, tiny_model_dir: Path) -> None:
    with ExitStack() as stack:
        options = {"url": f"memory://no-empty-step-{length}", "tokens_per_value": "16", **AMPLE}
        source, _ = pair(tiny_model_dir, "store", options, stack)
        asked = submit(PROMPT[:length], until="first_token", kv="handoff")
        sent = source.tell_until(HandedOff, asked) + rest(source)
        assert len(of_type(sent, KVReady)) == 1
        steps = [0, 0, length, 0]  # for its peers, the store's answer, the prompt; what it saves begins with the last
        assert source.computed == steps
        source.tell(Release(asked.transfer_id, 0))
        rest(source)
        assert source.computed == steps + [0] * bool(length % 16)
        assert_nothing_is_held(source)


def test_an_idle_engine_says_that_its_store_cannot_be_reached(tiny_model_dir: Path) -> None:
    with ExitStack() as stack:
        engine = stepped("alone", tiny_model_dir, "store", {"url": "redis://127.0.0.1:9"}, stack)
        engine.run_until(lambda: any(report.connector_problem for report in of_type(engine.sent, LoadReport)))
        assert engine.computed == []


def test_a_release_that_overtakes_the_step_behind_a_request_leaves_no_block_held(tiny_model_dir: Path) -> None:
    """Its reader had all of the KV already: nothing is to be digested, and no step is made to learn that."""
    with ExitStack() as stack:
        source, _ = pair(tiny_model_dir, "shared_memory", {}, stack)
        now = source.clock.now()
        source.core.handle("r", submit(PROMPT, until="first_token", kv="handoff"), now)
        sent: list[EngineToRouter] = []
        while not of_type(sent, HandedOff):
            source.core.step(now)
            sent += [message for _, messages in source.core.take_messages(now) for message in messages]
        handoff = handed_off(sent)
        source.tell(Release(handoff.transfer_id, 0))
        assert_nothing_is_held(source)


def test_news_for_a_request_that_still_waits_for_its_kv_brings_no_step(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ExitStack() as stack:
        source, reader = pair(tiny_model_dir, "p2p", {}, stack)
        ticket = ticket_for(reader)
        gate.close()
        sent = source.tell(submit(PROMPT, until="first_token", kv="handoff"), ticket)
        before = len(reader.computed)
        reader.tell(Continue("a", 0, first_token(sent)))
        assert len(reader.computed) == before
        assert steps_behind_load(reader, gate) == [1]


def test_blocks_that_a_release_gives_back_are_taken_at_once_by_who_waits_for_them() -> None:
    core = make_core(num_blocks=16, options={"fabric": "released-blocks"})  # blocks of 4 tokens
    core.handle("r", submit(list(range(100, 130)), until="first_token", kv="handoff"), 0.0)
    handoff = handed_off(run(core))
    core.handle("r", submit(list(range(200, 240)), request_id="b", max_tokens=1), 0.0)
    assert not of_type(run(core), Tokens)  # two blocks too few
    core.handle("r", Release(handoff.transfer_id, 0), 0.0)
    assert of_type(run(core), Tokens)
    core.shutdown()
