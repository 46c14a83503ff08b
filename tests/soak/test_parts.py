"""The parts of a soak: it finds what it looks for, and the same seed makes the same run."""

import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from oracle import Expected
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from soak.accounts import BUSY_BLOCKS, COUNTS, accounts
from soak.backends import BACKENDS, select
from soak.checks import check_log, loop_stalls
from soak.journal import Journal
from soak.load import Load, Trial
from soak.report import Report, save
from soak.router_memory import Sample, judge_memory
from soak.schedule import Site, deck, draw
from traffic import Ask

from pdkv.launch.logs import TextFormatter
from pdkv.router.metrics.loop_watchdog import LoopWatchdog

SITE = Site(["prefill-0", "decode-0"], ["decode-0.1"], has_server=True, has_files=True)
EXPECTED = [Expected([5, 6, 7], [1, 2, 3, 4])]


def event(*token_ids: int) -> str:
    return f"data: {json.dumps({'choices': [{'token_ids': token_ids}]})}\n\n"


def error(code: str, kind: str = "server_error", status: int = 503) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": "m", "type": kind, "code": code}})


def whole(*token_ids: int) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"token_ids": token_ids}]}, headers=ENGINES)


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, text=text, headers=ENGINES)


ENGINES = {"x-pd-prefill-engine": "p", "x-pd-decode-engine": "d"}
CLEAR_END = 'data: {"error": {"message": "m", "type": "server_error", "code": "engine_died"}}\n\n'


@pytest.mark.parametrize(
    ("reply", "outcome", "violation"),
    [
        (whole(1, 2, 3, 4), "right", ""),
        (whole(1, 2, 9, 4), "wrong", "wrong tokens"),
        (whole(1, 2, 3), "wrong", "3 tokens instead of 4"),
        (error("engine_died"), "error engine_died", ""),
        (error("transfer_timeout"), "error transfer_timeout", ""),
        (error("internal_error", status=500), "error internal_error", "unclear"),
        (error("timeout", "invalid_request_error"), "error timeout", "unclear"),
        (stream(event(1) + event(2, 3) + event(4) + "data: [DONE]\n\n"), "right", ""),
        (stream(event(1) + CLEAR_END), "error engine_died", ""),
        (stream(event(7) + CLEAR_END), "wrong", "wrong tokens"),
        (stream(event(1)), "broken with its router", "the connection broke"),
    ],
)
def test_answers_are_judged(reply: httpx.Response, outcome: str, violation: str) -> None:
    is_stream = reply.headers["content-type"] != "application/json"
    trial = Trial(Ask([5, 6, 7], 4, stream=is_stream, fields={"cache_salt": "s"}), [1, 2, 3, 4])
    journal, found = judge(reply, trial)
    assert found == outcome
    assert journal.outcomes == {outcome: 1}
    assert len(journal.violations) == bool(violation)
    assert violation in "".join(journal.violations)


def judge(reply: httpx.Response, trial: Trial, *, router_died: bool = False) -> tuple[Journal, str]:
    journal = Journal()
    if router_died:
        journal.router_deaths.append(time.monotonic())

    async def send() -> str:
        transport = httpx.MockTransport(lambda request: reply)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await Load(client, EXPECTED, journal, 0).send(trial)

    return journal, asyncio.run(send())


def test_a_connection_may_break_with_the_router() -> None:
    trial = Trial(Ask([5, 6, 7], 4, stream=True, fields={"cache_salt": "s"}), [1, 2, 3, 4])
    journal, outcome = judge(stream(event(1)), trial, router_died=True)
    assert outcome == "broken with its router"
    assert not journal.violations


def test_a_seed_draws_the_same_events_and_all_kinds_come_before_any_comes_again() -> None:
    events = draw(random.Random(3), SITE, 400.0, 2.0)
    assert events == draw(random.Random(3), SITE, 400.0, 2.0)
    assert events != draw(random.Random(4), SITE, 400.0, 2.0)
    kinds = [found.kind for found in events]
    size = len(deck(SITE))
    assert sorted(kinds[:size]) == sorted(kinds[size : 2 * size]) == sorted(deck(SITE))
    assert [found.at_s for found in events] == sorted(found.at_s for found in events)
    assert all(found.seconds > 0 for found in events if found.kind.split()[0] in ("stop", "full"))


def test_a_site_without_servers_files_and_ranks_has_no_such_events() -> None:
    kinds = deck(Site(["prefill-0", "decode-0"], []))
    assert not [kind for kind in kinds if {"server", "disk", "rank"} & set(kind.split())]


def test_what_is_spared_is_left_alone_and_the_rest_is_not() -> None:
    whole, spared = deck(SITE), deck(SITE._replace(spared=["router"]))
    assert set(whole) - set(spared) == {"kill router", "stop router"}


