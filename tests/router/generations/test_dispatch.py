"""Dispatch over scripted engines: every order, death, retry, abort, deadline, stale messages and the books."""

import asyncio
import math

import msgspec
import pytest
from coroutines import clock
from dispatch_rig import InProcessBackend, System, check_right, collect, live, until
from scripted_engine import ORDERS_OF, ScriptedEngine, expected_output, make_request, token_at

from pdkv.base.block_keys import HASH_BLOCK_SIZE, extend_keys, root_key
from pdkv.errors import (
    ConfigError,
    EngineUnavailable,
    IncompatiblePeers,
    InvalidRequest,
    RequestAborted,
    RequestTimeout,
)
from pdkv.router.generations.dispatch import Delta, Dispatcher
from pdkv.router.generations.driver import TIMER_SLACK_S
from pdkv.router.generations.listener import CARDS_PER_TURN
from pdkv.router.routing.expected import EXPECTED_S
from pdkv.testing import VirtualLoop
from pdkv.wire.kv import KVHandoff, Order
from pdkv.wire.messages import (
    Abort,
    BlockStored,
    CacheCleared,
    Failed,
    Finished,
    KVEvents,
    KVTicket,
    Loaded,
    Peers,
    Release,
    Resync,
    Submit,
    Tokens,
)
from pdkv.wire.reports import BlockCounts, ConnectorStats, LoadReport, SourceCounts
from pdkv.wire.tiers import TierEvents

event_loop = VirtualLoop

LEGAL: list[tuple[str, Order]] = [(kind, order) for kind, orders in ORDERS_OF.items() for order in orders]
BLOCKS = BlockCounts(total=100, free=100, cached=0, active=0, leased=0, quarantined=0)


@pytest.mark.parametrize(("kind", "order"), LEGAL)
async def test_every_legal_order_gives_the_right_tokens(kind: str, order: Order) -> None:
    async with live(System(2, 4, kind=kind, orders=[order])) as system:
        requests = [make_request(20 + i, max_tokens=1 + i % 6) for i in range(24)]
        generations = await asyncio.gather(*[check_right(system, request) for request in requests])
        for generation, request in zip(generations, requests, strict=True):
            assert generation.sources == SourceCounts(computed=len(request.prompt_token_ids))
            assert generation.num_cached_tokens == 0
            assert generation.prefill_engine.startswith("prefill-")
            handed_off = bool(generation.flow.route.decode)  # else the first token was the last
            assert generation.decode_engine.startswith("decode-" if handed_off else "prefill-")
        assert {g.prefill_engine for g in generations} == {"prefill-0", "prefill-1"}
        assert len({g.decode_engine for g in generations} - {"prefill-0", "prefill-1"}) == 4
        assert system.dispatcher.counters.finished == 24


@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_engines_of_different_versions_serve_without_handing_over(kind: str) -> None:
    """And when one is restarted with the other's version, they do again."""
    async with live(System(1, 1, kind=kind)) as system:
        for version, name in enumerate(("prefill-0", "decode-0")):
            system.backends[name].die()
            system.backends[name].start(system.card(name, epoch="e1", wire_versions={"p2p": version}))
        for i in range(4):
            generation = await check_right(system, make_request(20 + i))
            assert generation.prefill_engine == generation.decode_engine == "prefill-0"
        system.backends["decode-0"].die()
        system.backends["decode-0"].start(system.card("decode-0", epoch="e2", wire_versions={"p2p": 0}))
        generation = await check_right(system, make_request(30))
        assert (generation.prefill_engine, generation.decode_engine) == ("prefill-0", "decode-0")


async def test_aggregated_engines_do_it_alone() -> None:
    async with live(System(0, 2)) as system:
        generation = await check_right(system, make_request())
        assert generation.prefill_engine == generation.decode_engine == "any-0"
        (submit,) = system.backends["any-0"].heard(Submit)
        assert (submit.kv, submit.until) == ("local", "end")
        assert not system.backends["any-0"].heard(Release)


async def test_first_token_is_streamed_before_decode_answers() -> None:
    async with live(System(1, 1)) as system:
        system.backends["decode-0"].held = True
        request = make_request()
        generation = system.dispatcher.start(request)
        delta = await anext(generation)
        assert delta.token_ids == expected_output(request)[:1]
        assert delta.finish_reason is None
        system.backends["decode-0"].release()
        assert (await collect(generation))[0] == expected_output(request)[1:]


