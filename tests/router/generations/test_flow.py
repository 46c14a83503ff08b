"""The state machine of one generation under random interleavings, failures, deaths, aborts and expiries."""

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, expected_output, make_request

from pdkv.errors import EngineDied, InvalidRequest, RequestAborted, RequestFailed, RequestTimeout
from pdkv.router.generations.flow import RequestFlow, Sends
from pdkv.router.request import Delta, GenerateRequest, Offer, Route
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVHandoff, KVTerms
from pdkv.wire.messages import (
    Abort,
    Allocated,
    Continue,
    Failed,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Loaded,
    PromptLogprobs,
    Release,
    Submit,
    TokenLogprob,
    Tokens,
)
from pdkv.wire.reports import SourceCounts
from pdkv.wire.types import MAX_BLOB_BYTES
from tests.conftest import EXAMPLES

NOW = 100.0
PAIRS = [
    ("pull", "prefill_first"),
    ("store", "prefill_first"),
    ("push", "concurrent"),
    ("push", "needs_peer_first"),
    ("push", "decode_first"),
    ("pull", "decode_first"),
    ("pull", "aggregated"),
]


MAX_ATTEMPT = 3
TERMS = KVTerms(owner=7, ttl_s=60)


class World:
    """A flow, four engines and first-in-first-out channels between them; chance decides who is next."""

    def __init__(self, data: st.DataObject, kind: str, order: str, request: GenerateRequest) -> None:
        self.data = data
        self.engines = {
            name: ScriptedEngine(name, kind, self.draw, max_tokens_per_step=2) for name in ("p0", "p1", "d0", "d1")
        }
        self.order = order
        self.request = request
        self.down: dict[str, deque[Any]] = {name: deque() for name in self.engines}
        self.up: dict[str, deque[Any]] = {name: deque() for name in self.engines}
        self.tokens: list[int] = []
        self.num_ends = self.num_resumed = 0
        self.given_up = False
        self.flow = RequestFlow(request, self.route(), request_id="q", transfer_id="t", loan_id="loan", now=NOW)

    def draw(self, n: int) -> int:
        return self.data.draw(st.integers(0, n - 1))

    def route(self) -> Route:
        prefill = [n for n in self.engines if n[0] == "p"]
        decode = [n for n in self.engines if n[0] == "d"]
        if self.order == "aggregated":
            return Route(prefill[0], prefill[0])
        is_open = self.order == "prefill_first" and self.draw(2)
        lenders = [n for n in self.engines if n != prefill[0]]
        number = self.draw(len(lenders) + 2)  # half of them have somebody who lends
        offer = Offer(lenders[number - 1], self.draw(20)) if 0 < number <= len(lenders) else None
        return Route(prefill[0], "" if is_open else decode[0], self.order, offer)  # type: ignore[arg-type]

    def send(self, sends: Sends) -> None:
        for name, message in sends:
            assert not isinstance(message, Submit) or message.kv_terms is TERMS, "a continuation is stored on them, too"
            if name in self.engines:
                self.down[name].append(message)

    def read(self) -> None:
        while (delta := self.flow.take_delta()) is not None:
            self.tokens += delta.token_ids
            self.num_ends += delta.finish_reason is not None

    def actions(self) -> list[tuple[str, str]]:
        found = [("deliver", name) for name in self.engines if self.down[name]]
        found += [("answer", name) for name in self.engines if self.up[name]]
        found += [("tire", "p0" if "p0" in self.engines else "p1")] if self.flow.loan.state == "asked" else []
        return found + [("step", name) for name, engine in self.engines.items() if engine.runnable()]

    def act(self, action: str, name: str) -> None:
        if action == "tire":  # of waiting for a lender
            self.send(self.flow.go_without_loan("transfer_timeout", NOW))
            return
        engine = self.engines[name]
        if action == "deliver":
            engine.receive(self.down[name].popleft())
        elif action == "step":
            keys = engine.runnable()
            if keys:
                engine.step(keys[self.draw(len(keys))])
        else:
            message = self.up[name].popleft()
            if getattr(message, "request_id", "") == self.flow.loan_id:
                if self.flow.accepts_loan(name, message):
                    self.send(self.flow.handle_loan(message, NOW))
            elif self.flow.accepts(name, message):
                self.send(self.flow.handle(name, message, NOW))
        self.up[name].extend(engine.outbox)
        engine.outbox.clear()

    def kill(self, name: str) -> None:
        del self.engines[name], self.down[name], self.up[name]
        if name in self.flow.route[:2]:
            self.send(self.flow.engine_died(name))
            self.recover()
        if name == self.flow.loan.lender:
            self.send(self.flow.go_without_loan("peer_gone", NOW))

    def recover(self) -> None:
        """What a driver does after a failure and after a hand-off."""
        flow, left = self.flow, {n[0] for n in self.engines}
        if flow.failure is not None and flow.retryable and not self.given_up:
            if flow.attempt == MAX_ATTEMPT:
                self.given_up = True
                self.send(flow.give_up())
            elif flow.can_resume and self.draw(4) != 3:
                self.num_resumed += 1
                self.send(flow.resume())
            elif left == {"p", "d"}:
                self.send([*flow.reset(), *flow.begin(self.route(), NOW)])
            else:
                self.given_up = True
                self.send(flow.give_up())
        if flow.awaits_decode:
            names = [n for n in self.engines if n[0] == "d"]
            error = RequestFailed("nobody decodes", request_id="q")
            self.send(flow.bind_decode(names[self.draw(len(names))], NOW) if names else flow.fail(error))

    def disturb(self) -> None:
        match self.draw(60):
            case 57:
                self.send(self.flow.abort())
            case 58:
                self.send(self.flow.expire(self.flow.deadline))
            case 56 | 59 if len(self.engines) > 1:
                self.kill(list(self.engines)[self.draw(len(self.engines))])
            case _:
                pass

    def run(self) -> None:
        self.send(self.flow.start(NOW))
        while actions := self.actions():
            self.act(*actions[self.draw(len(actions))])
            self.disturb()
            self.recover()
            if self.draw(3) == 0:
                self.read()
        self.read()


