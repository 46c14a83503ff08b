"""Readers of computed KV wait for the step that computes it: what they read before its end is another owner's.

Which waits each way of KV needs: test_orders.py, and p2p/test_gpus.py for pushes.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from late_step import WAIT_S, LateStep
from nixl_engines import Engine as NixlEngine
from nixl_engines import awaiting, closing
from nixl_engines import view as nixl_view
from nixl_rig import needs_nixl
from push_rig import full_kv, pushing
from push_rig import view as push_view
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from store_rig import engines, scattered
from store_rig import view as store_view

from pdkv.connectors.base import KVConnectorMetadata, ScheduledRange, SchedulerView, TransferKey
from pdkv.connectors.multi.wire import MultiMetadata
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.peer import push_worker
from pdkv.connectors.step_done import ON_HOST, StepDone, StepsDone, make_step_done
from pdkv.connectors.store.plan import StoreMetadata
from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.units import UnitPool
from pdkv.errors import TransferTimeout

POISON = -77.0


@pytest.fixture(name="late")
def late_step() -> Iterator[LateStep]:
    step = LateStep()
    yield step
    step.end()  # no thread stays behind a test that fails


def test_a_step_that_does_not_end_fails_its_saves_and_publishes_nothing(late: LateStep) -> None:
    with engines() as (store, make):
        source = make("p", transfer_timeout_s="0.05")
        source.earlier_steps = late
        outcome = source.save(store_view("t", num_tokens=65), scattered(64, 16), 64)
        assert outcome is not None
        assert outcome.code == TransferTimeout.code
        assert not store.count("put")


def test_what_a_device_computes_in_a_step_is_pushed_behind_that_step(
    late: LateStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers have not told of goes when the next step begins; its KV may come later still."""
    monkeypatch.setattr(push_worker, "make_step_done", lambda _: late)
    with pushing(P2PConnector) as (prefill, decode):
        worker = prefill.workers[0]
        kv, source, target = full_kv(40, prefill.layout, seed=1), [9, 3, 1], [0, 1, 2]
        ticket = decode.want(push_view("t", kv="await_peer", num_tokens=40), target)
        prefill.fill(source, torch.full_like(kv, POISON))
        request = push_view("t", kv="handoff", num_tokens=40, ticket=ticket)
        scheduled = [ScheduledRange(request, 0, 40, [source])]
        meta = prefill.scheduler.build_connector_meta(SchedulerView(1, scheduled, [], [], [], [], []))
        worker.start_load_kv(meta)
        worker.wait_for_save()
        prefill.step()
        late.wait_asked()
        prefill.fill(source, kv)
        late.end()
        assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
        decode.check(target, kv)


GATHERED = {"path": "ucx", "gather_below": str(1 << 30), "gather_min_pieces": "1"}


@needs_nixl
def test_a_step_that_does_not_end_holds_up_no_other_peer(late: LateStep) -> None:
    """What has to wait waits beside the thread for messages."""
    options = {"mode": "pull", **GATHERED}
    with closing() as make:
        prefill, first, second = (make(NixlEngine, name, options=options) for name in ("p", "d", "e"))
        prefill.meet(first.card, second.card)
        first.meet(prefill.card)
        second.meet(prefill.card)
        theirs, ours = list(range(0, 14, 2)), list(range(20, 27))
        prefill.fill_seeded(theirs, 100, 1)
        source = prefill.workers[0].source
        source.after = late
        first.load(awaiting(prefill.hand_off("t", theirs, 100)), ours)
        late.wait_asked()
        source.after = ON_HOST
        second.load(awaiting(prefill.hand_off("u", theirs, 100)), ours)
        assert second.ended("u").code == ""
        assert second.wrong_tokens(ours, 0, 100, 1) == []
        late.end()
        assert first.ended("t").code == ""
        assert first.wrong_tokens(ours, 0, 100, 1) == []


# A step of whoever had the blocks before may be at it still: what it writes must not lie over what is loaded.


@needs_nixl
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_load_by_nixl_comes_behind_the_step_that_used_its_blocks_last(late: LateStep, mode: str) -> None:
    with closing() as make:
        prefill, decode = (make(NixlEngine, name, options={"mode": mode}) for name in ("p", "d"))
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        theirs, ours = list(range(0, 14, 2)), list(range(20, 27))
        prefill.fill_seeded(theirs, 100, 1)
        decode.earlier_steps = late
        if mode == "pull":
            decode.load(awaiting(prefill.hand_off("t", theirs, 100)), ours)
        else:
            ticket = decode.load(nixl_view("t", kv="await_peer", num_tokens=101), ours)
            prefill.push("t", ticket, theirs, 0, 100, last=True)
        late.wait_asked()
        for pool in decode.pools:
            pool.fill_(POISON)
        late.end()
        assert decode.ended("t").code == ""
        assert decode.wrong_tokens(ours, 0, 100, 1) == []