async def test_deltas_that_pile_up_are_merged() -> None:
    async with live(System(1, 1)) as system:
        request = make_request()
        generation = system.dispatcher.start(request)
        while not generation.flow.ended:
            await asyncio.sleep(0)
        deltas = [delta async for delta in generation]
        assert [d.token_ids for d in deltas] == [expected_output(request)]
        assert deltas[0].finish_reason == "length"


async def test_abort_reaches_both_engines_releases_and_wakes_the_reader() -> None:
    async with live(System(1, 1, kind="push", orders=["concurrent"])) as system:
        for backend in system.backends.values():
            backend.held = True
        generation = system.dispatcher.start(make_request())
        reader = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        generation.abort()
        generation.abort()
        with pytest.raises(RequestAborted):
            await reader
        assert system.dispatcher.counters.aborted == 1
        for name, kinds in (("prefill-0", [Submit, Abort, Release]), ("decode-0", [Submit, Abort])):
            received = [m for m in system.backends[name].engine.received if not isinstance(m, Peers)]
            assert [type(m) for m in received] == kinds


@pytest.mark.parametrize("telling", [True, False])
async def test_deadline_ends_the_request_everywhere_and_blames_the_engine_if_it_was_long(
    telling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if telling:
        monkeypatch.setattr("pdkv.router.generations.evidence.TELLING_TIMEOUT_S", 0.0)
    system = System(2, 1, policy="round_robin")
    system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
    async with live(system):
        system.backends["prefill-0"].held = True
        for _ in range(3):
            with pytest.raises(RequestTimeout, match="longer than 1 s"):
                await clock().passing(collect(system.dispatcher.start(make_request(timeout_s=1.0))))
        assert system.dispatcher.counters.failed == {"timeout": 3}
        for _ in range(2):
            generation = system.dispatcher.start(make_request())
            assert generation.prefill_engine == ("prefill-1" if telling else "prefill-0")
            generation.abort()
        system.backends["prefill-0"].release()
        system.backends["prefill-1"].release()


def say_a_token(backend: InProcessBackend, submit: Submit) -> None:
    """Of this request alone, from an engine that is held."""
    while not backend.engine.outbox:
        backend.engine.step((submit.request_id, submit.attempt))
    said, backend.engine.outbox = backend.engine.outbox, []
    backend.say(*said)


async def test_no_deadline_of_the_server_ends_what_gets_on() -> None:
    """Router 1: streams were cut at 600 s, however many tokens still came."""
    async with live(System(0, 1)) as system:
        backend = system.backends["any-0"]
        backend.held = True
        request = make_request(max_tokens=5, timeout_s=math.inf, stall_timeout_s=600.0)
        steady, stuck = (system.dispatcher.start(request) for _ in range(2))
        [submit, _] = backend.heard(Submit)
        for number in range(5):  # 2,500 s
            clock().advance(500.0)
            assert not steady.flow.ended
            say_a_token(backend, submit)
            assert stuck.flow.ended == (number > 0)
        assert (await collect(steady))[0] == expected_output(request)
        with pytest.raises(RequestTimeout, match=r"^no token came for 600 s$"):
            await collect(stuck)
        backend.release()


async def test_a_clients_deadline_is_of_the_whole() -> None:
    async with live(System(0, 1)) as system:
        backend = system.backends["any-0"]
        backend.held = True
        generation = system.dispatcher.start(make_request(timeout_s=900.0, stall_timeout_s=600.0))
        [submit] = backend.heard(Submit)
        assert submit.timeout_s == 900.0
        clock().advance(500.0)
        say_a_token(backend, submit)
        clock().advance(100.0)
        assert not generation.flow.ended
        clock().advance(300.0)
        with pytest.raises(RequestTimeout, match=r"^the request took longer than 900 s$"):
            await collect(generation)
        backend.release()


async def test_a_timer_that_rings_a_little_early_names_the_deadline_that_it_was_set_for() -> None:
    """F36."""
    async with live(System(0, 1)) as system:
        backend = system.backends["any-0"]
        backend.held = True
        own = system.dispatcher.start(make_request(timeout_s=10.0, stall_timeout_s=600.0))
        servers = system.dispatcher.start(make_request(timeout_s=900.0, stall_timeout_s=20.0))
        for passed_s, generation, message in (
            (10.0, own, "the request took longer than 10 s"),
            (10.0, servers, "no token came for 20 s"),
        ):
            clock().advance(passed_s - TIMER_SLACK_S / 4)
            system.dispatcher.driver.expire(generation)
            with pytest.raises(RequestTimeout, match=f"^{message}$"):
                await collect(generation)
        backend.release()


async def test_unknown_and_stale_messages_are_counted_and_dropped() -> None:
    async with live(System(1, 1)) as system:
        generation = system.dispatcher.start(make_request())
        flow, backend = generation.flow, system.backends["prefill-0"]
        backend.say(Tokens("nobody", 0, 0, [1]), Tokens(flow.request_id, 7, 0, [1]), Release("nothing", 0), Resync())
        assert system.dispatcher.counters.dropped_messages == 4
        assert (await collect(generation))[0] == expected_output(generation.flow.request)
        backend.say(Tokens(flow.request_id, 0, 0, [1]), Failed(flow.request_id, 0, "x", "y", retryable=True))
        assert system.dispatcher.counters.dropped_messages == 6


async def test_death_before_the_first_token_is_retried_elsewhere() -> None:
    async with live(System(2, 1)) as system:
        system.backends["prefill-0"].held = True
        request = make_request()
        generation = system.dispatcher.start(request)
        assert generation.prefill_engine == "prefill-0"
        system.backends["prefill-0"].die()
        assert (await collect(generation))[0] == expected_output(request)
        assert generation.prefill_engine == "prefill-1"
        assert [m.attempt for m in system.backends["prefill-1"].heard(Submit)] == [1]
        assert system.dispatcher.counters.retried == 1


async def test_death_of_decode_after_the_first_token_touches_no_other_request() -> None:
    async with live(System(1, 2)) as system:
        system.backends["decode-0"].held = True
        mine, other = make_request(20), make_request(21)
        moving, untouched = system.dispatcher.start(mine), system.dispatcher.start(other)
        assert (await anext(moving)).token_ids == expected_output(mine)[:1]
        assert moving.decode_engine == "decode-0"
        await asyncio.sleep(0)
        system.backends["decode-0"].die()
        assert (await collect(moving))[0] == expected_output(mine)[1:]
        assert (await collect(untouched))[0] == expected_output(other)
        assert (moving.flow.attempt, untouched.flow.attempt) == (1, 0)


async def test_decode_is_bound_with_the_first_part_of_a_prompt_but_for_a_suspect_with_the_whole_hand_off() -> None:
    async with live(System(1, 2)) as system:
        prefill = system.backends["prefill-0"]
        prefill.held = True
        request = make_request()
        generation = system.dispatcher.start(request)
        flow, asked_at = generation.flow, generation.asked_at
        epoch = system.card("prefill-0").epoch
        part = KVHandoff(flow.request_id, 0, flow.transfer_id, "prefill-0", epoch, 8, b"", more=True)
        prefill.say(part)
        first = flow.route.decode
        (submit,) = system.backends[first].heard(Submit)
        assert (submit.handoff, submit.output_token_ids) == (part, [])
        assert generation.asked_at == asked_at  # it is prefill's time that is measured
        system.backends[first].die()  # perhaps of this request
        await until(lambda: flow.attempt == 1)
        prefill.say(part)
        prefill.release()
        assert (await collect(generation))[0] == expected_output(request)
        (submit,) = system.backends[({"decode-0", "decode-1"} - {first}).pop()].heard(Submit)
        assert (submit.attempt, submit.handoff.more, submit.output_token_ids) == (
            1,
            False,
            expected_output(request)[:1],
        )


async def test_the_turn_of_a_decode_engine_that_was_bound_early_begins_with_the_hand_off() -> None:
    """It was judged by what prefill had to do: a client that gave up told nothing against it behind long prompts."""
    async with live(System(1, 1)) as system:
        prefill, decode = system.backends["prefill-0"], system.backends["decode-0"]
        prefill.held = decode.held = True
        request = make_request()
        generation = system.dispatcher.start(request)
        flow, generation.asked_work, generation.asked_at = generation.flow, 100_000, 0.0
        epoch = system.card("prefill-0").epoch
        prefill.say(KVHandoff(flow.request_id, 0, flow.transfer_id, "prefill-0", epoch, 8, b"", more=True))
        assert decode.heard(Submit)
        assert generation.asked_work == 100_000
        prefill.release()
        await until(lambda: flow.prefill == "done")
        assert (generation.asked_work, generation.asked_at) == (
            len(request.prompt_token_ids),
            system.dispatcher.driver.clock(),
        )
        decode.release()
        await collect(generation)


async def test_an_engine_that_knows_no_parts_gets_none() -> None:
    """One of an earlier version would take the first part for all that there is."""
    async with live(System(1, 0)) as system:
        system.dispatcher.add_backend(old := InProcessBackend(ScriptedEngine("decode-0", "pull")), "decode")
        old.start(system.card("decode-0", reads_parts=False))
        prefill = system.backends["prefill-0"]
        prefill.held = True
        request = make_request()
        generation = system.dispatcher.start(request)
        flow = generation.flow
        part = KVHandoff(
            flow.request_id, 0, flow.transfer_id, "prefill-0", system.card("prefill-0").epoch, 8, b"", more=True
        )
        prefill.say(part)
        assert old.heard(Submit) == []
        prefill.release()
        assert (await collect(generation))[0] == expected_output(request)
        assert [submit.handoff.more for submit in old.heard(Submit)] == [False]


async def test_an_engine_s_failure_goes_elsewhere_and_a_client_s_mistake_does_not() -> None:
    system = System(2, 1)
    system.dispatcher.routes.policy = lambda snapshot: snapshot.engines[0]
    async with live(system):
        for code in ("overloaded", InvalidRequest.code):
            system.backends["prefill-0"].held = True
            generation = system.dispatcher.start(make_request())
            submit = system.backends["prefill-0"].heard(Submit)[-1]
            system.backends["prefill-0"].engine.tasks.clear()
            system.backends["prefill-0"].say(Failed(submit.request_id, 0, code, "no room", code == "overloaded"))
            if code == "overloaded":
                assert (await collect(generation))[0] == expected_output(generation.flow.request)
            else:
                with pytest.raises(InvalidRequest, match=r"^no room$"):
                    await collect(generation)


async def test_restarted_engine_serves_again_under_its_new_epoch() -> None:
    async with live(System(1, 1)) as system:
        assert system.dispatcher.listener.ready
        system.backends["decode-0"].die()
        assert not system.dispatcher.listener.ready
        assert system.backends["prefill-0"].heard(Peers)[-1].cards == [system.card("prefill-0")]
        system.backends["decode-0"].start(system.card("decode-0", epoch="e1"))
        assert system.dispatcher.listener.ready
        for backend in system.backends.values():
            assert [c.epoch for c in backend.heard(Peers)[-1].cards] == ["e0", "e1"]
        await check_right(system, make_request())


async def test_engines_are_told_what_changed_once_and_older_ones_everything() -> None:
    """Review, A2. Of 100 engines, each was sent 100 cards at each change: 4 GiB for 200 engines."""
    system = System(2, 98)
    names = list(system.backends)
    system.dispatcher.connect()
    for name, backend in system.backends.items():
        backend.start(system.card(name, peer_changes=name != "prefill-1"))
    backends = system.backends
    num_cards = sum(len(message.cards) for backend in backends.values() for message in backend.heard(Peers))
    assert num_cards < CARDS_PER_TURN + len(names), "the others wait, and are told of several at once"

    def known(name: str) -> dict[str, str]:
        """As the engine understands it."""
        cards: dict[str, str] = {}
        for message in backends[name].heard(Peers):
            cards = {} if message.removed is None else cards
            cards |= {card.engine: card.epoch for card in message.cards}
            cards = {engine: epoch for engine, epoch in cards.items() if engine not in (message.removed or ())}
        return cards

    clock().advance(1.0)
    for name in names:
        assert known(name) == dict.fromkeys(names, "e0"), name
        backends[name].engine.received.clear()
    backends["decode-97"].die()
    backends["decode-97"].start(system.card("decode-97", epoch="e1", peer_changes=True))
    backends["decode-96"].die()
    system.dispatcher.start_on("decode-95", make_request()).abort()
    assert [type(m) for m in backends["decode-95"].engine.received][-3:] == [Peers, Submit, Abort], "known before"
    clock().advance(1.0)
    live = {name: "e1" if name == "decode-97" else "e0" for name in names if name != "decode-96"}
    assert known("prefill-1") == known("decode-97") == live
    for name in names[2:97]:
        messages = backends[name].heard(Peers)
        assert all(m.removed is not None for m in messages)
        assert sum(len(m.cards) for m in messages) <= 1
        assert messages[-1].removed == ["decode-96"], name
    system.dispatcher.close()


async def test_not_ready_before_every_engine_has_been_up() -> None:
    async with live(System(1, 2), start=False) as system:
        dispatcher = system.dispatcher
        dispatcher.connect()
        assert dispatcher.max_model_len is None
        system.backends["prefill-0"].start(system.card("prefill-0", max_model_len=300))
        with pytest.raises(EngineUnavailable, match="no decode engine is ready"):
            dispatcher.start(make_request())
        system.backends["decode-0"].start(system.card("decode-0", max_model_len=200))
        assert not dispatcher.listener.ready
        waiting = asyncio.ensure_future(dispatcher.listener.wait_ready())
        assert await asyncio.wait([waiting], timeout=0) == (set(), {waiting})
        system.backends["decode-1"].start(system.card("decode-1"))
        assert dispatcher.listener.ready
        await waiting
        assert dispatcher.max_model_len == 200
        system.backends["decode-0"].die()
        assert dispatcher.max_model_len == 200, "what is taken meanwhile may be run there"


async def test_a_restarted_router_does_not_wait_for_an_engine_that_cannot_start() -> None:
    async with live(System(1, 2, await_all=False), start=False) as system:
        system.dispatcher.connect()
        assert not system.dispatcher.listener.ready
        system.backends["prefill-0"].start(system.card("prefill-0"))
        waiting = asyncio.ensure_future(system.dispatcher.listener.wait_ready())
        assert await asyncio.wait([waiting], timeout=0) == (set(), {waiting})
        system.backends["decode-1"].start(system.card("decode-1"))
        await waiting
        assert system.dispatcher.listener.ready


async def test_incompatible_engine_is_never_asked(caplog: pytest.LogCaptureFixture) -> None:
    async with live(System(1, 1), start=False) as system:
        system.dispatcher.connect()
        system.backends["prefill-0"].start(system.card("prefill-0"))
        system.backends["decode-0"].start(system.card("decode-0", model="another"))
        assert "decode-0 is refused: prefill-0 has model m, decode-0 has another" in caplog.text
        with pytest.raises(IncompatiblePeers, match="decode-0 has another"):
            await system.dispatcher.listener.wait_ready()
        with pytest.raises(EngineUnavailable):
            system.dispatcher.start(make_request())
        system.backends["decode-0"].say(LoadReport(1, 1, BLOCKS))
        system.backends["decode-0"].die()
        assert system.backends["decode-0"].engine.received == []


async def test_refused_engines_come_in_when_those_that_they_could_not_work_with_have_gone() -> None:
    """They stay connected, and nobody would have looked at them again."""
    async with live(System(2, 2, await_all=False), start=False) as system:
        system.dispatcher.connect()
        for name in ("prefill-0", "decode-0"):
            system.backends[name].start(system.card(name))
        size = 2 * system.card("prefill-0").hash_block_size
        for name in ("prefill-1", "decode-1"):
            system.backends[name].start(system.card(name, hash_block_size=size))
        system.dispatcher.remove_backend("prefill-0")
        assert not system.dispatcher.listener.ready, "decode-0 is still there"
        system.backends["decode-0"].die()
        assert system.dispatcher.listener.ready
        assert {e["name"] for e in system.dispatcher.topology()["engines"] if e["reason"]} == set()
        await check_right(system, make_request())


async def test_a_refused_engine_that_has_gone_or_has_the_wrong_model_does_not_come_in_later() -> None:
    async with live(System(2, 2, await_all=False), start=False) as system:
        system.dispatcher.connect()
        for name in ("prefill-0", "decode-0"):
            system.backends[name].start(system.card(name))
        size = 2 * system.card("prefill-0").hash_block_size
        system.backends["prefill-1"].start(system.card("prefill-1", hash_block_size=size))
        system.backends["decode-1"].start(system.card("decode-1", model="another"))
        system.backends["prefill-1"].die()
        for name in ("prefill-0", "decode-0"):
            system.backends[name].die()
        states = {e["name"]: e["state"] for e in system.dispatcher.topology()["engines"]}
        assert states == {"prefill-0": "dead", "decode-0": "dead", "prefill-1": "refused", "decode-1": "refused"}


async def test_no_common_order_is_unavailable_and_says_why() -> None:
    async with live(System(1, 1, kind="pull", orders=["concurrent"])) as system:
        with pytest.raises(EngineUnavailable, match="the router takes one of"):
            system.dispatcher.start(make_request())


async def test_prefix_aware_routing_follows_the_engines_events_and_resyncs_after_a_gap() -> None:
    async with live(System(2, 1, policy="prefix_aware")) as system:
        request = make_request(40)
        card = system.card("prefill-0")
        keys: list[bytes] = []
        extend_keys(keys, root_key(model=card.model, layout=card.layout.identity), request.prompt_token_ids)
        cached = system.backends["prefill-1"]
        cached.say(KVEvents(3, [CacheCleared(), BlockStored(keys, None)]))
        assert {(await check_right(system, request)).prefill_engine for _ in range(3)} == {"prefill-1"}
        salted = [make_request(40, cache_salt=salt) for salt in ("mine", "yours")]
        assert {(await check_right(system, each)).prefill_engine for each in salted} == {"prefill-0", "prefill-1"}
        cached.say(KVEvents(5, []))
        assert len(cached.heard(Resync)) == 1
        first = (await check_right(system, request)).prefill_engine
        clock().advance(EXPECTED_S)
        assert {first, (await check_right(system, request)).prefill_engine} == {"prefill-0", "prefill-1"}


async def test_what_engines_say_of_a_store_counts_and_outlives_them() -> None:
    async with live(System(2, 1, policy="prefix_aware")) as system:
        request = make_request(64)
        card = system.card("prefill-0")
        keys: list[bytes] = []
        extend_keys(keys, root_key(model=card.model, layout=card.layout.identity), request.prompt_token_ids)
        backends = system.backends
        backends["prefill-0"].say(KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))
        backends["prefill-0"].say(TierEvents("disk", True, 64, stored=keys[3:]))
        backends["prefill-1"].say(TierEvents("disk", True, 64))
        (tier,) = system.dispatcher.topology()["router"]["tiers"]
        assert tier == {"medium": "disk", "scope": "", "shared": True, "tokens_per_key": 64, "keys": 1,
                        "engines": ["prefill-0", "prefill-1"], "parts": []}  # fmt: skip
        assert {(await check_right(system, request)).prefill_engine for _ in range(3)} == {"prefill-0"}
        holdings = system.dispatcher.holdings
        assert holdings.uncached_tokens(holdings.of(request, clock().now()), "prefill-1") == HASH_BLOCK_SIZE
        backends["prefill-0"].die()
        assert system.dispatcher.topology()["router"]["tiers"][0]["engines"] == ["prefill-1"]