@pytest.mark.parametrize(("kind", "order"), PAIRS)
@settings(max_examples=60 * EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_interleaving_ends_with_the_right_tokens_and_without_leases(
    kind: str, order: str, data: st.DataObject
) -> None:
    request = make_request(data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6)), kv_terms=TERMS)
    world = World(data, kind, order, request)
    world.run()
    flow, expected = world.flow, expected_output(request)
    assert flow.ended, (flow.prefill, flow.decode, flow.declined)
    event(f"{type(flow.failure).__name__ if flow.failure else flow.finish_reason}, attempt {flow.attempt}")
    assert world.tokens == flow.output_token_ids == expected[: len(world.tokens)]
    if flow.failure is None:
        assert world.tokens == expected
        assert world.num_ends == 1
        assert flow.sources is not None
        assert flow.sources.computed + flow.sources.remote == len(request.prompt_token_ids)
    for engine in world.engines.values():
        assert not engine.leases
        assert not engine.tasks


@pytest.mark.parametrize(("kind", "order"), PAIRS)
def test_undisturbed_run_sends_no_abort_and_releases_once(kind: str, order: str) -> None:
    class Dull:
        def draw(self, strategy: Any) -> int:
            return 0

    request = make_request(20, 5, kv_terms=TERMS)
    world = World(Dull(), kind, order, request)  # type: ignore[arg-type]
    world.run()
    assert world.tokens == expected_output(request)
    received = [m for engine in world.engines.values() for m in engine.received]
    assert not [m for m in received if isinstance(m, Abort)]
    assert len([m for m in received if isinstance(m, Release)]) == (order != "aggregated")


# --- single steps -----------------------------------------------------------------------------------------------------


def make_flow(order: str = "prefill_first", num_prompt: int = 20, max_tokens: int = 5) -> RequestFlow:
    route = Route("e", "e") if order == "aggregated" else Route("p", "d", order)  # type: ignore[arg-type]
    request = make_request(num_prompt, max_tokens)
    return RequestFlow(request, route, request_id="q", transfer_id="t", loan_id="loan", now=NOW)


def handoff(attempt: int = 0) -> HandedOff:
    return HandedOff("q", attempt, SourceCounts(computed=20), KVHandoff("q", attempt, "t", "p", "e0", 20, b"where"))


def test_prefill_first_hands_the_token_and_the_handoff_to_decode_with_the_time_that_is_left() -> None:
    flow = make_flow()
    ((engine, first),) = flow.start(NOW + 1)
    assert (engine, first.until, first.kv, first.timeout_s) == ("p", "first_token", "handoff", 59.0)  # type: ignore[union-attr]
    assert list(flow.handle("p", Tokens("q", 0, 0, [3]), NOW)) == []
    assert flow.take_delta() == Delta([3], None, None, None, None)
    ((engine, second),) = flow.handle("p", handoff(), NOW + 10)
    assert isinstance(second, Submit)
    assert (engine, second.until, second.kv, second.timeout_s) == ("d", "end", "await_peer", 50.0)
    assert second.output_token_ids == [3]
    assert second.handoff == handoff().handoff
    assert second.params is flow.request.params
    assert flow.handle("d", Release("t", 0), NOW) == [("p", Release("t", 0))]
    assert list(flow.handle("d", Release("t", 0), NOW)) == []
    flow.handle("d", Tokens("q", 0, 1, [4, 5]), NOW)
    assert list(flow.handle("d", Finished("q", 0, "stop", SourceCounts(remote=20), 5), NOW)) == []
    assert flow.take_delta() == Delta([4, 5], None, None, "stop", 5)
    assert flow.take_delta() is None
    assert flow.sources == SourceCounts(computed=20)


