"""Requests that wait for their grammar hold nobody up and end as any other; workers know the grammars they need."""

import msgspec
import pytest
from held_grammars import HeldStore

from pdkv.config import HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.errors import GrammarGivenUp, InvalidRequest, ServerBusy
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import Grammar
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import Abort, Continue, Failed, Finished, KVReady, KVTicket, Submit, Trial
from pdkv.wire.reports import LoadReport

PROMPT = list(range(100, 110))
A, B = Grammar("text", "a+"), Grammar("text", "b+")


def with_grammar(grammar: Grammar = A, **fields: object) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0, grammar=grammar)
    return msgspec.structs.replace(submit(PROMPT, **fields), params=params)  # type: ignore[arg-type]


@pytest.fixture
def store() -> HeldStore:
    return HeldStore()


@pytest.fixture
def core(store: HeldStore) -> EngineCore:
    return make_core(grammars=store)


def waiting(core: EngineCore) -> int:
    reports = [m for m in of_type(run(core), LoadReport) if isinstance(m, LoadReport)]
    return reports[-1].waiting if reports else 0


def test_others_pass_and_it_goes_on_when_its_grammar_is_there(core: EngineCore, store: HeldStore) -> None:
    core.handle("r", with_grammar(), 0.0)
    core.handle("r", submit(PROMPT, request_id="b"), 0.0)
    assert output_of(run(core), "b") == expected_tokens(PROMPT, 4)
    assert not core.has_work
    assert core.next_deadline() is not None
    store.settle(A)
    assert core.has_work
    assert output_of(run(core), "a") == expected_tokens(PROMPT, 4)
    assert at_rest(core)
    assert all(ticket.is_closed for ticket in store.tickets)


def test_a_known_grammar_costs_no_step(core: EngineCore, store: HeldStore) -> None:
    store.settle(A)
    core.handle("r", with_grammar(), 0.0)
    plan = core.plan_step(1.0)
    assert [new.key for new in plan.new] == [("a", 0)]
    assert plan.new[0].grammar is not None
    assert plan.new[0].params.grammar is None  # its text is of no use there


def test_a_wrong_grammar_fails_its_request_alone(core: EngineCore, store: HeldStore) -> None:
    error = InvalidRequest("a ( is not closed", param="structured_outputs")
    core.handle("r", with_grammar(), 0.0)
    core.handle("r", submit(PROMPT, request_id="b"), 0.0)
    store.settle(A, error)
    messages = run(core)
    assert of_type(messages, Failed) == [Failed("a", 0, error.code, "a ( is not closed", False, "structured_outputs")]
    assert output_of(messages, "b") == expected_tokens(PROMPT, 4)
    core.handle("r", with_grammar(request_id="c"), 2.0)  # known to be wrong by now
    assert of_type(run(core), Failed) == [Failed("c", 0, error.code, "a ( is not closed", False, "structured_outputs")]
    assert at_rest(core)


def test_another_engine_may_try_what_this_one_has_no_time_for(core: EngineCore, store: HeldStore) -> None:
    core.handle("r", with_grammar(), 0.0)
    store.settle(A, ServerBusy("too many grammars wait"))
    assert of_type(run(core), Failed) == [Failed("a", 0, "server_busy", "too many grammars wait", True)]
    assert at_rest(core)


def test_an_engine_that_enforces_no_grammars_says_so() -> None:
    core = make_core()
    core.handle("r", with_grammar(), 0.0)
    (failed,) = of_type(run(core), Failed)
    assert (failed.code, failed.param) == (InvalidRequest.code, "structured_outputs")


@pytest.mark.parametrize("end", ["abort", "deadline", "router", "newer", "shutdown"])
def test_a_wait_ends_with_its_request(end: str, core: EngineCore, store: HeldStore) -> None:
    core.handle("r", with_grammar(timeout_s=5.0, trial_tokens=2), 0.0)
    assert waiting(core) == 1
    match end:
        case "abort":
            core.handle("r", Abort("a", 0), 1.0)
        case "deadline":
            assert core.next_deadline() == 5.0
            core.step(5.0)
        case "router":
            core.router_left("r")
        case "newer":
            core.handle("r", with_grammar(attempt=1), 1.0)
            core.handle("r", Abort("a", 1), 1.0)
        case "shutdown":
            core.shutdown()
    assert all(ticket.is_closed for ticket in store.tickets)
    if end == "shutdown":
        return
    store.settle(A)
    assert [m.code for m in of_type(run(core, 6.0), Failed) if isinstance(m, Failed)] == ["timeout"] * (
        end == "deadline"
    )
    assert at_rest(core)
    assert not core.scheduler.trials.active
    core.handle("r", submit(PROMPT, request_id="b"), 7.0)
    assert output_of(run(core, 7.0), "b") == expected_tokens(PROMPT, 4)
    core.handle("r", submit(PROMPT, request_id="c", trial_tokens=1), 7.0)  # suspects are counted right
    assert of_type(run(core, 7.0), Trial) == [Trial("c", 0, begins=True)]


