"""The data of the dashboard: what it says, and that nothing makes it large or often."""

from typing import Any

import msgspec
from busy_fleet import BusyEngine
from coroutines import clock
from dispatch_rig import System, live
from scripted_engine import make_request

from pdkv.router.engines.events import MAX_EVENTS, Events
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.metrics.overview import MAX_ENGINES, PERIOD_S, Overview
from pdkv.router.metrics.requests import Metrics
from pdkv.testing import VirtualLoop
from pdkv.wire.reports import BlockCounts, DraftCounts, LoadReport

event_loop = VirtualLoop


def overview_of(dispatcher: Dispatcher, **options: Any) -> Overview:
    return Overview(dispatcher, Metrics(dispatcher), "m", **({"shows_requests": True} | options))


async def test_it_tells_engines_flows_requests_and_events() -> None:
    async with live(System(1, 2)) as system:
        overview = overview_of(system.dispatcher, clock=clock().now)
        for _ in range(3):
            async for _ in system.dispatcher.start(make_request(label="<b>")):
                pass
        system.backends["decode-1"].die()
        said = msgspec.json.decode(overview.json())
    assert {(e["name"], e["life"]) for e in said["engines"]} == {
        ("prefill-0", "ready"), ("decode-0", "ready"), ("decode-1", "dead"),
    }  # fmt: skip
    assert said["engines"][0]["name"] == "decode-1"  # trouble comes first
    assert said["flows"]["handed"] == sum(number for *_, number in said["flows"]["pairs"]) == 3
    assert [row["request_id"] for row in said["requests"]["latest"]] == ["<b>"] * 3
    assert said["requests"]["failed"] == []
    assert said["events"][0] | {"number": 0, "at": 0} == {
        "number": 0, "at": 0, "kind": "down", "engine": "decode-1", "text": "killed",
    }  # fmt: skip


async def test_a_choice_that_one_engine_ran_alone_was_not_handed_over() -> None:
    async with live(System(1, 1)) as system:
        overview = overview_of(system.dispatcher, clock=clock().now)
        async for _ in system.dispatcher.start(make_request(max_tokens=1)):
            pass
        flows = msgspec.json.decode(overview.json())["flows"]
    assert (flows["pairs"], flows["handed"], flows["local"]) == ([["prefill-0", "", 1]], 0, 1)


async def test_guesses_of_all_engines_are_counted_together() -> None:
    async with live(System(1, 1)) as system:
        for engine in system.dispatcher.engines():
            drafts, blocks = DraftCounts(drafts=2, tokens=8, accepted=6), BlockCounts(8, 8, 0, 0, 0, 0)
            engine.load = LoadReport(waiting=0, running=0, blocks=blocks, drafts=drafts)
        totals = msgspec.json.decode(overview_of(system.dispatcher, clock=clock().now).json())["totals"]
    assert (totals["guesses"], totals["right_guesses"]) == (16, 12)


async def test_it_is_made_once_a_second_however_many_ask() -> None:
    async with live(System(1, 1)) as system:
        overview = overview_of(system.dispatcher, clock=clock().now)
        first = overview.json()
        assert overview.json() is first
        clock().advance(PERIOD_S)
        assert overview.json() is not first


async def test_single_requests_are_told_only_where_they_may_be() -> None:
    async with live(System(1, 1)) as system:
        async for _ in system.dispatcher.start(make_request(label="mine")):
            pass
        assert b"mine" not in overview_of(system.dispatcher, shows_requests=False).json()


async def test_many_engines_and_events_make_it_no_larger_than_its_bounds() -> None:
    dispatcher = Dispatcher(await_all=False)
    for i in range(MAX_ENGINES + 100):
        dispatcher.add_backend(BusyEngine(f"engine-{i}", "any"), "any")
    for i in range(10_000):
        dispatcher.fleet.events.note(float(i), "down", f"engine-{i}", "x" * 10_000)
    text = overview_of(dispatcher).json()
    said = msgspec.json.decode(text)
    assert (said["num_engines"], len(said["engines"])) == (MAX_ENGINES + 100, MAX_ENGINES)
    assert len(text) < 250_000
    assert len(dispatcher.fleet.events.latest(1 << 20)) == MAX_EVENTS


def test_the_same_happening_is_one_event_with_a_count() -> None:
    events = Events()
    for engine in ("a", "b") * 50:
        events.note(1.0, "moved", engine)
    assert [(event.engine, event.count) for event in events.latest(8)] == [("b", 50), ("a", 50)]