async def test_failed_load_marks_the_pair() -> None:
    async with live(System(1, 2, kind="push")) as system:
        for backend in system.backends.values():
            backend.held = True
        generation = system.dispatcher.start(make_request())
        first = system.backends["decode-0"]
        assert generation.decode_engine == "decode-0"
        first.say(Loaded(generation.request_id, 0, ok=False, code="stale_generation"))
        assert system.dispatcher.counters.load_failures == 1
        generation.abort()
        for backend in system.backends.values():
            backend.release()
        assert {(await check_right(system, make_request())).decode_engine for _ in range(4)} == {"decode-1"}


async def test_load_balances_over_engines_by_what_is_in_flight() -> None:
    async with live(System(2, 4, policy="least_loaded")) as system:
        for backend in system.backends.values():
            backend.held = True
        generations = [system.dispatcher.start(make_request()) for _ in range(8)]
        assert [e.books.requests for e in system.dispatcher.engines()] == [4, 4, 0, 0, 0, 0]
        for backend in system.backends.values():
            backend.release()
        for generation in generations:
            await collect(generation)


async def test_books_are_kept_in_tokens_from_the_start_of_a_request_to_its_end() -> None:
    """Prefill: what it has to compute, until the prompt is run; then decode: what its request's KV comes to."""
    async with live(System(1, 1)) as system:
        prefill, decode = (system.dispatcher.fleet.engines[name].books for name in ("prefill-0", "decode-0"))
        system.backends["prefill-0"].held = system.backends["decode-0"].held = True
        generations = [
            system.dispatcher.start(make_request(num, max_tokens=5, cache_salt=str(num))) for num in (100, 40)
        ]
        assert (prefill.requests, prefill.prefill_tokens, decode.requests, decode.kv_tokens) == (2, 140, 0, 0)
        generations[1].abort()
        assert (prefill.requests, prefill.prefill_tokens, decode.requests, decode.kv_tokens) == (1, 100, 0, 0)
        system.backends["prefill-0"].release()
        while prefill.requests:
            await asyncio.sleep(0)
        assert (prefill.prefill_tokens, decode.requests, decode.kv_tokens) == (0, 1, 105)
        system.backends["decode-0"].release()
        await collect(generations[0])