def test_the_children_of_multi_hear_which_steps_to_wait_for() -> None:
    with engines() as (_, make):
        source = make("p")
        metas: list[KVConnectorMetadata] = []
        source.worker.start_load_kv = metas.append  # type: ignore[method-assign, assignment]

        part = msgspec.Raw(msgspec.msgpack.encode(StoreMetadata(step_id=3)))
        meta = MultiMetadata(step_id=3, parts=[part])
        meta.earlier_steps, meta.this_step = LateStep(), LateStep()
        MultiWorker([source.connectors[0].config.plan], [source.worker]).start_load_kv(meta)
        assert metas[0].earlier_steps is meta.earlier_steps
        assert metas[0].this_step is meta.this_step


@pytest.mark.parametrize("num_heads", [2, 1])
def test_a_gather_misses_each_of_its_orders(num_heads: int) -> None:
    """With the kernel that copies all heads, and with rows of some."""
    values = torch.rand(4, 2, 2, 2, 16, 4)

    def gather(recorded: RecordedStreams) -> bool:
        pool = torch.full_like(values, POISON)
        units = UnitPool(pool)
        part = units.whole._replace(head_stop=num_heads)
        out = np.zeros(2 * units.unit_bytes(part), dtype=np.uint8)
        step = make_step_done(pool.device)
        with recorded.compute.on():
            pool.copy_(values)
            step.record()
        units.gather(as_ids([3, 1]), part, out, after=step, timeout_s=WAIT_S)
        return out.tobytes() == values[[3, 1], :, :, :num_heads].contiguous().numpy().tobytes()

    check_every_call(gather, but=[("synchronize", "StreamStepDone.wait")])  # for that: see `who_gives_a_step_up`


def test_a_scatter_is_in_the_pool_when_it_returns() -> None:
    values = torch.rand(2, 2, 2, 2, 16, 4)

    def scatter(recorded: RecordedStreams) -> bool:
        pool = torch.zeros(4, 2, 2, 2, 16, 4)
        units = UnitPool(pool)
        source = values.view(-1).view(torch.uint8).numpy().copy()
        units.scatter(as_ids([3, 1]), units.whole, source)
        source[:] = 0  # the buffer is somebody else's now
        with recorded.compute.on():
            read = pool[[3, 1]]
        recorded.finish()
        return torch.equal(read, values)

    check_every_call(scatter)


def test_who_gives_a_step_up_leaves_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = use_recorded(monkeypatch)
    pool = torch.zeros(4, 2, 2, 2, 16, 4)
    units = UnitPool(pool)
    out = np.full(units.unit_bytes(units.whole), 7, dtype=np.uint8)
    step = make_step_done(pool.device)
    with recorded.compute.on():
        pool.fill_(1.0)
        step.record()
    recorded.compute.hold()
    with pytest.raises(TransferTimeout):
        units.gather(as_ids([3]), units.whole, out, after=step, timeout_s=0.01)
    recorded.compute.release()
    recorded.finish_all()
    assert (out == 7).all()


def test_a_step_that_is_not_queued_yet_cannot_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device takes the wait for an event that was never recorded as none at all."""
    recorded = use_recorded(monkeypatch)
    with pytest.raises(TransferTimeout):
        make_step_done(torch.device("cpu")).wait_on_stream(0.001)
    with pytest.raises(TransferTimeout):
        make_step_done(torch.device("cpu")).wait(0.001)
    assert recorded.calls == []


def test_a_thread_waits_until_the_event_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = use_recorded(monkeypatch)
    step = make_step_done(torch.device("cpu"))
    recorded.compute.hold()
    step.record()
    with pytest.raises(TransferTimeout):
        step.wait(0.001)
    recorded.compute.release()
    step.wait(0.001)


def test_a_plan_waits_for_the_steps_whose_outputs_it_knows_and_not_for_those_under_way() -> None:
    steps, done = StepsDone(), [StepDone() for _ in range(4)]
    assert steps.up_to(None) is ON_HOST
    for number, step in enumerate(done):
        steps.add(number, step)
    assert steps.up_to(-1) is ON_HOST
    assert steps.up_to(1) is done[1]
    assert steps.up_to(1) is done[1]
    assert steps.up_to(2) is done[2]
    assert steps.up_to(None) is done[3], "who does not know waits for all"
    steps.add(7, StepDone())  # steps without the connector's orders are not among them
    assert steps.up_to(6) is done[3]
