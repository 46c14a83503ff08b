"""An engine and its connector's scheduler side: what is told, what is held, and who is woken."""

from state_machine.standin_store import STAND_IN_STORE

from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import Abort, Finished

PROMPT = list(range(100, 122))  # 6 blocks of 4


def test_blocks_that_the_connector_had_to_hear_of_wake_who_waits_for_them() -> None:
    core = make_core(connector=STAND_IN_STORE, options={"fabric": "external-kept", "mode": "store"}, num_blocks=8)
    core.handle("r", submit(PROMPT, request_id="a", max_tokens=1), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="b", max_tokens=1), 0.0)
    finished = [m.request_id for m in run(core) if isinstance(m, Finished)]
    assert finished == ["a", "b"]
    assert at_rest(core)


def test_the_end_of_a_step_that_lagged_wakes_who_waits_for_its_blocks() -> None:
    core = make_core(num_blocks=8)
    core.handle("r", submit(PROMPT, request_id="a"), 0.0)
    first = core.begin_step(0.0)
    core.handle("r", Abort("a", 0), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="b", max_tokens=2), 0.0)
    second = core.begin_step(0.0)  # a's blocks are still in use
    core.finish_step(first, 0.0)
    core.finish_step(second, 0.0)
    assert output_of(run(core), "b") == expected_tokens([2 * t for t in PROMPT], 2)


def test_without_a_connector_nothing_piles_up_for_one() -> None:
    core = make_core(num_blocks=12)
    for i in range(5):
        core.handle("r", submit(PROMPT, request_id=str(i)), 0.0)
        core.step(0.0)
        core.handle("r", Abort(str(i), 0), 0.0)
        run(core)
    for i in range(4):  # they preempt each other
        core.handle("r", submit([200 + 10 * i + j for j in range(7)], request_id=f"p{i}", max_tokens=12), 0.0)
    assert len(of_type(run(core, max_steps=1000), Finished)) == 4
    assert core.scheduler.num_preemptions
    assert not core.external._news


def test_a_failed_load_spoils_nothing_that_another_request_saves() -> None:
    """F9, F10: two requests compute the same blocks in one step, one of them behind a load that fails."""
    prompt = list(range(100, 133))  # 8 blocks of 4, and a token
    options = {"fabric": "external-spoilt", "mode": "store", "load": "layerwise"}
    here = make_core(
        name="here", connector=STAND_IN_STORE, options=options, limits=SchedulerLimits(8, 16), num_blocks=32
    )
    there = make_core(name="there", connector=STAND_IN_STORE, options=options, num_blocks=32)
    here.handle("r", submit(prompt, request_id="sound", max_tokens=1), 0.0)
    here.step(0.0)  # 4 blocks
    here.scheduler.limits = SchedulerLimits(8, 64, 16)
    there.handle("r", submit(prompt[:25], max_tokens=1), 0.0)
    run(there)  # 6 blocks are in the store
    here.handle("r", submit(prompt, request_id="spoilt", max_tokens=1), 0.0)
    plan = here.scheduler.schedule(0.0)
    assert [(share.key[0], share.num_computed) for share in plan.scheduled] == [("sound", 16), ("spoilt", 24)]
    store = there.executor.worker.store  # type: ignore[attr-defined]
    for name in list(store._blocks):
        store.discard(name)
    here.finish_step(here.executor.execute(plan), 0.0)
    messages = run(here)
    assert output_of(messages, "sound") == output_of(messages, "spoilt") == expected_tokens(prompt, 1)
    reader = make_core(name="reader", connector=STAND_IN_STORE, options=options, num_blocks=32)
    reader.handle("r", submit(prompt, max_tokens=3), 0.0)
    messages = run(reader)
    assert [m.sources.store for m in messages if isinstance(m, Finished)] == [32]
    assert output_of(messages, "a") == expected_tokens(prompt, 3)