async def test_an_aggregated_engine_has_no_prompt_to_compute_once_the_first_token_is_out() -> None:
    async with live(System(0, 1)) as system:
        books = system.dispatcher.fleet.engines["any-0"].books
        generation = system.dispatcher.start(make_request(100, max_tokens=5))
        assert (books.requests, books.prefill_tokens, books.kv_tokens) == (1, 100, 105)
        await anext(generation)
        assert (books.requests, books.prefill_tokens, books.kv_tokens) == (1, 0, 105)
        await collect(generation)


async def test_topology_and_snapshots_show_what_engines_said_last() -> None:
    async with live(System(1, 1)) as system:
        connectors = {"pull": ConnectorStats(paths={"prefill-0": "arena"})}
        system.backends["decode-0"].say(LoadReport(1, 2, BlockCounts(100, 60, 10, 20, 5, 5), connectors=connectors))
        shown = system.dispatcher.topology()["engines"][1]
        assert {name: shown.pop(name) for name in ("connector", "kind", "orders", "model", "epoch", "kv_layout")} == {
            "connector": "pull",
            "kind": "pull",
            "orders": ["prefill_first", "decode_first"],
            "model": "m",
            "epoch": "e0",
            "kv_layout": {
                "layers": 1,
                "kv_heads": 1,
                "head_size": 8,
                "dtype": "float32",
                "block_size": 16,
                "block_bytes": 1024,
                "windows": [0],
                "hash_block_size": 16,
            },
        }
        assert shown == {
            "version": "",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "tp": 1,
            "platform": {},
            "connector_parts": ["pull"],
            "kv_paths": {"pull": {"prefill-0": "arena"}},
            "content_addressed": False,
            "name": "decode-0",
            "role": "decode",
            "endpoint": "",
            "source": "launch",
            "pid": 1,
            "ranks": [],
            "state": "ready",
            "reason": None,
            "serves": True,
            "suspect": False,
            "suspicion": None,
            "draining": False,
            "drained": False,
            "requests": 0,
            "ejected": False,
            "last_probe": None,
            "silent_for_s": 0.0,
            "busy_s": 0.0,
            "predicted_s": 0.0,
            "waiting": 1,
            "running": 2,
            "blocks": {"total": 100, "free": 60, "cached": 10, "active": 20, "leased": 5, "quarantined": 5},
            "connector_problem": None,
        }
        problem = "KV store: a lookup failed"
        system.backends["decode-0"].say(LoadReport(1, 2, BlockCounts(100, 60, 10, 20, 5, 5), connector_problem=problem))
        assert system.dispatcher.topology()["engines"][1]["connector_problem"] == problem
        assert system.dispatcher.connector_problems == {"decode-0": problem}
        system.backends["decode-0"].die()
        assert [e["state"] for e in system.dispatcher.topology()["engines"]] == ["ready", "dead"]
        snapshot = system.dispatcher.engines()[1]
        assert (snapshot.pid, snapshot.load, snapshot.num_deaths) == (None, None, 1)
        assert system.dispatcher.connector_problems == {}