def test_first_token_that_ends_the_request_means_no_handoff_and_no_release() -> None:
    flow = make_flow()
    flow.start(NOW)
    flow.handle("p", Tokens("q", 0, 0, [7]), NOW)
    assert list(flow.handle("p", Finished("q", 0, "stop", SourceCounts(computed=20), 7), NOW)) == []
    assert flow.take_delta() == Delta([7], None, None, "stop", 7)
    assert flow.decode == "idle"


def test_abort_reaches_both_engines_and_releases() -> None:
    flow = make_flow("concurrent")
    assert [name for name, _ in flow.start(NOW)] == ["d", "p"]
    assert set(flow.abort()) == {("p", Abort("q", 0)), ("d", Abort("q", 0)), ("p", Release("t", 0))}
    assert list(flow.abort()) == []
    assert isinstance(flow.failure, RequestAborted)


def test_abort_between_handoff_and_load_releases_at_once() -> None:
    flow = make_flow()
    flow.start(NOW)
    flow.handle("p", Tokens("q", 0, 0, [3]), NOW)
    flow.handle("p", handoff(), NOW)
    assert set(flow.abort()) == {("d", Abort("q", 0)), ("p", Release("t", 0))}


def test_concurrent_forwards_ticket_token_and_readiness() -> None:
    flow = make_flow("concurrent")
    flow.start(NOW)
    assert flow.handle("d", Allocated("q", 0, 0, 20, b"where"), NOW) == [("p", KVTicket("q", 0, b"where"))]
    assert flow.handle("p", Tokens("q", 0, 0, [3]), NOW) == [("d", Continue("q", 0, [3]))]
    assert flow.handle("p", KVReady("q", 0, ok=True), NOW) == [("d", KVReady("q", 0, ok=True))]


def test_a_release_that_was_before_the_lease_is_said_again() -> None:
    """Decode gave the load up while the prompt was still in the making: or its KV is kept until the lease expires."""
    flow = make_flow("concurrent")
    flow.start(NOW)
    flow.handle("d", Allocated("q", 0, 0, 20, b"where"), NOW)
    assert flow.handle("d", Release("t", 0), NOW) == [("p", Release("t", 0))]
    assert flow.handle("p", Tokens("q", 0, 0, [3]), NOW) == [("d", Continue("q", 0, [3]))]
    assert flow.handle("p", handoff(), NOW) == [("p", Release("t", 0))]


def test_no_continue_behind_the_last_token() -> None:
    flow = make_flow("concurrent", max_tokens=1)
    flow.start(NOW)
    assert list(flow.handle("p", Tokens("q", 0, 0, [3]), NOW)) == []


def test_needs_peer_first_waits_for_the_ticket() -> None:
    flow = make_flow("needs_peer_first")
    assert [name for name, _ in flow.start(NOW)] == ["d"]
    ((engine, submit),) = flow.handle("d", Allocated("q", 0, 0, 20, b"where"), NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.kv, submit.ticket) == ("p", "handoff", b"where")


@pytest.mark.parametrize(("start", "asks_prefill"), [(0, False), (16, False), (20, True)])
def test_empty_range_declines_unless_only_the_first_token_is_missing(start: int, asks_prefill: bool) -> None:
    flow = make_flow("decode_first")
    flow.start(NOW)
    assert [name for name, _ in flow.handle("d", Allocated("q", 0, start, start), NOW)] == ["p"] * asks_prefill
    assert flow.declined is not asks_prefill


