"""Waiting requests' values are near before they are admitted, and stay there; what that may cost, and when it ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rig import Engine, FaultyStore, MakeEngine, prefill, scattered, view

from pdkv.connectors.base import RequestView, TransferKey
from pdkv.errors import StoreUnavailable, TransferCancelled
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.tiers import TieredStore

VALUES = 2  # of 64 tokens


@pytest.fixture
def host(tmp_path: Path) -> HostStore:
    return HostStore(tmp_path / "host", StoreOptions(capacity=2 << 20))


@pytest.fixture
def engine(host: HostStore, store: FaultyStore) -> Iterator[Engine]:
    """Its lower tier is what others have written to."""
    tiers = TieredStore([host, store], retry_after_s=1e-9)
    engine = Engine(tiers, "o")
    yield engine
    engine.close()


def waiting(number: int) -> RequestView:
    return view(f"u{number}", num_tokens=VALUES * 64 + 1, salt=str(number))


def fill_lower_tier(make: MakeEngine, *numbers: int) -> None:
    source = make("p")
    for number in numbers:
        prefill(source, VALUES * 64, transfer_id=f"t{number}", seed=number)


def step_until_ordered(engine: Engine, *requests: RequestView) -> list[TransferKey]:
    """Steps with this queue until what it waits for is ordered; the orders' keys."""
    keys = [request.block_keys for request in requests]
    ordered: list[TransferKey] = []
    while len(ordered) < len(requests):
        meta = engine.step(waiting_keys=keys)
        ordered += [ahead.key for ahead in meta.ahead]
        if len(ordered) < len(requests):
            engine.woken.acquire(timeout=0.01)  # look-ups ahead wake nobody
    return ordered


def near(host: HostStore, engine: Engine, request: RequestView) -> bool:
    values = engine.scheduler._cut.whole_values(request.block_keys, 0, VALUES * 64)
    keys = [value.key + suffix for value in values for suffix in engine.scheduler._cut.suffixes]
    return all(host.contains(keys))


def test_a_waiting_requests_values_are_loaded_from_host_memory(
    host: HostStore, store: FaultyStore, engine: Engine, make: MakeEngine
) -> None:
    fill_lower_tier(make, 0)
    request = waiting(0)
    assert not near(host, engine, request)
    [key] = step_until_ordered(engine, request)
    assert not engine.wait(key).code
    assert near(host, engine, request)
    meta = engine.step(waiting_keys=[request.block_keys])
    assert (meta.ahead, meta.passed) == ([], [])  # once
    num_read = store.count("get")
    assert engine.ask(request) == VALUES * 64
    assert not engine.load(request, scattered(VALUES * 64, 16), VALUES * 64).code
    assert store.count("get") == num_read
    stats = engine.worker.get_stats()
    assert stats["0-host"].tier_hits == VALUES
    assert (stats[""].saves, stats[""].failed_saves, stats[""].loads) == (0, 0, 1)


def test_damage_that_looking_ahead_finds_is_counted(
    host: HostStore, store: FaultyStore, engine: Engine, make: MakeEngine
) -> None:
    fill_lower_tier(make, 0, 1)
    request = waiting(0)
    first = engine.scheduler._cut.whole_values(request.block_keys, 0, 64)[0].key + engine.scheduler._cut.suffixes[0]
    store.inner._shelf._values[first][100] ^= 1
    [key] = step_until_ordered(engine, request)
    assert engine.wait(key).num_damaged == 1
    assert engine.worker.get_stats()[""].damaged_values == 1
    assert not store.inner.contains([first])[0], "the next save puts a sound one in its place"
    [key] = step_until_ordered(engine, waiting(1))
    assert engine.wait(key).num_damaged == 0


def test_it_is_spared_while_it_waits_and_no_longer(host: HostStore, engine: Engine, make: MakeEngine) -> None:
    fill_lower_tier(make, 0)
    request = waiting(0)
    [key] = step_until_ordered(engine, request)
    engine.wait(key)
    fill_host(host, "a")
    assert near(host, engine, request)
    meta = engine.step()
    assert [passed.key for passed in meta.passed] == [key]
    engine.wait(key._replace(attempt=1))
    fill_host(host, "b")
    assert not near(host, engine, request)