@pytest.mark.parametrize("ok", [True, False])
def test_hand_off_messages_find_a_request_that_waits(ok: bool, store: HeldStore) -> None:
    """Decode hears of the KV, and of the first token, before it has the grammar."""
    core = make_core(grammars=store, options={"mode": "push"}, handoff=HandoffConfig(connector="memory"))
    core.handle("r", with_grammar(kv="await_peer"), 0.0)
    first = expected_tokens(PROMPT, 4)[0]
    core.handle("r", KVHandoff("a", 0, "t-a", "e1", "1", len(PROMPT), b""), 0.0)
    core.handle("r", KVReady("a", 0, ok, "" if ok else "kv_not_found"), 0.0)
    core.handle("r", Continue("a", 0, [first]), 0.0)
    assert not of_type(run(core), Failed)
    request = core.requests["a", 0]
    assert (request.output_token_ids, request.kv_ready) == ([first], ok)
    assert request.handoff is not None
    store.settle(A)
    if ok:
        core.handle("r", Abort("a", 0), 1.0)
        run(core)
    else:
        assert [first, *output_of(run(core), "a")] == expected_tokens(PROMPT, 4)
    assert at_rest(core)


def test_a_hand_off_waits_with_its_ticket(store: HeldStore) -> None:
    core = make_core(grammars=store, options={"mode": "push"}, handoff=HandoffConfig(connector="memory"))
    core.handle("r", with_grammar(kv="handoff", until="first_token"), 0.0)
    core.handle("r", KVTicket("a", 0, b"ticket", 1), 0.0)
    run(core)
    assert core.requests["a", 0].ticket == b"ticket"
    core.handle("r", Abort("a", 0), 1.0)
    run(core)
    assert at_rest(core)


def test_a_request_whose_mask_is_late_is_left_out_and_goes_on_when_it_is_there() -> None:
    """The others draw in the same step; nothing is planned for it meanwhile, nor drawn twice behind it."""
    late = iter([False, True, False, True])
    store = HeldStore(is_late=lambda: next(late, False))
    core = make_core(grammars=store)
    store.settle(A)
    core.handle("r", with_grammar(), 0.0)
    core.handle("r", submit(PROMPT, request_id="b"), 0.0)
    messages = run(core)
    assert output_of(messages, "b") == expected_tokens(PROMPT, 4)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 1)
    assert not core.has_work
    while store.missing:
        store.bring()
        assert core.has_work
        messages += run(core)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert at_rest(core)


def test_an_answer_that_is_given_up_fails_its_request_though_no_step_has_it() -> None:
    store = HeldStore(is_late=lambda: True)
    core = make_core(grammars=store)
    store.settle(A)
    core.handle("r", with_grammar(), 0.0)
    run(core)
    assert store.missing == [("a", 0)]
    store.failed["a", 0] = GrammarGivenUp("the grammar takes too long", param="structured_outputs")
    assert core.has_work
    (failed,) = of_type(run(core), Failed)
    assert failed == Failed("a", 0, "grammar_given_up", "the grammar takes too long", False, "structured_outputs")
    assert at_rest(core)


def test_a_grammar_is_asked_for_in_its_tenants_name(core: EngineCore, store: HeldStore) -> None:
    core.handle("r", with_grammar(tenant="t1"), 0.0)
    assert store.tenants == ["t1"]


def test_an_answer_that_is_complete_needs_no_grammar(core: EngineCore) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, seed=0, grammar=A)
    core.handle("r", msgspec.structs.replace(submit(PROMPT, output_token_ids=[7, 8]), params=params), 0.0)
    assert [m.reason for m in of_type(run(core), Finished) if isinstance(m, Finished)] == ["length"]