@pytest.mark.parametrize("declines_late", [True, False])
def test_sources_are_those_of_the_engine_that_ran_the_prompt(declines_late: bool) -> None:
    """Decode may find the whole prompt in its cache when prefill has computed it already: that was no cache hit."""
    flow = make_flow("concurrent")
    flow.start(NOW)
    computed, found = SourceCounts(computed=20), SourceCounts(local_hit=20)
    if declines_late:
        flow.handle("p", Tokens("q", 0, 0, [3], sources=computed), NOW)
        flow.handle("p", handoff(), NOW)
        flow.handle("d", Allocated("q", 0, 16, 16, b"where"), NOW)
    else:
        flow.handle("d", Allocated("q", 0, 16, 16, b"where"), NOW)
        flow.handle("d", Tokens("q", 0, 0, [3], sources=found), NOW)
    assert flow.declined
    flow.handle("d", Finished("q", 0, "length", found), NOW)
    assert (flow.prompt_engine, flow.sources) == (("p", computed) if declines_late else ("d", found))


def test_tokens_of_both_sides_are_delivered_once_with_their_logprobs() -> None:
    flow = make_flow("concurrent")
    flow.start(NOW)
    logprobs = [TokenLogprob(i, -1.0, 1) for i in (3, 4)]
    flow.handle("d", Tokens("q", 0, 0, [3], logprobs[:1]), NOW)
    assert list(flow.handle("p", Tokens("q", 0, 0, [3], logprobs[:1]), NOW)) == []  # decode has it already
    flow.handle("d", Tokens("q", 0, 0, [3, 4], logprobs), NOW)
    assert flow.take_delta() == Delta([3, 4], logprobs, None, None, None)
    assert flow.num_duplicates == 2


def test_token_out_of_order_fails_the_request() -> None:
    flow = make_flow("aggregated")
    flow.start(NOW)
    flow.handle("e", Tokens("q", 0, 1, [3]), NOW)
    assert flow.retryable  # whose fault it is, another engine shows
    assert flow.give_up() == [("e", Abort("q", 0))]
    assert isinstance(flow.failure, RequestFailed)
    assert flow.failed_engine == "e"


def test_restart_raises_the_attempt_and_continues_behind_the_output() -> None:
    flow = make_flow("aggregated")
    flow.start(NOW)
    flow.handle("e", Tokens("q", 0, 0, [3]), NOW)
    flow.engine_died("e")
    assert isinstance(flow.failure, EngineDied)
    assert flow.retryable
    assert not flow.can_resume
    ((engine, submit),) = [*flow.reset(), *flow.begin(Route("f", "f"), NOW)]
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.output_token_ids) == ("f", 1, [3])
    flow.handle("f", Tokens("q", 1, 1, [4]), NOW)
    assert flow.output_token_ids == [3, 4]


def test_prefill_that_dies_after_its_handoff_leaves_the_request_alive() -> None:
    flow = make_flow()
    flow.start(NOW)
    flow.handle("p", Tokens("q", 0, 0, [3]), NOW)
    flow.handle("p", handoff(), NOW)
    assert list(flow.engine_died("p")) == []
    assert not flow.ended
    flow.handle("d", Finished("q", 0, "length", SourceCounts(recomputed=20)), NOW)
    assert flow.finish_reason == "length"


def test_pushing_prefill_that_dies_is_reported_to_decode_as_never() -> None:
    flow = make_flow("concurrent")
    flow.start(NOW)
    flow.handle("d", Allocated("q", 0, 0, 20, b"where"), NOW)
    flow.handle("p", Tokens("q", 0, 0, [3]), NOW)
    flow.handle("p", handoff(), NOW)
    assert flow.engine_died("p") == [("d", KVReady("q", 0, ok=False, code="peer_gone"))]


def test_ticket_for_a_pushing_prefill_that_is_dead_is_answered_with_never() -> None:
    flow = make_flow("concurrent")
    flow.start(NOW)
    flow.handle("p", Tokens("q", 0, 0, [3]), NOW)
    flow.handle("p", handoff(), NOW)
    assert list(flow.engine_died("p")) == []
    assert flow.handle("d", Allocated("q", 0, 0, 20, b"where"), NOW) == [
        ("d", KVReady("q", 0, ok=False, code="peer_gone"))
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("timeout", RequestTimeout),
        ("engine_died", EngineDied),
        ("kv_not_found", RequestFailed),
        ("invalid_request_error", InvalidRequest),
        ("x" * 99, RequestFailed),
    ],
)
def test_codes_of_failures_become_types(code: str, kind: type[Exception]) -> None:
    flow = make_flow("aggregated")
    flow.start(NOW)
    assert list(flow.handle("e", Failed("q", 0, code, "why", retryable=True), NOW)) == []
    assert type(flow.failure) is kind
    assert flow.failure.code == (code if len(code) < 99 else "request_failed"), "metrics have few codes"
    assert str(flow.failure) == "why"


