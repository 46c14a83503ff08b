"""Messages in any order: what is stale is dropped, what overtakes is remembered, what expires is told."""

from collections.abc import Sequence

import msgspec
import pytest

from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import EOS, at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import (
    PROBE_SALT,
    Abort,
    BlockStored,
    CacheCleared,
    Continue,
    Failed,
    Finished,
    KVEvents,
    KVReady,
    Peers,
    Release,
    Resync,
    Tokens,
)
from pdkv.wire.reports import LoadReport

PROMPT = list(range(100, 110))


def test_a_request_runs_to_its_end() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=5), 0.0)
    messages = run(core)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 5)
    (finished,) = of_type(messages, Finished)
    assert (finished.reason, finished.sources.computed) == ("length", len(PROMPT))
    assert [m.sources for m in of_type(messages, Tokens)] == [finished.sources, None, None, None, None]  # type: ignore[union-attr]
    assert at_rest(core)


def test_the_prompt_of_a_routers_probe_counts_nowhere_and_leaves_nothing_behind() -> None:
    core = make_core()
    prompt = PROMPT[:2]  # less than a block, as a probe's is
    core.handle("r", submit(prompt, max_tokens=1, cache_salt=PROBE_SALT), 0.0)
    messages = run(core)
    assert output_of(messages, "a") == expected_tokens(prompt, 1)
    assert (core.counters.computed, core.counters.local_hit) == (0, 0)
    events = [event for m in messages if isinstance(m, KVEvents) for event in m.events]
    assert not [event for event in events if isinstance(event, BlockStored)]
    assert at_rest(core)


def test_a_prompt_counts_although_its_request_is_aborted_as_by_a_stop_string() -> None:
    core = make_core(limits=SchedulerLimits(4, 8))
    core.handle("r", submit(PROMPT, request_id="a", max_tokens=20), 0.0)
    core.handle("r", submit([9] * 20, request_id="b", max_tokens=20), 0.0)
    core.step(0.0)
    core.step(0.0)
    assert len(core.requests["a", 0].output_token_ids) == 1
    assert 0 < core.requests["b", 0].num_confirmed < 20
    core.handle("r", Abort("b", 0), 0.0)
    assert core.counters.computed == 0, "its prompt has no end yet"
    core.handle("r", Abort("a", 0), 0.0)
    assert core.counters.computed == len(PROMPT)
    run(core)
    assert at_rest(core)


def test_an_abort_that_overtakes_its_submit_cancels_it_on_arrival() -> None:
    core = make_core()
    core.handle("r", Abort("a", 0), 0.0)
    core.handle("r", submit(PROMPT), 0.0)
    assert of_type(run(core), Tokens) == []
    assert at_rest(core)


def test_an_abort_in_the_middle_returns_every_block() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=20), 0.0)
    core.step(0.0)
    core.handle("r", Abort("a", 0), 0.0)
    run(core)
    assert at_rest(core)


def test_a_higher_attempt_ends_the_older_one_and_a_lower_one_is_dropped() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, attempt=1), 0.0)
    core.step(0.0)
    core.handle("r", submit(PROMPT, attempt=2), 0.0)
    core.handle("r", submit(PROMPT, attempt=1), 0.0)
    messages = run(core)
    assert {m.attempt for m in of_type(messages, Finished) if isinstance(m, Finished)} == {2}
    assert core.counters.dropped_messages == 1
    assert at_rest(core)


def test_messages_for_unknown_requests_are_counted_and_ignored() -> None:
    """F2: a stale report about an ended request must not reach an assertion."""
    core = make_core(options={"fabric": "core-unknown"})
    for message in (Continue("x", 0, [1]), KVReady("x", 3, ok=False), Release("t-x", 0)):
        core.handle("r", message, 0.0)
    run(core)
    assert core.counters.dropped_messages == 2  # a Release that ends nothing is no mistake
    core.shutdown()


def test_a_deadline_fails_the_request_and_returns_its_blocks() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=30, timeout_s=5.0), 0.0)
    core.step(0.0)
    core.step(6.0)
    messages = [m for _, sent in core.take_messages(6.0) for m in sent]
    (failed,) = of_type(messages, Failed)
    assert (failed.code, failed.retryable) == ("timeout", False)
    run(core, 7.0)
    assert at_rest(core)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [5] * 64}, "64 tokens"),
        ({"prompt_token_ids": [5, 100_000]}, "token ids"),
        ({"kv": "handoff", "until": "end"}, "handoff"),
        ({"kv": "await_peer"}, "connector"),
        ({"adapter": "a-lora"}, "adapter 'a-lora'"),
        ({"params": SamplingParams(temperature=1.0)}, "seed"),
        ({"params": SamplingParams(temperature=0.0, stop_token_ids=(99_999,))}, "99999"),
    ],
)
def test_what_can_never_work_is_refused_with_its_value(change: dict[str, object], names: str) -> None:
    core = make_core()
    core.handle("r", msgspec.structs.replace(submit(PROMPT), **change), 0.0)
    (failed,) = of_type(run(core), Failed)
    assert failed.code == "invalid_request_error"
    assert names in failed.message
    assert at_rest(core)


