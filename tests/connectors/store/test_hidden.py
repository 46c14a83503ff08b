"""Which share of loads' and saves' time the step thread computed for."""

import threading

import pytest
from store_rig import WAIT_S, FaultyStore, MakeEngine, prefill, scattered, view
from traffic import wait_until_true

from pdkv.connectors.store.hidden import ComputeClock, HiddenTime
from pdkv.testing import VirtualClock


def test_what_is_computed_while_a_job_runs_is_hidden_and_its_waits_are_not() -> None:
    clock = VirtualClock()
    computing = ComputeClock(clock.now)
    hidden = HiddenTime(computing)
    computing.start()
    clock.advance(5)
    with hidden.measure("load"):
        clock.advance(1)  # hidden
        computing.stop()
        clock.advance(2)  # the step waits, or there is none
        computing.start()
        clock.advance(3)  # hidden
    computing.stop()
    with hidden.measure("save"):
        clock.advance(10)
        computing.start()
        clock.advance(1)  # hidden
    stats = hidden.stats
    assert (stats.load_seconds, stats.hidden_load_seconds) == (6, 4)
    assert (stats.save_seconds, stats.hidden_save_seconds) == (11, 1)

    def fail() -> None:
        with hidden.measure("save"):
            clock.advance(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hidden.stats.save_seconds == 13


def test_a_load_is_hidden_by_a_step_and_not_by_an_engine_that_is_idle(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 64)
    clock = VirtualClock()
    engine = make("o", clock=clock)
    shown = []
    for number, ends_first in enumerate((False, True)):
        request = view(f"u{number}", num_tokens=65, salt="0")
        engine.ask(request)
        store.hold("get")
        engine.start_load(request, scattered(64, 16), 64)
        store.wait_held("get")
        if ends_first:
            engine.forward()
        clock.advance(2)
        store.let_go("get")
        assert not engine.wait(request.transfer_key).code
        engine.forward()
        stats = engine.worker.get_stats()[""]
        shown.append((stats.load_seconds, stats.hidden_load_seconds))
    assert shown == [(2, 2), (4, 2)]


def test_what_a_step_waits_for_is_not_hidden(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p", layer_groups="3"), 64)
    clock = VirtualClock()
    engine = make("o", load="layerwise", layer_groups="3", io_threads="1", clock=clock)
    request = view("u", num_tokens=65, salt="0")
    assert engine.ask(request) == 64
    store.hold("get")

    def let_go() -> None:
        wait_until_true(lambda: not engine.worker._compute.is_running, "the step waits")
        clock.advance(5)
        store.let_go("get")

    engine.start_load(request, scattered(64, 16), 64, layerwise=True)
    store.wait_held("get")
    other = threading.Thread(target=let_go)
    other.start()
    engine.forward()
    other.join(WAIT_S)
    assert not engine.wait(request.transfer_key).code
    stats = engine.worker.get_stats()[""]
    assert (stats.load_seconds, stats.hidden_load_seconds) == (5, 0)