def test_expiry_names_the_engine_that_had_the_word() -> None:
    flow = make_flow()
    flow.start(NOW)
    assert flow.expire(flow.deadline) == [("p", Abort("q", 0)), ("p", Release("t", 0))]
    assert isinstance(flow.failure, RequestTimeout)
    assert flow.failed_engine == "p"


# --- going on elsewhere -----------------------------------------------------------------------------------------------


def handed_off(order: str = "prefill_first", decode: str = "d") -> RequestFlow:
    """A flow whose prompt is done: its first token is 3."""
    flow = make_flow(order)
    flow.route = flow.route._replace(decode=decode)
    flow.start(NOW)
    flow.handle("p", Tokens("q", 0, 0, [3], sources=SourceCounts(computed=20)), NOW)
    flow.handle("p", handoff(), NOW)
    return flow


def test_decode_is_bound_when_the_prompt_is_handed_off() -> None:
    flow = make_flow()
    flow.route = flow.route._replace(decode="")
    flow.start(NOW)
    assert flow.engines_in_use == ("p",)
    assert list(flow.handle("p", Tokens("q", 0, 0, [3]), NOW)) == []
    assert not flow.awaits_decode
    assert list(flow.handle("p", handoff(), NOW)) == []
    assert flow.awaits_decode
    ((engine, submit),) = flow.bind_decode("d", NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.output_token_ids, submit.handoff) == ("d", 0, [3], handoff().handoff)
    assert flow.engines_in_use == ("d",)


def test_another_decode_engine_reads_the_hand_off_of_one_that_died_and_the_lease_ends_once() -> None:
    """F30."""
    flow = handed_off()
    assert list(flow.engine_died("d")) == []
    assert flow.can_resume
    assert list(flow.resume()) == []
    assert flow.awaits_decode
    ((engine, submit),) = flow.bind_decode("d2", NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.kv, submit.handoff) == ("d2", 1, "await_peer", handoff().handoff)
    assert not flow.accepts("d", Tokens("q", 0, 1, [9]))  # what the first one may still say
    assert not flow.accepts("d2", Tokens("q", 0, 1, [9]))
    release = Release("t", 0)  # by the hand-off's attempt, whoever reads it
    assert flow.accepts("d2", release)
    assert flow.handle("d2", release, NOW) == [("p", release)]
    assert list(flow.abort()) == [("d2", Abort("q", 1))]


def test_what_a_store_has_saved_is_known_to_the_next_reader() -> None:
    flow = handed_off()
    assert flow.handle("p", KVReady("q", 0, ok=True), NOW) == [("d", KVReady("q", 0, ok=True))]
    flow.engine_died("d")
    flow.resume()
    sends = flow.bind_decode("d2", NOW)
    assert sends[1] == ("d2", KVReady("q", 1, ok=True))
    late = handed_off()
    late.engine_died("d")
    late.resume()
    late.bind_decode("d2", NOW)
    assert late.accepts("p", KVReady("q", 0, ok=True))
    assert late.handle("p", KVReady("q", 0, ok=True), NOW) == [("d2", KVReady("q", 1, ok=True))]


def test_a_save_that_failed_and_a_lease_that_ended_are_not_read_again() -> None:
    flow = handed_off()
    flow.handle("p", KVReady("q", 0, ok=False), NOW)
    flow.engine_died("d")
    assert not flow.can_resume
    released = handed_off()
    released.handle("d", Release("t", 0), NOW)
    released.engine_died("d")
    assert not released.can_resume
    assert list(released.give_up()) == []


def test_a_push_is_sent_again_on_the_ticket_of_the_next_reader() -> None:
    flow = handed_off("concurrent")
    flow.handle("d", Allocated("q", 0, 0, 20, b"first"), NOW)
    flow.engine_died("d")
    flow.resume()
    assert list(flow.handle("p", KVReady("q", 0, ok=False, code="peer_gone"), NOW)) == []  # about the first ticket
    ((_, submit),) = flow.bind_decode("d2", NOW)
    assert isinstance(submit, Submit)
    assert submit.output_token_ids == [3]
    assert flow.handle("d2", Allocated("q", 1, 0, 20, b"second"), NOW) == [("p", KVTicket("q", 0, b"second", 1))]
    assert list(flow.handle("p", KVReady("q", 0, ok=False, code="peer_gone", ticket=0), NOW)) == []  # it crossed ours
    assert flow.handle("p", KVReady("q", 0, True, ticket=1), NOW) == [("d2", KVReady("q", 1, True, ticket=1))]
    assert flow.handle("p", KVReady("q", 0, True), NOW) == [("d2", KVReady("q", 1, True))]  # of an older engine


