"""Generations that their reader ends because it has all that it wants: a stop string, or a finished tool call."""

import pytest
from dispatch_rig import System, collect, live, until
from scripted_engine import make_request

from pdkv.errors import RequestAborted
from pdkv.router.generations.generation import Generation
from pdkv.wire.messages import Abort, Failed, Tokens


async def start(system: System, num_tokens: int = 3) -> Generation:
    """One of which so many tokens are out, and many more would follow."""
    generation = system.dispatcher.start(make_request(30, 60, label="mine"))
    await until(lambda: len(generation.flow.output_token_ids) >= num_tokens)
    return generation


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_it_is_finished_in_all_books(num_prefill: int) -> None:
    """F43: it was an abort: scores saw no success, histograms nothing, and operators a failure."""
    async with live(System(num_prefill, 1)) as system:
        dispatcher = system.dispatcher
        generation = await start(system)
        decode = system.backends[generation.decode_engine]
        generation.finish()
        generation.finish()
        generation.abort()  # as the endpoint does at every end
        await until(lambda: not decode.engine.tasks)
        assert [type(m) for m in decode.engine.received if isinstance(m, Abort)] == [Abort]
        assert (dispatcher.counters.finished, dispatcher.counters.aborted) == (1, 0)
        assert dispatcher.counters.failed == {}
        assert dispatcher.delays.decode.count == dispatcher.delays.prefill.count == 1
        assert dispatcher.delays.queue.count == num_prefill  # an aggregated engine has not said how long it waited
        (shown,) = dispatcher.driver.find_requests("mine")
        assert (shown["state"], shown["finish_reason"], shown["error"]) == ("finished", "stop", None)
        for name in {generation.prefill_engine, generation.decode_engine}:
            assert dispatcher.fleet.engines[name].health.last_good > 0


async def test_what_its_engines_still_say_is_no_dropped_message() -> None:
    async with live(System(0, 1)) as system:
        generation = await start(system)
        decode = system.backends["any-0"]
        generation.finish()
        decode.say(Tokens(generation.request_id, 0, 3, [1]), Failed(generation.request_id, 0, "x", "y", True))
        assert system.dispatcher.counters.dropped_messages == 0


async def test_an_engine_that_has_done_nothing_is_not_praised() -> None:
    """A stop string in the first token ends it before decode has answered."""
    async with live(System(1, 1)) as system:
        system.backends["decode-0"].held = True
        generation = await start(system, 1)
        await until(lambda: generation.decode_engine == "decode-0")
        generation.finish()
        system.backends["decode-0"].release()
        good = {name: engine.health.last_good > 0 for name, engine in system.dispatcher.fleet.engines.items()}
        assert good == {"prefill-0": True, "decode-0": False}


async def test_one_that_waits_for_an_engine_may_be_finished_and_an_aborted_one_may_not() -> None:
    """Its text may end in tokens that came before its engine died."""
    async with live(System(0, 1)) as system:
        generation = await start(system)
        system.backends["any-0"].die()
        assert len(system.dispatcher.recovery.parked) == 1
        generation.finish()
        assert (len(system.dispatcher.recovery.parked), system.dispatcher.counters.finished) == (0, 1)
        system.backends["any-0"].start(system.card("any-0", epoch="e1"))
        other = await start(system)
        other.abort()
        other.finish()
        with pytest.raises(RequestAborted):
            await collect(other)
        assert (system.dispatcher.counters.finished, system.dispatcher.counters.aborted) == (1, 1)
