"""A dispatcher's loans: lenders that answer, refuse, keep silent or die, and what becomes of the books."""

import asyncio
from typing import Any

import pytest
from coroutines import clock
from dispatch_rig import System, check_right, collect, live, until
from scripted_engine import expected_output, make_request

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.errors import RequestFailed
from pdkv.router.generations.flow import RequestFlow, Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.request import GenerateRequest
from pdkv.testing import VirtualLoop
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.messages import BlockStored, CacheCleared, HandedOff, KVEvents, KVReady, Loaded, Release, Submit
from pdkv.wire.reports import SourceCounts

event_loop = VirtualLoop

REQUEST_TOKENS = 100
NUM_LENT = 96


class Lending(System):
    """One prefill engine, and decode engines of which the first has the prompt."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, 2, **options)
        self.lender, self.borrower = self.backends["decode-0"], self.backends["prefill-0"]

    def card(self, name: str, **changes: Any) -> EngineCard:
        return super().card(name, lends=True, **changes)

    def store(self, request: GenerateRequest) -> None:
        """The lender says that it has the prompt."""
        card, keys = self.card("decode-0"), []  # type: ignore[var-annotated]
        extend_keys(keys, root_key(model=card.model, layout=card.layout.identity), request.prompt_token_ids)
        self.lender.say(KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))

    async def lend(self) -> tuple[Generation, Submit]:
        """A request for which prefill, which does nothing yet, was given a loan."""
        request = make_request(REQUEST_TOKENS)
        self.store(request)
        self.borrower.held = True
        generation = self.dispatcher.start(request)
        while not self.asked():
            await asyncio.sleep(0)
        (submit,) = self.asked()
        return generation, submit

    def asked(self) -> list[Submit]:
        """What prefill was asked."""
        return [m for m in self.borrower.heard(Submit) if m.until != "cached"]

    def answer(self, num: int) -> None:
        """How the scripted lender answers: 0 it lends, 2 not at all, 3 it has nothing any more."""
        self.lender.engine.draw = lambda n: num if n == 4 else 0


async def test_what_a_lender_has_is_named_to_prefill_and_returned() -> None:
    async with live(Lending()) as system:
        request = make_request(REQUEST_TOKENS)
        system.store(request)
        await check_right(system, request)
        (submit,) = system.asked()
        assert submit.handoff is not None
        assert (submit.handoff.engine, submit.handoff.num_tokens) == ("decode-0", NUM_LENT)
        assert [m for m in system.lender.heard(Release) if m.lent]
        assert system.dispatcher.counters.loans == {"ok": 1}
        assert system.dispatcher.counters.dropped_messages == 0


@pytest.mark.parametrize("answer", [2, 3])
@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_a_lender_that_refuses_or_keeps_silent_costs_nothing_but_time(kind: str, answer: int) -> None:
    async with live(Lending(kind=kind)) as system:
        request = make_request(REQUEST_TOKENS)
        system.store(request)
        system.answer(answer)
        await (clock().passing(check_right(system, request)) if answer == 2 else check_right(system, request))
        (submit,) = system.asked()
        assert submit.handoff is None
        code = {2: "transfer_timeout", 3: "kv_not_found"}[answer]
        assert system.dispatcher.counters.loans == {code: 1}
        assert (system.dispatcher.fleet.speeds._lost_s > 0) == (answer == 2)


async def test_prefill_is_asked_at_once_when_the_lender_dies() -> None:
    async with live(Lending()) as system:
        request = make_request(REQUEST_TOKENS)
        system.store(request)
        system.lender.held = True
        generation = system.dispatcher.start(request)
        assert system.asked() == []
        system.lender.die()
        (submit,) = system.asked()
        assert submit.handoff is None
        tokens, _ = await collect(generation)
        assert tokens == expected_output(request)
        assert generation.num_attempts == 1  # it did not depend on it
        assert system.dispatcher.counters.loans == {"peer_gone": 1}


async def test_an_error_about_a_lender_that_is_late_costs_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    go_without_loan, broken = RequestFlow.go_without_loan, []

    def fail_once(self: RequestFlow, code: str, now: float) -> Sends:
        if not broken:
            broken.append(self)
            raise ZeroDivisionError
        return go_without_loan(self, code, now)

    monkeypatch.setattr(RequestFlow, "go_without_loan", fail_once)
    async with live(Lending()) as system:
        request = make_request(REQUEST_TOKENS)
        system.store(request)
        system.answer(2)
        generation = system.dispatcher.start(request)
        with pytest.raises(RequestFailed, match="ZeroDivisionError"):
            await clock().passing(collect(generation))
        await clock().passing(check_right(system, request))


async def test_what_a_lender_names_must_be_what_it_was_asked_for() -> None:
    async with live(Lending()) as system:
        request = make_request(REQUEST_TOKENS)
        system.store(request)
        system.lender.held = True
        generation = system.dispatcher.start(request)
        (asked,) = [m for m in system.lender.heard(Submit) if m.until == "cached"]
        names = asked.request_id, asked.attempt
        foreign = KVHandoff(*names, "another", "decode-0", "e0", NUM_LENT, b"", lent=True)
        system.lender.say(HandedOff(*names, SourceCounts(local_hit=NUM_LENT), foreign))
        (submit,) = system.asked()
        assert submit.handoff is None
        assert [m for m in system.lender.heard(Release) if m.lent]
        assert system.dispatcher.counters.loans == {"malformed_message": 1}
        generation.abort()
        system.lender.engine.tasks.clear()


async def test_the_borrower_hears_that_its_lender_died() -> None:
    async with live(Lending()) as system:
        generation, _ = await system.lend()
        system.lender.die()
        assert [m.code for m in system.borrower.heard(KVReady)] == ["peer_gone"]
        system.borrower.release()
        tokens, _ = await collect(generation)
        assert tokens == expected_output(make_request(REQUEST_TOKENS))


@pytest.mark.parametrize(("code", "is_avoided"), [("kv_not_found", False), ("transfer_failed", True)])
async def test_a_loan_that_failed_counts_against_the_pair_unless_it_was_evicted(code: str, is_avoided: bool) -> None:
    async with live(Lending()) as system:
        generation, submit = await system.lend()
        for _ in range(3):  # told once by an engine; a pair opens by several
            system.borrower.say(Loaded(submit.request_id, 0, ok=False, code=code, seconds=0.1))
        assert system.dispatcher.fleet.speeds.costs("prefill-0", 100, 100).load_s > 0.02
        assert system.dispatcher.counters.loans[code] == 3
        fleet, now = system.dispatcher.fleet, system.dispatcher._clock()
        assert fleet.can_lend("decode-0", "prefill-0", fleet.pairs.avoided(now)) is not is_avoided
        generation.abort()
        system.borrower.release()
        await until(lambda: not system.borrower.engine.tasks)


async def test_what_prefills_loads_and_answers_took_is_measured() -> None:
    async with live(Lending()) as system:
        generation, submit = await system.lend()
        speeds, handoff = system.dispatcher.fleet.speeds, submit.handoff
        assert speeds.costs("prefill-0", 100, 100) == (None, None)
        system.borrower.say(Loaded(submit.request_id, 0, ok=True, num_bytes=1000, seconds=0.5))
        sources = SourceCounts(computed=4, store=96)
        system.borrower.say(HandedOff(submit.request_id, 0, sources, handoff, ran_s=0.2))
        costs = speeds.costs("prefill-0", 100, 2000)
        assert costs.load_s is not None
        assert 1.0 <= costs.load_s < 1.1
        assert costs.compute_s == pytest.approx(100 * 0.05)
        generation.abort()
        system.borrower.engine.tasks.clear()
