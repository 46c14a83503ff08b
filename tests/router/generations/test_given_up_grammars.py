"""Grammars that engines gave up are refused for a while, before any engine is asked."""

import msgspec
import pytest
from dispatch_rig import System, collect, live
from scripted_engine import make_request

from pdkv.errors import GrammarGivenUp
from pdkv.router.generations.given_up_grammars import MAX_GIVEN_UP, REFUSED_S, GivenUpGrammars
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import Grammar
from pdkv.wire.messages import Failed, Submit


def shaped_request(pattern: str) -> GenerateRequest:
    params = SamplingParams(max_tokens=5, seed=1, grammar=Grammar("text", pattern))
    return msgspec.structs.replace(make_request(), params=params)


async def test_a_grammar_that_an_engine_gave_up_is_refused_for_a_minute_with_the_same_error() -> None:
    """F46: the same grammar, sent again, held an engine up again at once."""
    now = 100.0
    async with live(System(0, 2, clock=lambda: now)) as system:
        system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
        system.backends["any-0"].held = True
        generation = system.dispatcher.start(shaped_request("a+"))
        system.backends["any-0"].engine.tasks.clear()
        text = "the grammar took 2 s; a grammar may take 1"
        failed = Failed(generation.request_id, 0, GrammarGivenUp.code, text, False, "structured_outputs")
        system.backends["any-0"].say(failed)
        with pytest.raises(GrammarGivenUp, match=text) as first:
            await collect(generation)
        assert system.backends["any-1"].heard(Submit) == []  # it is the client's mistake: no other engine is to try it
        assert not any(e["ejected"] for e in system.dispatcher.topology()["engines"])
        system.backends["any-0"].release()
        now += REFUSED_S - 1.0
        num_submits = len(system.backends["any-0"].heard(Submit))
        with pytest.raises(GrammarGivenUp, match=text) as second:
            system.dispatcher.start(shaped_request("a+"))
        assert (second.value.status, second.value.param) == (first.value.status, first.value.param)
        assert (second.value.status, second.value.param) == (400, "structured_outputs")
        assert len(system.backends["any-0"].heard(Submit)) == num_submits
        await collect(system.dispatcher.start(shaped_request("b+")))
        now += 2.0
        await collect(system.dispatcher.start(shaped_request("a+")))


def test_only_so_many_are_remembered_and_those_of_late() -> None:
    given_up = GivenUpGrammars()
    for number in range(MAX_GIVEN_UP + 2):
        given_up.add(Grammar("text", str(number)), GrammarGivenUp("why"), 0.0)
        given_up.add(Grammar("text", "1"), GrammarGivenUp("why"), 0.0)  # again: it is one of late
    given_up.check(Grammar("text", "0"), 1.0)
    given_up.check(Grammar("text", "2"), 1.0)
    for number in (1, 3, MAX_GIVEN_UP + 1):
        with pytest.raises(GrammarGivenUp, match="why"):
            given_up.check(Grammar("text", str(number)), 1.0)
    assert len(given_up._given_up) == MAX_GIVEN_UP
