"""Another deployment that takes requests when this one cannot: by rule, by hand, and when it is no good itself."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from dispatch_rig import InProcessBackend, System, collect
from foreign_server import HEAD, Server, event
from scripted_engine import ScriptedEngine, expected_output, make_card, make_request

from pdkv.config import DEFAULT_MODEL, AdmissionConfig
from pdkv.errors import ConfigError, EngineUnavailable, InvalidRequest, TooManyRequests
from pdkv.router.admission.admission_queue import Admission, Visit
from pdkv.router.admission.desk import Asked, Wishes
from pdkv.router.admission.tenants import Grant, Tenant
from pdkv.router.engines import foreign
from pdkv.router.engines.address import check_engine_name
from pdkv.router.engines.fleet import FALLBACK
from pdkv.router.engines.foreign import ForeignEngine, Terms
from pdkv.router.engines.health import SILENT_TICKS
from pdkv.router.generations.fallback import BACK_S, FIRST_REQUESTS, MORE_REQUESTS
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages.cache_pages import _choose
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.messages import Beat

event_loop = uvloop.new_event_loop  # the router's kind

WAIT_S = 2.0
TERMS = Terms(
    tokenizer=Tokenizer.from_dir(DEFAULT_MODEL), vocab_size=100, num_positions=128, max_model_len=None, names=("m",),
    max_num_seqs=64, role=FALLBACK, num_hops=1,
)  # fmt: skip
ASKED = Asked(priority=0, wishes=Wishes(), cache_salt="", prompt_lengths=[20], n=1, max_tokens=5, stream=False)


class Rig(System):
    """One engine of its own with a queue, another deployment, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(0, 1, clock=lambda: self.now, fallback_wait_s=WAIT_S)
        config = AdmissionConfig(max_queued_requests=20)
        self.admission = Admission(self.dispatcher, config, clock=lambda: self.now)
        self.other = InProcessBackend(ScriptedEngine(FALLBACK, "pull"))
        self.dispatcher.add_backend(self.other, FALLBACK)
        self.own = self.backends["any-0"]

    def start(self) -> None:
        super().start()
        self.other.start(make_card(FALLBACK, FALLBACK, backend="vllm"))

    def tenant(self, name: str = "a", *, fallback: bool = True) -> Tenant:
        return Tenant(name, Grant(fallback=fallback), lambda: self.now)

    def ask(self, tenant: Tenant | None = None, number: int = 20, num_hops: int = 0) -> "asyncio.Task[list[int]]":
        """The tokens of one request."""
        visit = self.admission.arrive(tenant or self.tenant())
        asked = msgspec.structs.replace(ASKED, prompt_lengths=[number], wishes=Wishes(num_hops=num_hops))
        terms = visit.judge(asked)
        return asyncio.ensure_future(self._serve(visit, make_request(number, may_leave=terms.may_leave)))

    async def _serve(self, visit: Visit, request: GenerateRequest) -> list[int]:
        began: list[Generation] = []
        with visit:
            await visit.start(request, began.append)
            return (await collect(began[0]))[0]

    @property
    def sent(self) -> dict[str, int]:
        return dict(self.dispatcher.fallback.sent)


@contextlib.asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    system = Rig()
    system.start()
    try:
        yield system
        system.check_rest()
    finally:
        system.dispatcher.close()


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_would_wait_too_long_leaves_if_its_key_allows_it_until_the_queue_is_short_for_a_while() -> None:
    async with rig() as system:
        system.own.held = True
        first = [system.ask(number=20 + i) for i in range(18)]  # 16 begin, 2 wait
        await turns()
        assert system.sent == {}
        system.now += 1.5 * WAIT_S  # nothing has begun meanwhile
        leaves, stays = system.ask(number=50), system.ask(system.tenant("b", fallback=False), 51)
        assert await leaves == expected_output(make_request(50))
        await turns()
        assert (system.sent, stays.done()) == ({"overflow": 1}, False)
        system.own.release()
        await asyncio.gather(*first, stays)
        assert await system.ask(number=52) == expected_output(make_request(52))
        assert system.sent == {"overflow": 2}  # the queue is empty, but not for long enough
        system.now += BACK_S
        await system.ask(number=53)
        assert (system.sent, system.dispatcher.fallback.cause) == ({"overflow": 2}, "")