async def test_closing_ends_every_generation_at_once() -> None:
    async with live(System(1, 1)) as system:
        for backend in system.backends.values():
            backend.held = True
        generations = [system.dispatcher.start(make_request()) for _ in range(3)]
        system.dispatcher.close()
        for generation in generations:
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await collect(generation)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            system.dispatcher.start(make_request())


async def test_conditional_decode_that_declines_is_named_as_the_one_that_ran_the_prompt() -> None:
    async with live(System(1, 1, orders=["decode_first"])) as system:
        system.backends["decode-0"].engine.draw = lambda n: 1 if n == 3 else 0
        request = make_request()
        generation = await check_right(system, request)
        assert generation.prefill_engine == generation.decode_engine == "decode-0"
        assert generation.sources == SourceCounts(computed=20)
        assert not system.backends["prefill-0"].heard(Submit)
        assert not system.backends["prefill-0"].heard(KVTicket)


async def test_cached_tokens_are_those_that_nobody_computed() -> None:
    async with live(System(0, 1)) as system:
        system.backends["any-0"].held = True
        generation = system.dispatcher.start(make_request(20, max_tokens=1))
        system.backends["any-0"].engine.tasks.clear()
        sources = SourceCounts(computed=3, recomputed=1, local_hit=10, store=6)
        token = token_at(range(20), 0)
        system.backends["any-0"].say(
            Tokens(generation.request_id, 0, 0, [token]), Finished(generation.request_id, 0, "length", sources)
        )
        assert await collect(generation) == ([token], Delta([token], None, None, "length", None))
        assert generation.num_cached_tokens == 16


