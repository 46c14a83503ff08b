"""A store that has less than it said: what came is used, the rest is computed, and every token is counted once."""

from collections.abc import Iterator

import pytest
from state_machine.standin_store import STAND_IN_STORE, StandInStoreScheduler, store_of

from pdkv.config import HandoffConfig
from pdkv.connectors.base import ASK_AGAIN, MatchedTokens, RequestView
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import Failed, Finished, HandedOff, KVReady, Loaded
from pdkv.wire.reports import SourceCounts

PROMPT = list(range(100, 133))  # 8 blocks of 4, and a token
FABRIC = "partial-loads"


@pytest.fixture(autouse=True)
def _fabric() -> Iterator[None]:
    MemoryFabric.bind(FABRIC, MemoryFabric())
    yield
    MemoryFabric.unbind(FABRIC)


def engine(name: str, load: str, **arguments: object) -> EngineCore:
    options = {"fabric": FABRIC, "mode": "store", "load": load}
    return make_core(name=name, connector=STAND_IN_STORE, options=options, num_blocks=32, **arguments)  # type: ignore[arg-type]


def lose(core: EngineCore, index: int) -> None:
    """The prompt's block of that number is no longer in the store."""
    (request,) = core.requests.values()
    store = store_of(MemoryFabric.named(FABRIC))
    assert request.hash_keys[index] in store
    store.discard(request.hash_keys[index])


def sources(messages: list) -> SourceCounts:  # type: ignore[type-arg]
    (finished,) = of_type(messages, Finished)
    assert finished.sources is not None
    return finished.sources


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("lost", range(8))
def test_what_lies_before_the_gap_is_used_and_the_rest_is_computed(load: str, lost: int) -> None:
    """B1."""
    run_prompt(engine("there", load))
    here = engine("here", load)
    here.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    plan = here.scheduler.schedule(0.0)
    lose(here, lost)
    here.finish_step(here.executor.execute(plan), 0.0)
    messages = run(here)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 3)
    assert sources(messages) == SourceCounts(0, 33 - 4 * lost, 0, 0, 4 * lost)
    report = here.reports.make_load()
    assert (report.partial_loads, report.load_failures) == (1, 0)
    assert at_rest(here)
    assert here.scheduler.queues._num_places_taken == 0
    here.handle("r", submit(PROMPT, request_id="b", max_tokens=3), 0.0)  # what came in part is in the cache as whole
    again = run(here)
    assert output_of(again, "b") == expected_tokens(PROMPT, 3)
    assert sources(again).local_hit == 32


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_who_goes_on_behind_a_gap_keeps_its_place_before_who_is_less_urgent(load: str) -> None:
    run_prompt(engine("there", load))
    here = engine("here", load)
    here.handle("r", submit([1, 2, 3], request_id="later", max_tokens=9, priority=5), 0.0)
    here.step(0.0)
    here.handle("r", submit(PROMPT, max_tokens=3, priority=1), 0.0)
    plan = here.scheduler.schedule(0.0)
    store_of(MemoryFabric.named(FABRIC)).discard(here.requests["a", 0].hash_keys[5])
    here.finish_step(here.executor.execute(plan), 0.0)
    while len(here.scheduler.running) < 2:
        here.step(0.0)
        here.scheduler.queues.check_integrity()
    assert [request.submit.request_id for request in here.scheduler.running] == ["a", "later"]
    run(here)
    assert at_rest(here)


@pytest.mark.parametrize("lost", [1, 5])
def test_steps_that_were_begun_behind_a_layerwise_load_bring_nothing(lost: int) -> None:
    run_prompt(engine("there", "layerwise"), PROMPT[:25])
    here = engine("here", "layerwise", limits=SchedulerLimits(4, 4))
    here.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    first = here.scheduler.schedule(0.0)
    assert [(share.num_computed, share.num_scheduled) for share in first.scheduled] == [(24, 4)]
    lose(here, lost)
    outputs = [here.executor.execute(first)]
    outputs.append(here.executor.execute(here.scheduler.schedule(0.0)))
    for output in outputs:
        here.finish_step(output, 0.0)
    messages = run(here)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 3)
    assert sources(messages) == SourceCounts(0, 33 - 4 * lost, 0, 0, 4 * lost)
    assert at_rest(here)
    reader = engine("reader", "async")
    reader.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    assert output_of(run(reader), "a") == expected_tokens(PROMPT, 3), "nothing wrong was saved"


