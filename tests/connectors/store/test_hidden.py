"""Which share of loads' and saves' time the step thread computed for."""

import threading

import pytest
from store_rig import WAIT_S, FaultyStore, MakeEngine, prefill, scattered, view

from pdkv.connectors.store.hidden import ComputeClock, HiddenTime


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_what_is_computed_while_a_job_runs_is_hidden_and_its_waits_are_not() -> None:
    now = Now()
    clock = ComputeClock(now)
    hidden = HiddenTime(clock)
    clock.start()
    now.time += 5
    with hidden.measure("load"):
        now.time += 1  # hidden
        clock.stop()
        now.time += 2  # the step waits, or there is none
        clock.start()
        now.time += 3  # hidden
    clock.stop()
    with hidden.measure("save"):
        now.time += 10
        clock.start()
        now.time += 1  # hidden
    stats = hidden.stats
    assert (stats.load_seconds, stats.hidden_load_seconds) == (6, 4)
    assert (stats.save_seconds, stats.hidden_save_seconds) == (11, 1)

    def fail() -> None:
        with hidden.measure("save"):
            now.time += 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hidden.stats.save_seconds == 13


def test_a_load_is_hidden_by_a_step_and_not_by_an_engine_that_is_idle(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 64)
    engine = make("o")
    shares = []
    for number, ends_first in enumerate((False, True)):
        request = view(f"u{number}", num_tokens=65, salt="0")
        engine.ask(request)
        before = engine.worker.get_stats()[""]
        store.hold("get")
        engine.start_load(request, scattered(64, 16), 64)
        store.wait_held("get")
        if ends_first:
            engine.forward()
        began = engine.worker._clock.now()
        while engine.worker._clock.now() < began + 0.02:
            pass
        store.let_go("get")
        assert not engine.wait(request.transfer_key).code
        engine.forward()
        after = engine.worker.get_stats()[""]
        seconds = after.load_seconds - before.load_seconds
        assert seconds >= 0.02
        shares.append((after.hidden_load_seconds - before.hidden_load_seconds) / seconds)
    assert shares[0] > 0.9
    assert shares[1] < 0.9


def test_what_a_step_waits_for_is_not_hidden(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p", layer_groups="3"), 64)
    engine = make("o", load="layerwise", layer_groups="3")
    request = view("u", num_tokens=65, salt="0")
    assert engine.ask(request) == 64
    store.hold("get")
    clock = engine.worker._clock

    def let_go() -> None:
        deadline = clock.now() + WAIT_S
        while clock.is_running and clock.now() < deadline:
            pass
        began = clock.now()
        while clock.now() < began + 0.05:
            pass
        store.let_go("get")

    engine.start_load(request, scattered(64, 16), 64, layerwise=True)
    store.wait_held("get")
    other = threading.Thread(target=let_go)
    other.start()
    engine.forward()
    other.join(WAIT_S)
    assert not engine.wait(request.transfer_key).code
    stats = engine.worker.get_stats()[""]
    assert stats.load_seconds >= 0.05
    assert stats.load_seconds - stats.hidden_load_seconds >= 0.05
    assert not clock.is_running