@pytest.mark.parametrize("order", ["concurrent", "needs_peer_first", "decode_first"])
def test_a_prompt_that_is_being_computed_goes_on_when_decode_dies(order: str) -> None:
    flow = make_flow(order)
    flow.start(NOW)
    flow.handle("d", Allocated("q", 0, 0, 20, b"first"), NOW)
    assert flow.prefill == "running"
    flow.engine_died("d")
    assert flow.can_resume
    assert list(flow.resume()) == []
    assert flow.engines_in_use == ("p",)
    assert list(flow.handle("p", Tokens("q", 0, 0, [3]), NOW)) == []
    assert list(flow.handle("p", handoff(), NOW)) == []
    ((engine, submit),) = flow.bind_decode("d2", NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.conditional, submit.handoff) == ("d2", 1, False, handoff().handoff)


def test_an_engine_that_lives_and_is_left_gets_an_abort() -> None:
    flow = handed_off()
    assert list(flow.fail(RequestFailed("slow", request_id="q"), retryable=True, engine="d")) == []
    assert flow.resume() == [("d", Abort("q", 0))]
    flow.bind_decode("d2", NOW)
    assert list(flow.fail(RequestFailed("slow", request_id="q"), retryable=True, engine="p")) == []
    assert not flow.can_resume  # it is prefill that is left
    assert set(flow.reset()) == {("p", Release("t", 0)), ("d2", Abort("q", 1))}
    assert flow.awaits_route
    ((engine, submit),) = flow.begin(Route("p2", ""), NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.kv, submit.output_token_ids) == ("p2", 2, "handoff", [3])


def test_what_is_known_of_the_prompt_is_asked_for_once_and_stays() -> None:
    """prompt_logprobs are neither computed nor sent twice, and sources are those of the prompt's first run."""
    params = SamplingParams(max_tokens=5, seed=1, logprobs=1, prompt_logprobs=1)
    request = GenerateRequest(prompt_token_ids=list(range(3)), params=params, timeout_s=60.0)
    flow = RequestFlow(request, Route("e", "e"), request_id="q", transfer_id="t", loan_id="loan", now=NOW)
    ((_, first),) = flow.start(NOW)
    assert first.params.prompt_logprobs == 1  # type: ignore[union-attr]
    logprob = TokenLogprob(3, -1.0, 1)
    about_prompt = PromptLogprobs.of([None, logprob, logprob])
    flow.handle("e", Tokens("q", 0, 0, [3], [logprob], about_prompt, SourceCounts(computed=3)), NOW)
    flow.engine_died("e")
    ((_, second),) = [*flow.reset(), *flow.begin(Route("f", "f"), NOW)]
    assert (second.params.prompt_logprobs, second.params.logprobs) == (None, 1)  # type: ignore[union-attr]
    flow.handle("f", Tokens("q", 1, 1, [4], [logprob], None, None), NOW)
    flow.handle("f", Finished("q", 1, "stop", SourceCounts(local_hit=3), 4), NOW)
    assert flow.take_delta() == Delta([3, 4], [logprob] * 2, about_prompt, "stop", 4)
    assert (flow.prompt_engine, flow.sources) == ("e", SourceCounts(computed=3))


def test_a_retry_before_the_first_token_has_its_own_sources() -> None:
    flow = make_flow("aggregated")
    flow.start(NOW)
    flow.engine_died("e")
    [*flow.reset(), *flow.begin(Route("f", "f"), NOW)]
    flow.handle("f", Tokens("q", 1, 0, [3], sources=SourceCounts(local_hit=20)), NOW)
    assert (flow.prompt_engine, flow.sources) == ("f", SourceCounts(local_hit=20))


# --- loans ----------------------------------------------------------------------------------------------------------

LENT = KVHandoff("loan", 0, "t", "d", "e0", 16, b"blocks", lent=True)


def borrowing_flow(order: str = "prefill_first") -> tuple[RequestFlow, Sends]:
    """A flow whose prefill engine p may read 16 tokens from d, and what it has said to d since."""
    flow = RequestFlow(
        make_request(40, 5),
        Route("p", "" if order == "prefill_first" else "d", order, Offer("d", 16, 2.5)),  # type: ignore[arg-type]
        request_id="q",
        transfer_id="t",
        loan_id="loan",
        now=NOW,
    )
    return flow, flow.start(NOW)


def granted(flow: RequestFlow) -> Submit:
    """The lender has it; what prefill is asked."""
    ((engine, submit),) = flow.handle_loan(HandedOff("loan", 0, SourceCounts(local_hit=16), LENT), NOW)
    assert engine == "p"
    assert isinstance(submit, Submit)
    return submit


