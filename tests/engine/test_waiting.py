"""What a step and a look at deadlines cost is independent of how many requests wait; and the order in which they do."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from pdkv.config import HandoffConfig
from pdkv.connectors.base import ASK_AGAIN
from pdkv.engine.core import EXPIRY_INTERVAL_S, EngineCore
from pdkv.engine.outside.external import ExternalKV
from pdkv.engine.queues import Waiting
from pdkv.engine.request import Request
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, run, submit
from pdkv.wire.messages import Abort, KVTicket


class Visits:
    """How often anything of a request is read, once its class is `watch`ed."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in Request.__slots__:
            slot = Request.__dict__[name]

            def read(request: Request, slot: Any = slot) -> Any:
                self.count += 1
                return slot.__get__(request)

            patch.setattr(Request, name, property(read, slot.__set__))

    def of(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


def full(_: pytest.MonkeyPatch) -> EngineCore:
    """All places are taken."""
    core = make_core(num_blocks=64, limits=SchedulerLimits(4, 64))
    for i in range(4):
        core.handle("r", submit([1, 2], request_id=f"running-{i}", max_tokens=200), 0.0)
    core.step(0.0)
    return core


def without_blocks(_: pytest.MonkeyPatch) -> EngineCore:
    """There are places, and no blocks."""
    core = make_core(num_blocks=16, limits=SchedulerLimits(4, 64))
    core.handle("r", submit(list(range(100, 156)), request_id="running", max_tokens=8), 0.0)
    core.step(0.0)
    return core


def capped(_: pytest.MonkeyPatch) -> EngineCore:
    """There are places and blocks, and no room for further leases."""
    options = {"fabric": "capped", "mode": "pull"}
    handoff = HandoffConfig(connector="memory", max_leased_fraction=0.1)
    core = make_core(num_blocks=32, limits=SchedulerLimits(4, 64), options=options, handoff=handoff)
    core.handle("r", submit(list(range(100, 120)), request_id="leased", kv="handoff", until="first_token"), 0.0)
    run(core)
    return core


def without_answers(patch: pytest.MonkeyPatch) -> EngineCore:
    """The connector owes an answer to each."""
    core = make_core(num_blocks=32, limits=SchedulerLimits(4, 64), options={"fabric": "asking", "mode": "pull"})
    patch.setattr(ExternalKV, "match", lambda *_: ASK_AGAIN)
    return core


@pytest.mark.parametrize("state", [full, without_blocks, capped, without_answers])
def test_steps_and_deadlines_cost_the_same_however_many_wait(
    state: Callable[[pytest.MonkeyPatch], EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"kv": "handoff", "until": "first_token"} if state is capped else {}
    visits, found = Visits(), []
    visits.watch(monkeypatch)
    for num_waiting in (200, 2000):
        with monkeypatch.context() as patch:
            core = state(patch)
            for i in range(num_waiting):
                core.handle(
                    "r", submit([5 + i % 400, *range(9)], request_id=f"waiting-{i}", timeout_s=9.0, **kind), 0.0
                )
            now = 0.5
            core.expire(now)
            steps = [visits.of(lambda now=now, core=core: core.step(now)) for _ in range(3)]
            assert len(core.scheduler.waiting) == num_waiting
            tick = visits.of(lambda now=now, core=core: core.expire(now + EXPIRY_INTERVAL_S))
            found.append((steps[1:], tick, visits.of(core.next_deadline)))
            assert core.next_deadline() is not None
            core.expire(10.0)  # past the deadline of all
            assert not core.scheduler.waiting
    assert found[0] == found[1]


def test_deadlines_of_requests_that_are_over_are_not_kept() -> None:
    core = make_core()
    for i in range(1000):
        core.handle("r", submit([5], request_id=str(i), timeout_s=600.0), 0.0)
        core.handle("r", Abort(str(i), 0), 0.0)
    assert len(core._book._deadlines) < 200
    assert core.next_deadline() is None
    assert at_rest(core)


def test_one_that_is_not_answered_in_time_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    core = without_answers(monkeypatch)
    timeout_s = core.scheduler.limits.kv_load_timeout_s
    for i, now in enumerate((0.0, 1.0)):
        core.handle("r", submit([7 + i] * 9, request_id=str(i), timeout_s=1e5), now)
        core.step(now)
    assert core.next_deadline() == timeout_s
    core.expire(timeout_s)
    assert [request.load_failed for request in core.scheduler.waiting] == [True, False]
    core.handle("r", Abort("1", 0), timeout_s)
    assert core.next_deadline() == 1e5, "who is gone asks no more"


def request_of(name: str, **fields: Any) -> Request:
    return Request(submit([5], request_id=name, **fields), "r", b"", 0.0)


def names(waiting: "Waiting | list[Request]") -> list[str]:
    return [request.submit.request_id for request in waiting]


def test_the_queue_is_ordered_by_priority_then_by_who_was_sent_back_then_by_arrival() -> None:
    waiting = Waiting()
    requests = {
        name: request_of(name, priority=priority, kv=kv)
        for name, priority, kv in [("a", 0, "local"), ("b", 0, "handoff"), ("c", -1, "local"), ("d", 0, "handoff")]
    }
    for request in requests.values():
        waiting.add(request)
    waiting.add(request_of("e"), before_equals=True)
    waiting.add(request_of("f", kv="handoff"), before_equals=True)
    assert names(waiting) == ["c", "f", "e", "a", "b", "d"]
    assert names(waiting.first(2)) == ["c", "f"]
    assert names(waiting.first(9, ["handoff"])) == ["f", "b", "d"]
    requests["d"].ticket = b"t"
    waiting.got_ticket(requests["d"])
    assert names(waiting) == ["c", "f", "e", "a", "b", "d"]
    assert names(waiting.first(9, ["ticket"])) == ["d"]
    for name in ("c", "b"):
        waiting.remove(requests[name])
        assert requests[name] not in waiting
    waiting.got_ticket(requests["b"])
    assert names(waiting) == ["f", "e", "a", "d"]
    assert len(waiting) == 4


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_is_a_sorted_list(seed: int) -> None:
    """Random arrivals, returns and departures."""
    rng = random.Random(seed)
    waiting, expected = Waiting(), []
    for i in range(200):
        if expected and rng.random() < 0.4:
            waiting.remove(expected.pop(rng.randrange(len(expected)))[-1])
        else:
            before_equals = rng.random() < 0.3
            request = request_of(str(i), priority=rng.randrange(3), kv=rng.choice(["local", "handoff"]))
            waiting.add(request, before_equals=before_equals)
            expected.append((request.submit.priority, -i - 1 if before_equals else i + 1, request))
        expected.sort(key=lambda entry: entry[:2])
        assert list(waiting) == [entry[-1] for entry in expected]
        assert names(waiting.first(3)) == names([entry[-1] for entry in expected[:3]])


def test_a_request_whose_ticket_comes_while_it_waits_passes_the_cap() -> None:
    options = {"fabric": "late-ticket", "mode": "push"}
    handoff = HandoffConfig(connector="memory", max_leased_fraction=0.1)
    core = make_core(num_blocks=32, limits=SchedulerLimits(4, 64), options=options, handoff=handoff)
    for name in ("first", "second", "third"):
        core.handle("r", submit(list(range(100, 120)), request_id=name, kv="handoff", until="first_token"), 0.0)
    core.step(0.0)
    assert names(core.scheduler.waiting) == ["second", "third"]
    core.handle("r", KVTicket("third", 0, b"", 1), 0.0)
    assert names(core.scheduler.waiting.first(9, ["ticket"])) == ["third"]
