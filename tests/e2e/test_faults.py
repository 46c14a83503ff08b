"""Each fault over each backend, under load and at one moment of a request or another: nothing is failed, wrong or hung.

`make faults` runs each at all its moments, with ten times as many requests and longer stops.
"""

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployments import Running, launches
from faults.cells import KINDS, TARGET, Build, Cell, Kind, cover
from faults.inject import Site
from faults.load import MAX_TOKENS, PROMPTS, load_on, right_answers
from faults.moments import admin_of, go_on, is_there, requests_of
from faults.run import run_one, site_of
from kills import FEW_TOKENS
from prometheus_client.parser import text_string_to_metric_families
from traffic import Ask, stop_process, wait_for_engines, wait_for_rest

BACKENDS = ("shared_memory", "p2p", "nixl pull", "store redis")
"""In `make test` two of them share the kinds: `test_nixl.py` has kills over pushes, `test_stopped_peers.py` stops,
`test_between_hosts.py` cuts of p2p and pulls.
"""

NUM, RATE, STOP_S = 12, 12.0, 1.5
COVER = {(cell.backend, cell.kind): cell for cell in cover(BACKENDS)}
HERE = {"shared_memory": ("kill", "refused transfer", "full pool"), "store redis": ("cut",)}
EVERY_MOMENT = {"on prefill", "in transfer", "mid-stream"}


def test_every_pair_is_covered() -> None:
    for backend in BACKENDS:
        assert {cell.place.moment for cell in COVER.values() if cell.backend == backend} == EVERY_MOMENT
    for kind in ("kill", "stop", "cut"):
        cells = [cell for cell in COVER.values() if cell.kind == kind]
        assert {cell.backend for cell in cells} == set(BACKENDS)
        assert {cell.place.moment for cell in cells} == EVERY_MOMENT


@pytest.fixture(scope="module", params=[b if b in HERE else pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS])
def site(
    request: pytest.FixtureRequest, served_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A deployment over the backend: its hand-offs can be refused, and one role has small KV pools."""
    directory, backend = tmp_path_factory.mktemp("faults"), request.param
    build = Build(refusing=True, small=COVER[backend, "full pool"].place.role)
    with launches(served_model) as launch, site_of(launch, directory, backend, build, STOP_S) as site:
        site.num_long, site.refused_s = 8, 0.5
        yield site


@pytest.fixture(scope="module")
def expected(site: Site) -> list[list[int]]:
    return asyncio.run(right_answers(site.deployment))


@pytest.mark.parametrize(
    ("site", "kind"),
    [
        pytest.param(backend, kind, marks=() if kind in HERE.get(backend, ()) else pytest.mark.slow)
        for backend in BACKENDS
        for kind in list(KINDS)[:-1]
    ],
    indirect=["site"],
)
def test_no_client_notices(site: Site, expected: list[list[int]], kind: Kind, request: pytest.FixtureRequest) -> None:
    cell = COVER.get((request.node.callspec.params["site"], kind))
    if cell is None:
        pytest.skip("KV travels on no connection that could be cut")
    outcome = run_one(site, cell, expected, NUM, RATE)
    assert (outcome.failed, outcome.wrong, outcome.hung) == (0, 0, 0), outcome
    assert outcome.requests >= NUM
    if kind == "refused transfer":
        assert outcome.counters["failed loads"] > 0
    else:
        assert outcome.there > 0


def prompt_tokens(deployment: Running) -> dict[tuple[str, str], int]:
    """By engine and source, of the incarnations that are up."""
    samples = [s for f in text_string_to_metric_families(deployment.get("/metrics").text) for s in f.samples]
    return {
        (s.labels["engine"], s.labels["source"]): int(s.value)
        for s in samples
        if s.name == "pdkv_engine_prompt_tokens_total"
    }


def test_a_prompt_is_computed_once_where_decode_dies_between_hand_off_and_load(
    site: Site, expected: list[list[int]]
) -> None:
    """Another decode engine loads it, from the lease or the store."""
    deployment, number = site.deployment, len(PROMPTS) - 1
    before = prompt_tokens(deployment)
    pids = deployment.pids()
    victim, survivor = asyncio.run(kill_before_the_load(site, number, expected[number]))
    wait_for_engines(deployment, [pids[victim]])
    wait_for_rest(deployment)
    after = prompt_tokens(deployment)

    def counted(role: str, *sources: str) -> int:
        engines = (survivor,) if role == "decode" else ("prefill-0", "prefill-1")  # the victim computed nothing
        return sum(after[engine, source] - before[engine, source] for engine in engines for source in sources)

    num_tokens = len(PROMPTS[number])
    assert counted("prefill", "computed", "recomputed", "local_hit", "remote", "store") == num_tokens
    assert counted("prefill", "computed") == num_tokens
    assert counted("decode", "computed", "recomputed") == 0
    assert counted("decode", "remote", "store") == num_tokens
    assert victim != survivor


async def kill_before_the_load(site: Site, number: int, expected: list[int]) -> tuple[str, str]:
    """Kill the decode engine that has a prompt's hand-off and has not loaded it. Returns it, and the other.

    Prefill is stopped until it has the prompt and, for a push, the ticket; decode then, until one of them is killed.
    """
    pids = site.deployment.pids()
    decodes = {name: pid for name, pid in pids.items() if name.startswith("decode")}
    prefills = [pid for name, pid in pids.items() if name not in decodes]
    label = f"handed-off-{uuid.uuid4().hex}"
    async with load_on(site.deployment, label, 1.0) as load, admin_of(site.deployment) as admin:
        try:
            for pid in prefills:
                stop_process(pid)
            load.begin(Ask(PROMPTS[number], MAX_TOKENS, stream=True, fields=FEW_TOKENS), number)
            await state_of(admin, label, lambda request: request["prefill"]["state"] == "running")
            for pid in decodes.values():
                stop_process(pid)
            go_on(prefills)
            victim = (await state_of(admin, label, is_handed_off))["decode"]["engine"]
            os.kill(decodes[victim], signal.SIGKILL)
        finally:
            go_on([*prefills, *decodes.values()])
        await load.finish()
    (answer,) = [sent.answer for sent in load.sent]
    assert answer is not None
    assert answer.token_ids == expected, answer
    (survivor,) = decodes.keys() - {victim}
    return victim, survivor


def is_handed_off(request: dict[str, Any]) -> bool:
    """Whether decode is to load it and has not."""
    return any(is_there(request, Cell("", "kill", TARGET, number)) for number in (0, 1))


async def state_of(admin: httpx.AsyncClient, label: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Of the request with that label, once it is as wanted; the engines that could say so are stopped."""
    async with asyncio.timeout(30):
        while True:
            for request in await requests_of(admin, label):
                if wanted(request):
                    return request
            await asyncio.sleep(0.005)