@pytest.mark.parametrize(
    ("num_prefill", "codec", "expected"), [(0, "fp8-1.0", 16), (1, "fp8-1.0", 20), (0, "", None), (1, "", None)]
)
async def test_lossy_tokens_are_those_that_were_found_or_handed_over(
    num_prefill: int, codec: str, expected: int | None
) -> None:
    async with live(System(num_prefill, 1), start=False) as system:
        system.dispatcher.connect()
        for name, backend in system.backends.items():
            layout = msgspec.structs.replace(system.card(name).layout, codec=codec)
            backend.start(system.card(name, layout=layout))
        generation = system.dispatcher.start(make_request(20, max_tokens=2))
        await collect(generation)
        generation.flow.sources = SourceCounts(computed=4, store=16)
        assert generation.num_lossy_tokens == expected


async def test_cached_tokens_are_known_with_the_first_token() -> None:
    async with live(System(0, 1)) as system:
        system.backends["any-0"].held = True
        generation = system.dispatcher.start(make_request(20))
        token, sources = token_at(range(20), 0), SourceCounts(computed=4, local_hit=16)
        system.backends["any-0"].say(Tokens(generation.request_id, 0, 0, [token], sources=sources))
        await anext(generation)
        generation.abort()  # as for a stop string
        assert generation.num_cached_tokens == 16


