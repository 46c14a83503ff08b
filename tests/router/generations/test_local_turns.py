"""Prompts that a decode engine runs alone, as it has nearly all of them: to the end, away from it, with siblings."""

import msgspec
from dispatch_rig import System, check_right, collect, live, until
from scripted_engine import expected_output, make_request

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.config import LocalTurns, ReuseConfig
from pdkv.router.request import GenerateRequest
from pdkv.wire.messages import BlockStored, CacheCleared, KVEvents


def make_system(num_decode: int, local_turns: LocalTurns = "always") -> System:
    return System(1, num_decode, policy="prefix_aware", reuse=ReuseConfig(local_turns=local_turns))


def store(system: System, engine: str, request: GenerateRequest) -> None:
    """The engine says that it has all full blocks of the prompt."""
    card = system.card(engine)
    keys: list[bytes] = []
    extend_keys(keys, root_key(model=card.model, layout=card.layout.identity), request.prompt_token_ids)
    system.backends[engine].say(KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))


async def test_it_is_answered_there_and_counted_and_nobody_else_is_asked() -> None:
    async with live(make_system(1)) as system:
        request = make_request(100)
        store(system, "decode-0", request)
        generation = await check_right(system, request)
        assert (generation.prefill_engine, generation.decode_engine) == ("decode-0", "decode-0")
        assert system.dispatcher.routes.num_local_turns == 1
        await check_right(system, make_request(100, cache_salt="another"))
        assert system.dispatcher.routes.num_local_turns == 1


async def test_it_stays_on_an_engine_that_drains_if_no_other_one_decodes() -> None:
    """Moved, it would wait for an engine that nobody starts."""
    async with live(make_system(1)) as system:
        request = make_request(100, max_tokens=40)
        store(system, "decode-0", request)
        system.backends["decode-0"].held = True
        generation = system.dispatcher.start(request)
        system.dispatcher.fleet.engines["decode-0"].draining = True
        assert not system.dispatcher.driver.move(generation, "it drains", away_from="decode-0", spared=True)
        system.backends["decode-0"].release()
        assert (await collect(generation))[0] == expected_output(request)


async def test_it_moves_off_an_engine_that_drains_to_both_roles_engines() -> None:
    async with live(make_system(2)) as system:
        request = make_request(100, max_tokens=40)
        store(system, "decode-0", request)
        system.backends["decode-0"].held = True
        generation = system.dispatcher.start(request)
        system.dispatcher.fleet.engines["decode-0"].draining = True
        assert system.dispatcher.driver.move(generation, "it drains", away_from="decode-0", spared=True)
        await until(lambda: generation.decode_engine == "decode-1")
        assert generation.prefill_engine == "prefill-0", "behind its first tokens a request does not stay"
        assert (await collect(generation))[0] == expected_output(request)
        system.backends["decode-0"].release()


async def test_later_choices_of_its_prompt_are_run_where_the_first_one_was() -> None:
    """Their KV is there, whatever else the engine has to do."""
    async with live(make_system(2, "always")) as system:
        request = make_request(100)
        store(system, "decode-0", request)
        first = await check_right(system, request)
        for choice in (1, 2):
            sibling = msgspec.structs.replace(request, choice=choice, near=first.prefill_engine)
            generation = system.dispatcher.start(sibling)
            assert generation.flow.route.prefill == "decode-0"
            await collect(generation)