async def test_a_full_queue_refuses_only_what_may_not_leave() -> None:
    async with rig() as system:
        system.own.held = True
        waiting = []
        for num in (16, 19):  # some begin, others wait
            waiting += [system.ask(system.tenant(f"t{num}-{i}", fallback=False), 20 + i) for i in range(num)]
            await turns()
        with pytest.raises(TooManyRequests):
            system.ask(system.tenant("b", fallback=False))
        many = msgspec.structs.replace(ASKED, prompt_lengths=[20] * (FIRST_REQUESTS + 1))
        with system.admission.arrive(system.tenant("c")) as visit, pytest.raises(TooManyRequests):
            visit.judge(many)  # what it does not take would wait here, beyond the bound
        assert await system.ask(number=90) == expected_output(make_request(90))
        assert system.sent == {"overflow": 1}
        system.own.release()
        await asyncio.gather(*waiting)


async def test_without_an_engine_streams_and_what_waits_go_on_elsewhere_and_come_back_after_a_while() -> None:
    async with rig() as system:
        system.own.held = True
        running = [system.ask(number=20 + i) for i in range(17)]  # the last one waits
        stays = system.ask(system.tenant("b", fallback=False), 60)
        await turns()
        system.own.die()
        for _ in range(80):
            system.dispatcher.look_after_engines()  # the rest leaves as the other one proves to be well
            await turns()
        for number, task in enumerate(running):
            assert await task == expected_output(make_request(20 + number))
        assert (system.sent["disaster"], stays.done(), system.dispatcher.fault) == (17, False, "")
        system.own.held = False
        system.own.start(system.card("any-0", epoch="e1"))
        assert await stays == expected_output(make_request(60))
        await system.ask(number=70)
        assert system.sent["disaster"] == 18
        system.now += BACK_S
        await system.ask(number=71)
        assert system.sent["disaster"] == 18


async def test_what_a_silent_engine_runs_goes_on_elsewhere_if_its_key_allows_it() -> None:
    async with rig() as system:
        system.own.start(system.card("any-0", epoch="e1", beats="ipc:///beats"))
        system.own.held = True
        leaves, stays = system.ask(number=30), system.ask(system.tenant("b", fallback=False), 31)
        await turns()
        for _ in range(SILENT_TICKS):
            system.other.say(Beat("e0", 0.0))
            system.dispatcher.look_after_engines()
            await turns()
        assert await asyncio.wait_for(leaves, 5.0) == expected_output(make_request(30))
        assert (system.sent, stays.done()) == ({"disaster": 1}, False)
        system.own.release()
        assert await stays == expected_output(make_request(31))


async def test_by_hand_a_share_leaves_and_a_router_that_begins_again_knows_it(tmp_path: Path) -> None:
    async with rig() as system:
        marks = tmp_path / "marks"
        ops = Operations(system.dispatcher, lambda name, endpoint: system.other, marks)
        assert ops.set_fallback(None, 0.25)["share"] == 0.25
        for number in range(8):
            await system.ask(number=20 + number)
        assert system.sent == {"hand": 2}
        assert ops.set_fallback("off", 1.0)["mode"] == "off"
        await system.ask()
        assert system.sent == {"hand": 2}
    async with rig() as system:
        Operations(system.dispatcher, lambda name, endpoint: system.other, marks)
        there = system.dispatcher.topology()["fallback"]
        assert (there["mode"], there["share"]) == ("off", 1.0)


def test_without_another_deployment_there_is_nothing_to_set() -> None:
    system = System(0, 1)
    with pytest.raises(InvalidRequest, match="has no other deployment"):
        Operations(system.dispatcher, lambda name, endpoint: system.backends["any-0"]).set_fallback("off", None)


def test_no_engine_takes_its_name() -> None:
    with pytest.raises(ConfigError, match="another deployment's name"):
        check_engine_name("fallback")


async def test_before_it_was_ever_there_no_salt_leaves_and_its_role_is_what_it_is() -> None:
    system = System(0, 1)
    backend = ForeignEngine(FALLBACK, "openai+http://127.0.0.1:1", TERMS)
    system.dispatcher.add_backend(backend, FALLBACK, endpoint="openai+http://127.0.0.1:1")
    admission = Admission(system.dispatcher, AdmissionConfig())
    tenant = Tenant("a", Grant(fallback=True), lambda: 0.0)
    for salt in ("", "secret"):
        with admission.arrive(tenant) as visit:
            terms = visit.judge(msgspec.structs.replace(ASKED, cache_salt=salt))
        assert terms.may_leave == (not salt)
    ops = Operations(system.dispatcher, lambda name, endpoint: backend)
    with pytest.raises(InvalidRequest, match="fallback is a openai server"):
        ops.set_role(FALLBACK, "any")