def test_unknown_policy_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown policy"):
        Dispatcher(policy="best")


async def test_when_tokens_came_is_kept_for_a_reader_that_comes_late() -> None:
    async with live(System(1, 1)) as system:
        generation = system.dispatcher.start(make_request(max_tokens=6))
        while not generation.flow.ended:
            await asyncio.sleep(0)
        delta = await anext(generation)
        arrivals = generation.take_arrivals()
        assert len(delta.token_ids) == 6
        assert len(arrivals) == 6
        assert arrivals == sorted(arrivals)
        assert generation.take_arrivals() == []


async def test_what_the_index_puts_off_is_done_between_other_callbacks() -> None:
    keys = [i.to_bytes(16) for i in range(6000)]
    async with live(System(1, 1), start=False) as system:
        system.dispatcher.connect()
        for name, backend in system.backends.items():
            backend.start(system.card(name, num_blocks=6000))
        index = system.dispatcher.index
        system.backends["prefill-0"].say(KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))
        assert index.num_keys_of("prefill-0") == 0
        held = []
        while index.has_work:
            await asyncio.sleep(0)
            held.append(index.num_keys_of("prefill-0"))
        assert held[-1] == 6000
        assert held[0] < 3000
        system.backends["prefill-0"].die()
        assert index.num_keys == 6000
        while index.has_work:
            await asyncio.sleep(0)
        assert index.num_keys == 0