def test_what_two_wait_for_is_fetched_once_and_spared_for_both(
    host: HostStore, store: FaultyStore, engine: Engine, make: MakeEngine
) -> None:
    fill_lower_tier(make, 0)
    first, second = waiting(0), view("v", num_tokens=VALUES * 64 + 17, salt="0")
    [key] = step_until_ordered(engine, first)
    engine.wait(key)
    engine.step(waiting_keys=[first.block_keys, second.block_keys])
    meta = engine.step(waiting_keys=[second.block_keys])
    assert [(passed.key, passed.values) for passed in meta.passed] == [(key, [])]
    fill_host(host, "a")
    assert near(host, engine, second)


def test_the_window_is_bounded_by_host_memory_and_goes_on_with_the_queue(
    host: HostStore, engine: Engine, make: MakeEngine
) -> None:
    look_ahead = engine.scheduler._look_ahead
    assert look_ahead is not None
    assert look_ahead._max_tokens == host.count_held().capacity // 2 // engine.layout.token_bytes
    look_ahead._max_tokens = 3 * VALUES * 64 - 1  # two requests
    fill_lower_tier(make, 0, 1, 2)
    queue = [waiting(number) for number in range(3)]
    keys = step_until_ordered(engine, *queue[:2])
    for key in keys:
        engine.wait(key)
    assert engine.ask(queue[2]) == VALUES * 64  # it is not for want of an answer
    assert engine.step(waiting_keys=[r.block_keys for r in queue]).ahead == []
    [third] = step_until_ordered(engine, queue[2])  # the others were admitted
    engine.wait(third)
    assert near(host, engine, queue[2])


def test_one_larger_than_the_window_lets_others_pass_and_is_planned_once(
    host: HostStore, engine: Engine, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_lower_tier(make, 0)
    prefill(make("p"), (VALUES + 1) * 64, transfer_id="t1", seed=1)
    look_ahead = engine.scheduler._look_ahead
    assert look_ahead is not None
    look_ahead._max_tokens = VALUES * 64
    large, small = view("u1", num_tokens=(VALUES + 1) * 64 + 1, salt="1"), waiting(0)
    assert engine.ask(large) == (VALUES + 1) * 64
    assert engine.ask(small) == VALUES * 64
    queue = [large.block_keys, small.block_keys]
    [ahead] = engine.step(waiting_keys=queue).ahead
    engine.wait(ahead.key)
    assert near(host, engine, small)
    monkeypatch.setattr(engine.scheduler._cut, "values_to_load", None)
    assert not engine.step(waiting_keys=queue).ahead
    assert not engine.step(waiting_keys=queue[1:]).passed


def test_an_admitted_request_is_not_waited_for_by_what_looks_ahead(
    store: FaultyStore, engine: Engine, make: MakeEngine
) -> None:
    """Its load reads by itself; the fetch under way ends, and what has not begun does not begin."""
    fill_lower_tier(make, 0, 1)
    store.hold("get")
    first, second = step_until_ordered(engine, waiting(0), waiting(1))
    store.wait_held("get")
    engine.step()
    store.let_go("get")
    assert engine.wait(second).code == TransferCancelled.code
    assert engine.wait(first).code in ("", TransferCancelled.code)
    assert store.count("get") == VALUES
    assert engine.worker.get_stats()[""].failed_saves == 0


def test_a_lower_tier_that_fails_costs_nothing_but_the_miss(
    host: HostStore, store: FaultyStore, engine: Engine, make: MakeEngine
) -> None:
    fill_lower_tier(make, 0)
    store.failing["get"] = StoreUnavailable("refused")
    [key] = step_until_ordered(engine, waiting(0))
    assert not engine.wait(key).code
    assert not near(host, engine, waiting(0))
    assert engine.worker.get_stats()[""].failed_saves == 0


def test_what_is_stored_nowhere_is_no_order(engine: Engine) -> None:
    request = waiting(0)
    for _ in range(2):
        meta = engine.step(waiting_keys=[request.block_keys])
        assert (meta.ahead, meta.passed) == ([], [])
    assert engine.ask(request) == 0
    meta = engine.step()
    assert (meta.ahead, meta.passed) == ([], [])


def test_a_store_without_a_fast_tier_is_not_looked_ahead_in(make: MakeEngine) -> None:
    engine = make("o")
    assert engine.scheduler._look_ahead is None
    assert engine.step(waiting_keys=[waiting(0).block_keys]).ahead == []


def fill_host(host: HostStore, name: str) -> None:
    """Other values, as much as it holds."""
    assert host.own is not None
    page = memoryview(bytes(1000))
    for number in range(host.own.segment.num_pages):
        host.put([(f"{name}{number}".encode(), page)])
