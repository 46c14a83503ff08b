"""A reader of engines' counters asks for reports of now, and waits for those."""

import asyncio

import pytest
from asgi_client import call
from dispatch_rig import System, live
from small_app import make_app

from pdkv.router.generations import listener
from pdkv.wire.messages import AskReport
from pdkv.wire.reports import BlockCounts, LoadReport

BLOCKS = BlockCounts(total=8, free=8, cached=0, active=0, leased=0, quarantined=0)


def asked(system: System, name: str) -> list[int]:
    return [m.number for m in system.backends[name].engine.received if isinstance(m, AskReport)]


def answer(system: System, name: str, number: int, steps: int = 0) -> None:
    system.backends[name].say(LoadReport(0, 0, BLOCKS, steps=steps, answers=number))


async def test_it_returns_with_the_last_answer_and_not_with_a_report_of_before() -> None:
    async with live(System(1, 1)) as system:
        fresh = asyncio.ensure_future(system.dispatcher.listener.fresh_reports(60.0))
        await asyncio.sleep(0)
        (number,) = asked(system, "prefill-0")
        answer(system, "prefill-0", number)
        answer(system, "decode-0", number - 1)
        answer(system, "decode-0", 0)
        await asyncio.sleep(0)
        assert not fresh.done()
        answer(system, "decode-0", number)
        assert await fresh


@pytest.mark.parametrize("end", ["dies", "comes back", "is removed", "the router closes"])
async def test_an_engine_that_goes_is_waited_for_no_longer(end: str) -> None:
    async with live(System(1, 1)) as system:
        fresh = asyncio.ensure_future(system.dispatcher.listener.fresh_reports(60.0))
        await asyncio.sleep(0)
        answer(system, "prefill-0", asked(system, "prefill-0")[0])
        if end == "is removed":
            system.dispatcher.remove_backend("decode-0")
        elif end == "the router closes":
            system.dispatcher.close()
        else:
            system.backends["decode-0"].die()
            if end == "comes back":
                system.backends["decode-0"].start(system.card("decode-0", epoch="another"))
        assert await fresh


async def test_a_silent_engine_is_not_asked() -> None:
    async with live(System(1, 1)) as system:
        system.dispatcher.fleet.engines["decode-0"].health.silent = True
        system.dispatcher.fleet.engines["prefill-0"].health.silent = True
        assert await system.dispatcher.listener.fresh_reports(60.0)
        assert not asked(system, "decode-0")


async def test_who_does_not_answer_is_told_of_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener.Listener.fresh_reports, "__defaults__", (0.0,))
    async with live(System(1, 1)) as system:
        answer(system, "decode-0", 0, steps=4)
        assert not await system.dispatcher.listener.fresh_reports()
        app = make_app(system.dispatcher)
        reply = await call(app, "GET", "/topology?fresh=true")
        assert reply.status == 200
        assert asked(system, "decode-0") == [1, 2]
        assert (await call(app, "GET", "/metrics?fresh=true")).status == 200
        assert asked(system, "decode-0") == [1, 2, 3]
        await call(app, "GET", "/topology")
        assert len(asked(system, "decode-0")) == 3