def test_prefill_is_asked_when_the_lender_has_answered() -> None:
    flow, ((engine, question),) = borrowing_flow()
    assert isinstance(question, Submit)
    assert (engine, question.request_id, question.transfer_id) == ("d", "loan", "t")
    assert (question.until, question.kv, len(question.prompt_token_ids)) == ("cached", "handoff", 17)
    submit = granted(flow)
    assert (submit.handoff, submit.load_timeout_s, submit.until) == (LENT, 2.5, "first_token")
    assert flow.handle("p", Loaded("q", 0, ok=True), NOW) == [("d", Release("t", 0, lent=True))]
    assert list(flow.handle("p", Tokens("q", 0, 0, [1]), NOW)) == []  # it was returned


@pytest.mark.parametrize("order", ["prefill_first", "concurrent"])
@pytest.mark.parametrize("answer", [Failed("loan", 0, "kv_not_found", "gone", retryable=False), None])
def test_a_lender_that_has_nothing_or_is_late_is_done_without(order: str, answer: Failed | None) -> None:
    flow, _ = borrowing_flow(order)
    sends = flow.go_without_loan("transfer_timeout", NOW) if answer is None else flow.handle_loan(answer, NOW)
    assert [engine for engine, _ in sends] == ["d", "p"]  # a lease that is granted meanwhile ends, too
    assert sends[0][1] == Release("t", 0, lent=True)
    submit = sends[1][1]
    assert isinstance(submit, Submit)
    assert submit.handoff is None
    late = HandedOff("loan", 0, SourceCounts(), LENT)
    assert list(flow.handle_loan(late, NOW)) == []


@pytest.mark.parametrize(("known_s", "timeout_s"), [(0.0, 10.0), (2.5, 2.5), (25.0, 10.0)])
def test_a_load_of_what_is_lent_takes_no_longer_than_its_lease(known_s: float, timeout_s: float) -> None:
    route = Route("p", "", "prefill_first", Offer("d", 16, known_s))
    flow = RequestFlow(make_request(40, 5), route, request_id="q", transfer_id="t", loan_id="loan", now=NOW)
    ((_, question),) = flow.start(NOW)
    assert isinstance(question, Submit)
    assert question.timeout_s == 10.0
    assert granted(flow).load_timeout_s == timeout_s


@pytest.mark.parametrize(
    "changes",
    [{"transfer_id": "t2"}, {"attempt": 1}, {"engine": "d2"}, {"lent": False}],
    ids=["transfer", "attempt", "engine", "lent"],
)
def test_what_is_granted_must_be_what_was_asked_for(changes: dict[str, Any]) -> None:
    flow, _ = borrowing_flow()
    lent = msgspec.structs.replace(LENT, **changes)
    release, (_, submit) = flow.handle_loan(HandedOff("loan", 0, SourceCounts(local_hit=16), lent), NOW)
    assert release == ("d", Release("t", 0, lent=True))
    assert isinstance(submit, Submit)
    assert submit.handoff is None


def test_a_lender_that_pushes_gets_the_borrowers_ticket_and_its_end_is_told() -> None:
    flow, sends = borrowing_flow("concurrent")
    assert [engine for engine, _ in sends] == ["d", "d"]
    assert list(flow.handle("d", Allocated("q", 0, 0, 40, b"of decode"), NOW)) == []  # prefill is not asked yet
    assert granted(flow).ticket == b"of decode"
    assert flow.handle("p", Allocated("q", 0, 0, 16, b"of prefill"), NOW) == [("d", KVTicket("loan", 0, b"of prefill"))]
    assert flow.go_without_loan("peer_gone", NOW) == [
        ("d", Release("t", 0, lent=True)),
        ("p", KVReady("q", 0, ok=False, code="peer_gone")),
    ]
    assert list(flow.go_without_loan("peer_gone", NOW)) == []


def test_prefill_is_asked_for_the_first_attempt_though_decode_died_while_the_lender_was_asked() -> None:
    flow, _ = borrowing_flow("needs_peer_first")
    flow.handle("d", Allocated("q", 0, 0, 40, b"first"), NOW)
    flow.engine_died("d")
    flow.resume()
    ((_, submit),) = flow.go_without_loan("peer_gone", NOW)[1:]
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.ticket) == (0, None)  # prefill's part is the first attempt's


def test_the_end_of_a_request_returns_what_was_lent() -> None:
    flow, _ = borrowing_flow()
    assert flow.abort()[0] == ("d", Release("t", 0, lent=True))
    flow, _ = borrowing_flow()
    granted(flow)
    flow.engine_died("p")
    sends = [*flow.reset(), *flow.begin(Route("p2", ""), NOW)]
    assert sends[0] == ("d", Release("t", 0, lent=True))
    submit = sends[-1][1]
    assert isinstance(submit, Submit)
    assert submit.handoff is None