def test_a_new_epoch_of_a_router_ends_only_its_own_predecessors_requests() -> None:
    core = make_core()
    core.router_joined("other", "1")
    core.handle("r", submit(PROMPT, request_id="a", max_tokens=20), 0.0)
    core.handle("other", submit(PROMPT, request_id="b", max_tokens=20), 0.0)
    core.step(0.0)
    core.router_joined("r", "2")
    assert [key[0] for key in core.requests] == ["b"]
    run(core)
    assert at_rest(core)


def test_a_submit_whose_output_is_complete_ends_at_once() -> None:
    """Its Finished got lost with the engine that ran it."""
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=2, output_token_ids=[9, 8]), 0.0)
    messages = run(core)
    (finished,) = of_type(messages, Finished)
    assert finished.reason == "length"
    assert of_type(messages, Tokens) == []


def test_a_stop_token_ends_the_request_and_is_in_the_output() -> None:
    core = make_core()
    stop = expected_tokens(PROMPT, 3)[2]
    params = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=(stop,))
    core.handle("r", msgspec.structs.replace(submit(PROMPT), params=params), 0.0)
    messages = run(core)
    (finished,) = of_type(messages, Finished)
    assert (finished.reason, finished.stop_token_id) == ("stop", stop)
    assert output_of(messages, "a")[-1] == stop
    assert stop != EOS


def test_continuing_from_output_gives_what_one_run_gives() -> None:
    core = make_core()
    whole = expected_tokens(PROMPT, 6)
    core.handle("r", submit(PROMPT, max_tokens=6, output_token_ids=whole[:3]), 0.0)
    messages = run(core)
    assert output_of(messages, "a") == whole[3:]
    assert [m.position for m in messages if isinstance(m, Tokens)] == [3, 4, 5]


def test_resync_sends_the_whole_cache_again_under_the_same_numbers() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=1), 0.0)
    numbers = [m.number for m in of_type(run(core), KVEvents) if isinstance(m, KVEvents)]
    core.handle("r", Resync(), 0.0)
    messages = [m for _, sent in core.take_messages(1.0) for m in sent]
    (events,) = of_type(messages, KVEvents)
    assert events.number == numbers[-1]
    assert isinstance(events.events[0], CacheCleared)
    assert sum(isinstance(event, BlockStored) for event in events.events) == 2


def test_an_idle_engine_reports_its_load() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, max_tokens=1), 0.0)
    loads = [m for m in run(core) if isinstance(m, LoadReport)]
    assert (loads[-1].waiting, loads[-1].running, loads[-1].sources.computed) == (0, 0, len(PROMPT))


def test_an_idle_engine_has_nothing_to_do_and_no_deadline() -> None:
    core: EngineCore = make_core()
    run(core)
    assert not core.has_work
    assert core.next_deadline() is None


def test_an_abort_that_overtakes_a_higher_attempt_cancels_it_on_arrival() -> None:
    core = make_core()
    core.handle("r", submit(PROMPT, attempt=1), 0.0)
    core.step(0.0)
    core.handle("r", Abort("a", 2), 0.0)
    core.handle("r", submit(PROMPT, attempt=2), 0.0)
    assert {m.attempt for m in run(core) if isinstance(m, Tokens)} == {1}


def test_a_peer_is_gone_when_no_router_knows_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the connector's two sides are told: the workers of changes, the scheduler's side of all who are there."""
    core = make_core(options={"fabric": "core-peers"})
    changes: list[tuple[list[str], list[str]]] = []
    there: list[list[str]] = []

    def names(cards: Sequence[EngineCard]) -> list[str]:
        return sorted(card.engine for card in cards)

    def tell_workers(added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        changes.append((names(added), names(removed)))

    monkeypatch.setattr(core.executor, "update_peers", tell_workers)
    monkeypatch.setattr(core.external.connector, "update_peers", lambda cards: there.append(names(cards)))
    core.router_joined("other", "1")
    x, y = (make_core(name=name).card for name in ("x", "y"))
    core.handle("r", Peers([x, y, core.card]), 0.0)
    core.handle("other", Peers([x]), 0.0)  # it has only begun to find them
    assert (changes[0], there[-1]) == ((["x", "y"], []), ["x", "y"])
    core.handle("r", Peers([x]), 0.0)
    assert there[-1] == ["x"]
    core.router_left("other")
    assert there[-1] == ["x"]
    core.handle("r", Peers([y], removed=[]), 0.0)
    assert there[-1] == ["x", "y"]
    core.handle("r", Peers([], removed=["y", "unknown"]), 0.0)
    assert there[-1] == ["x"]
    core.router_left("r")
    assert there[-1] == []
    turns = [([], ["y"]), (["y"], []), ([], ["y"]), ([], ["x"])]
    assert [change for change in changes[1:] if change != ([], [])] == turns