async def test_it_is_no_engine_of_this_launch(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as system:
        system.other.die()
        system.other.start(make_card(FALLBACK, FALLBACK, epoch="e1", backend="vllm", max_model_len=8))
        assert "so the service does" not in caplog.text
        assert [engine.name for engine in _choose(system.dispatcher.fleet, None)] == ["any-0"]


async def test_what_another_deployment_sent_goes_no_further() -> None:
    async with rig() as system:
        system.dispatcher.fallback.wanted = 1.0
        assert await system.ask(num_hops=1) == expected_output(make_request(20))
        assert system.sent == {}
        system.dispatcher.fallback.cause = "overflow"
        with pytest.raises(TooManyRequests):
            system.ask(num_hops=1)
        system.own.die()
        with pytest.raises(EngineUnavailable, match="another deployment's fallback"):
            system.ask(num_hops=1)
        system.own.start(system.card("any-0", epoch="e1"))


@pytest.mark.parametrize("fault", ["hangs", "is busy", "fails", "lies", "ends early"])
async def test_a_deployment_that_is_no_good_gets_few_requests_and_costs_none(fault: str, monkeypatch: Any) -> None:
    """It is well by its pages, so that only its answers tell."""
    monkeypatch.setattr(foreign, "HEALTH_S", 60.0)
    server = Server()

    async def answer(writer: asyncio.StreamWriter) -> None:
        match fault:
            case "hangs":
                await asyncio.Event().wait()
            case "is busy":
                writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            case "fails":
                writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            case "lies":
                writer.write(HEAD + event([5000], "stop"))
            case "ends early":
                writer.write(HEAD + event([3]))

    monkeypatch.setattr(server, "answer", answer)
    system = System(0, 1, fallback_wait_s=WAIT_S)
    endpoint = f"vllm+http://127.0.0.1:{await server.start()}"
    terms = dataclasses.replace(TERMS, first_token_s=0.2 if fault == "hangs" else 20.0)
    system.dispatcher.add_backend(ForeignEngine(FALLBACK, endpoint, terms), FALLBACK)
    system.start()
    try:
        fallback = system.dispatcher.fallback
        while not fallback.is_open(system.dispatcher._clock()):
            await asyncio.sleep(0.01)
        fallback.wanted = 1.0
        assert fallback.limit == FIRST_REQUESTS

        async def ask(number: int) -> list[int]:
            request = make_request(number, may_leave=True)
            leaves = fallback.reason(request, system.dispatcher._clock())
            return (await collect(system.dispatcher.start(request, leaves)))[0]

        answers = await asyncio.gather(*(ask(20 + i) for i in range(12)))
        expected = [expected_output(make_request(20 + i)) for i in range(12)]
        if fault == "ends early":  # what came of it counts
            answers, expected = [ids[1:] for ids in answers], [ids[1:] for ids in expected]
        assert answers == expected
        assert all(b"x-pdkv-hops: 1" in head for head in server.heads)
        assert fallback.sent["hand"] == FIRST_REQUESTS >= len(server.bodies)
        assert not fallback.is_open(system.dispatcher._clock())
        system.check_rest()
    finally:
        system.dispatcher.close()
        await server.die()


async def test_it_gets_more_with_each_success_and_nothing_that_it_lacks() -> None:
    async with rig() as system:
        fallback = system.dispatcher.fallback
        fallback.wanted = 1.0
        await system.ask()
        assert fallback.limit == min(FIRST_REQUESTS + MORE_REQUESTS, 8)
        request = make_request(may_leave=True)
        assert fallback.reason(request, 100.0)
        assert not fallback.reason(make_request(), 100.0)
        assert not fallback.reason(make_request(600, may_leave=True), 100.0)  # longer than it takes
        params = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=1)
        assert not fallback.fits(_with(params))
        params = SamplingParams(max_tokens=5, seed=1, presence_penalty=1.0)
        assert (fallback.fits(_with(params)), fallback.fits(_with(params), 1)) == (True, False)


def _with(params: SamplingParams) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=[1], params=params, timeout_s=60.0, may_leave=True)