# --- hand-offs in parts ---------------------------------------------------------------------------------------------


def part(num_tokens: int, **fields: Any) -> KVHandoff:
    return msgspec.structs.replace(handoff().handoff, num_tokens=num_tokens, more=True, **fields)


def half_read() -> RequestFlow:
    """Decode reads what prefill has of a prompt."""
    flow = make_flow()
    flow.route = flow.route._replace(decode="")
    flow.start(NOW)
    assert not flow.may_bind_decode
    assert list(flow.handle("p", part(8), NOW)) == []
    assert flow.may_bind_decode
    ((engine, submit),) = flow.bind_decode("d", NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.output_token_ids, submit.handoff) == ("d", 0, [], part(8))
    assert not flow.may_bind_decode
    return flow


def test_decode_may_be_bound_with_the_first_part_of_a_prompt_and_gets_the_rest_as_it_comes() -> None:
    flow = half_read()
    assert set(flow.engines_in_use) == {"p", "d"}
    assert flow.handle("p", part(16), NOW) == [("d", part(16))]
    assert flow.handle("p", Tokens("q", 0, 0, [3]), NOW) == [("d", Continue("q", 0, [3]))]
    assert list(flow.handle("p", part(16), NOW)) == []  # too late
    assert flow.handle("p", handoff(), NOW) == [("d", handoff().handoff)]
    assert flow.engines_in_use == ("d",)
    assert flow.handle("d", Release("t", 0), NOW) == [("p", Release("t", 0))]


def test_another_decode_engine_reads_what_there_is_when_one_dies_before_the_prompt_is_done() -> None:
    flow = half_read()
    flow.handle("p", part(16), NOW)
    flow.engine_died("d")
    assert flow.can_resume
    assert list(flow.resume()) == []
    ((engine, submit),) = flow.bind_decode("d2", NOW)
    assert isinstance(submit, Submit)
    assert (engine, submit.attempt, submit.handoff) == ("d2", 1, part(16))
    assert flow.handle("p", Tokens("q", 0, 0, [3]), NOW) == [("d2", Continue("q", 1, [3]))]
    assert flow.handle("p", handoff(), NOW) == [("d2", handoff().handoff)]


def test_an_engine_that_comes_later_gets_the_parts_so_far_as_one() -> None:
    flow = half_read()
    first, second = part(8), part(16, start=8, payload=b"second")
    assert flow.handle("p", second, NOW) == [("d", second)]
    flow.engine_died("d")
    flow.resume()
    ((_, submit),) = flow.bind_decode("d2", NOW)
    assert isinstance(submit, Submit)
    assert submit.handoff == part(16, payload=first.payload + b"second")


@pytest.mark.parametrize(
    "later", [{"start": 9}, {"start": 8, "epoch": "x"}, {"start": 8, "payload": b"x" * MAX_BLOB_BYTES}, {"start": 0}]
)
def test_parts_are_joined_only_where_one_follows_the_other(later: dict[str, Any]) -> None:
    assert part(8).joined(part(16, **later)) == part(16, **later)


def test_with_prefill_goes_what_decode_has_read_of_its_prompt() -> None:
    flow = half_read()
    flow.engine_died("p")
    assert not flow.can_resume
    assert list(flow.reset()) == [("d", Abort("q", 0))]
    assert not flow.may_bind_decode
    ended = half_read()
    assert list(ended.abort()) == [("p", Abort("q", 0)), ("p", Release("t", 0)), ("d", Abort("q", 0))]


def test_decode_that_computes_the_prompt_itself_is_told_of_no_more_parts() -> None:
    flow = half_read()
    flow.handle("d", Release("t", 0), NOW)
    assert list(flow.handle("p", part(16), NOW)) == []
    assert flow.handle("p", Tokens("q", 0, 0, [3]), NOW) == [("d", Continue("q", 0, [3]))]
    assert flow.handle("p", handoff(), NOW) == [("p", Release("t", 0))]


@pytest.mark.parametrize("lie", [{"transfer_id": "x"}, {"more": False}, {"lent": True}])
def test_a_part_of_something_else_binds_no_engine(lie: dict[str, Any]) -> None:
    flow = make_flow()
    flow.route = flow.route._replace(decode="")
    flow.start(NOW)
    assert list(flow.handle("p", msgspec.structs.replace(part(8), **lie), NOW)) == []
    assert not flow.may_bind_decode