def exposition(**changed: float) -> str:
    """Of a router at rest, but for what is changed."""
    registry = CollectorRegistry()
    for name in COUNTS:
        labels = ("engine",) if name.startswith("pdkv_engine") else ()
        gauge = Gauge(name, "", labels, registry=registry)
        (gauge.labels("decode-0") if labels else gauge).set(changed.get(name, 0))
    blocks = Gauge("pdkv_engine_blocks", "", ("engine", "class"), registry=registry)
    for name, count in {"total": 9, "free": 5, "cached": 4, **dict.fromkeys(BUSY_BLOCKS, 0)}.items():
        blocks.labels("decode-0", name).set(changed.get(name, count))
    for name in ("pdkv_generations_started_total", "pdkv_generations_total"):
        Gauge(name, "", registry=registry).set(changed.get(name, 7))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("name", [*COUNTS, *BUSY_BLOCKS])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_every_count_of_what_is_under_way_is_looked_at(name: str, value: float) -> None:
    assert {account.value for account in accounts(exposition())} == {0.0}
    assert value in {account.value for account in accounts(exposition(**{name: value}))}


def test_blocks_and_generations_that_are_nowhere_are_found() -> None:
    (lost,) = [account for account in accounts(exposition(free=4)) if account.value]
    assert str(lost) == "pdkv_engine_blocks{decode-0, nowhere} is 1"
    (left,) = [account for account in accounts(exposition(pdkv_generations_total=6)) if account.value]
    assert str(left) == "generations that did not end is 1"
    with pytest.raises(ValueError, match="pdkv_requests_in_flight"):
        accounts(exposition().replace("pdkv_requests_in_flight", "pdkv_requests_somewhere"))


def memory(*mebibytes: float, pid: int = 1) -> list[Sample]:
    return [Sample(60.0 * i, pid, int(mib * (1 << 20))) for i, mib in enumerate(mebibytes)]


def test_memory_that_grows_all_the_time_is_told_from_a_warm_up() -> None:
    flat = judge_memory(memory(50, 60, 65, 66, 65, 66, 65, 65.5, 65))
    assert flat is not None
    assert flat.is_flat
    growing = judge_memory(memory(50, 60, 65, 66, 67, 68, 69, 70, 71))
    assert growing is not None
    assert not growing.is_flat
    assert growing.growth_mib == 6.0


def test_memory_of_a_router_that_was_killed_lately_is_not_judged() -> None:
    assert judge_memory([]) is None
    assert judge_memory([*memory(60, 60, 60, 60, 60, 60, 60, 60, 60), *memory(60, 60, 60, 99, pid=2)]) is None


def test_backends_are_selected_by_name_and_by_first_word() -> None:
    assert select(["store_redis", "nixl"]) == ["store redis", *(name for name in BACKENDS if name.startswith("nixl"))]
    assert select(["p2p"]) == ["p2p"]
    assert len(select([])) > 5
    with pytest.raises(ValueError, match="'teleport'"):
        select(["teleport"])


def test_reports_of_a_day_are_merged(tmp_path: Path) -> None:
    first = Report(backend="a", ranks=(1, 1), seed=0, seconds=9, private_mounts=True, outcomes={"right": 5})
    save([first], tmp_path)
    second = Report(backend="b", ranks=(1, 2), seed=0, seconds=9, private_mounts=False, violations=["wrong"])
    table = save([second], tmp_path).read_text()
    assert "| a, TP 1,1 | 9 s | 0 | 5 | 5 | 0 | 0.0 s | none |" in table
    assert "- **violation** wrong" in table


def logged(record: logging.LogRecord) -> list[str]:
    """Its lines on stderr, as the router writes them."""
    return TextFormatter("router").format(record).splitlines()


def test_an_exception_in_the_log_is_found_although_its_lines_are_indented() -> None:
    try:
        raise ValueError("strange")
    except ValueError:
        record = logging.LogRecord("pdkv.x", logging.ERROR, __file__, 1, "dropped a message", (), sys.exc_info())
    journal = Journal()
    world: Any = SimpleNamespace(deployment=SimpleNamespace(lines=logged(record)), journal=journal, site=SITE)
    check_log(world)
    assert len(journal.violations) == 1


def test_stalls_of_the_event_loop_are_counted_by_what_the_watchdog_says(caplog: pytest.LogCaptureFixture) -> None:
    for place in ("router.x.f", "router.x.f", "Choice.push"):
        watchdog = LoopWatchdog(0.02)
        watchdog._samples = [(place, 1)]
        watchdog._count(0.035, 0.034)
    lines = [line for record in caplog.records for line in logged(record)]
    assert loop_stalls(lines) == {"router.x.f (busy)": 2, "Choice.push (busy)": 1}