@pytest.mark.parametrize("together", [True, False])
def test_where_decodes_must_not_wait_a_load_beside_them_is_not_layerwise(together: bool) -> None:
    """Its request computes nothing in the decodes' steps before the load has ended."""
    run_prompt(engine("there", "layerwise"), PROMPT)
    here = engine("here", "layerwise", limits=SchedulerLimits(8, 64, decodes_with_loads=together))
    here.handle("r", submit([7, 8, 9], request_id="other", max_tokens=9), 0.0)
    here.step(0.0)
    here.step(0.0)
    here.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    plan = here.scheduler.schedule(0.0)
    assert [share.key[0] for share in plan.scheduled] == (["other", "a"] if together else ["other"])
    here.finish_step(here.executor.execute(plan), 0.0)
    messages = run(here)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 3)
    assert sum(m.sources.store for m in of_type(messages, Finished)) == 32
    again = engine("again", "layerwise", limits=SchedulerLimits(8, 64, decodes_with_loads=together))
    again.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    (share,) = again.scheduler.schedule(0.0).scheduled
    assert share.num_computed == 32, "with prompts, or alone, it is"


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_hand_off_of_which_a_part_came_does_as_the_policy_says(load: str, policy: str) -> None:
    there = engine("there", load)
    there.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
    messages = run(there)
    (handed_off,) = of_type(messages, HandedOff)
    first_token = output_of(messages, "a")
    handoff: KVHandoff = handed_off.handoff
    config = HandoffConfig(connector="memory", kv_load_failure_policy=policy)  # type: ignore[arg-type]
    here = engine("here", load, handoff=config)
    wanted = submit(PROMPT, max_tokens=3, output_token_ids=first_token, kv="await_peer", handoff=handoff)
    here.handle("r", wanted, 0.0)
    here.handle("r", KVReady("a", 0, True), 0.0)
    plan = here.scheduler.schedule(0.0)
    lose(here, 5)
    here.finish_step(here.executor.execute(plan), 0.0)
    messages = run(here)
    (loaded,) = of_type(messages, Loaded)
    assert (loaded.ok, loaded.code) == (False, "kv_not_found")
    if policy == "fail":
        assert [m.code for m in of_type(messages, Failed)] == ["kv_not_found"]
    else:
        assert first_token + output_of(messages, "a") == expected_tokens(PROMPT, 3)
        assert sources(messages) == SourceCounts(0, 13, 0, 20, 0)
    assert here.reports.make_load().load_failures == 1
    assert at_rest(here)


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_that_comes_while_steps_are_full_is_used(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a request then waits for its turn: only a connector that does not answer is given up."""
    run_prompt(engine("there", "async"))
    here = engine("here", "async", limits=SchedulerLimits(8, 4, kv_load_timeout_s=5.0))
    match, num_asked = StandInStoreScheduler.get_num_new_matched_tokens, []

    def answer_later(side: StandInStoreScheduler, request: RequestView, num_computed: int) -> MatchedTokens:
        num_asked.append(request.request_id)
        has_answer = answers and num_asked.count(request.request_id) > 1
        return match(side, request, num_computed) if has_answer or request.request_id != "a" else ASK_AGAIN

    monkeypatch.setattr(StandInStoreScheduler, "get_num_new_matched_tokens", answer_later)
    here.handle("r", submit(PROMPT, max_tokens=3), 0.0)
    here.step(0.0)
    here.handle("r", submit(list(range(1, 25)), request_id="busy", max_tokens=1, priority=-1), 0.0)
    here.step(0.0)
    here.step(6.0)
    assert num_asked.count("a") == 2
    messages = run(here)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 3)
    assert sum(m.sources.store for m in of_type(messages, Finished)) == (32 if answers else 0)
    assert here.reports.make_load().load_failures == (not answers)
    assert at_rest(here)


def run_prompt(core: EngineCore, prompt: list[int] = PROMPT) -> None:
    """Compute and store it."""
    core.handle("r", submit(prompt, max_tokens=1), 0.0)
    run(core)
