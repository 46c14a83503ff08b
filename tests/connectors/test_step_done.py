"""Readers of computed KV wait for the step that computes it: what they read before its end is another owner's."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from late_step import WAIT_S, LateStep
from nixl_engines import Engine as NixlEngine
from nixl_engines import awaiting, closing
from nixl_engines import view as nixl_view
from nixl_rig import needs_nixl
from push_rig import PushEngine, full_kv, make_layout
from push_rig import view as push_view
from store_rig import engines, random_kv, scattered
from store_rig import view as store_view

from pdkv.connectors.base import KVConnectorMetadata, ScheduledRange, SchedulerView
from pdkv.connectors.multi.wire import MultiMetadata
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.step_done import CudaStepDone
from pdkv.connectors.store.plan import StoreMetadata
from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.units import UnitPool
from pdkv.errors import TransferTimeout
from pdkv.kernels import kv_copy

POISON = -77.0


@pytest.fixture(name="late")
def late_step() -> Iterator[LateStep]:
    step = LateStep()
    yield step
    step.end()  # no thread stays behind a test that fails


# --- stores ---------------------------------------------------------------------------------------------------------


def test_a_store_is_given_what_the_step_computes_and_not_what_lay_there_before(late: LateStep) -> None:
    with engines() as (store, make):
        source, decode = make("p"), make("d")
        kv, blocks = random_kv(100), scattered(100, 16)
        source.fill(blocks, torch.full_like(kv, POISON))
        source.earlier_steps = late
        request = store_view("t", kv="handoff", num_tokens=101)
        source.confirm(request, blocks, 100, last=True)
        late.wait_asked()
        assert not store.count("put")
        source.fill(blocks, kv)
        late.end()
        assert not source.wait(request.transfer_key).code
        handoff = source.handoff(request, 100)
        reader = store_view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True)
        assert decode.ask(reader) == 100
        assert not decode.load(reader, blocks, 100).code
        assert torch.equal(decode.tokens(blocks, 100), kv)


def test_a_step_that_does_not_end_fails_its_saves_and_publishes_nothing(late: LateStep) -> None:
    with engines() as (store, make):
        source = make("p", transfer_timeout_s="0.05")
        source.earlier_steps = late
        outcome = source.save(store_view("t", num_tokens=65), scattered(64, 16), 64)
        assert outcome is not None
        assert outcome.code == TransferTimeout.code
        assert not store.count("put")


# --- pushes ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def p2p_pair() -> Iterator[tuple[PushEngine, PushEngine]]:
    made: list[PushEngine] = []
    try:
        made += [PushEngine(P2PConnector, name, layout=make_layout()) for name in ("p", "d")]
        prefill, decode = made
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        yield prefill, decode
    finally:
        for engine in made:
            engine.close()


def test_a_confirmed_batch_is_pushed_when_its_step_is_over(late: LateStep) -> None:
    with p2p_pair() as (prefill, decode):
        kv, source, target = full_kv(40, prefill.layout, seed=1), [9, 3, 1], [0, 1, 2]
        ticket = decode.want(push_view("t", kv="await_peer", num_tokens=40), target)
        prefill.fill(source, torch.full_like(kv, POISON))
        prefill.earlier_steps = late
        prefill.give(push_view("t", kv="handoff", num_tokens=40, ticket=ticket), source, 40)
        late.wait_asked()
        prefill.fill(source, kv)
        late.end()
        assert decode.outcome("receiving", ("t", 1)).code == ""
        decode.check(target, kv)


def test_what_a_device_computes_in_a_step_is_pushed_behind_that_step(late: LateStep) -> None:
    """There a step's batch goes when the next step begins; its KV may come later still."""
    with p2p_pair() as (prefill, decode):
        worker = prefill.workers[0]
        worker.layer_by_layer = False
        kv, source, target = full_kv(40, prefill.layout, seed=1), [9, 3, 1], [0, 1, 2]
        ticket = decode.want(push_view("t", kv="await_peer", num_tokens=40), target)
        prefill.fill(source, torch.full_like(kv, POISON))
        request = push_view("t", kv="handoff", num_tokens=40, ticket=ticket)
        scheduled = [ScheduledRange(request, 0, 40, [source])]
        meta = prefill.scheduler.build_connector_meta(SchedulerView(1, scheduled, [], [], [], [], []))
        meta.this_step = late
        worker.start_load_kv(meta)
        worker.wait_for_save()
        prefill.step()
        late.wait_asked()
        prefill.fill(source, kv)
        late.end()
        assert decode.outcome("receiving", ("t", 1)).code == ""
        decode.check(target, kv)


# --- NIXL -----------------------------------------------------------------------------------------------------------

OFFERED = {"mode": "push"}
GATHERED = {"path": "ucx", "gather_below": str(1 << 30), "gather_min_pieces": "1"}


def poison(engine: NixlEngine) -> list[torch.Tensor]:
    """What the ranks' pools hold is gone; returns it."""
    content = [rank.kv.clone() for rank in engine.ranks]
    for rank in engine.ranks:
        rank.kv.fill_(POISON)
    return content


def restore(engine: NixlEngine, content: list[torch.Tensor]) -> None:
    for rank, kv in zip(engine.ranks, content, strict=True):
        rank.kv.copy_(kv)


@needs_nixl
@pytest.mark.parametrize("options", [OFFERED, OFFERED | GATHERED])
def test_blocks_are_offered_when_their_step_is_over(late: LateStep, options: dict[str, str]) -> None:
    with closing() as make:
        prefill, decode = make(NixlEngine, "p", options=options), make(NixlEngine, "d", options=options)
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        theirs, ours = list(range(0, 14, 2)), list(range(20, 27))
        prefill.fill(theirs, 100, 1)
        content = poison(prefill)
        ticket = decode.load(nixl_view("t", kv="await_peer", num_tokens=101), ours)
        prefill.earlier_steps = late
        prefill.push("t", ticket, theirs, 0, 100, last=True)
        late.wait_asked()
        restore(prefill, content)
        late.end()
        assert decode.outcome("t").code == ""
        assert decode.wrong_tokens(ours, 0, 100, 1) == []


@needs_nixl
def test_leased_blocks_are_gathered_behind_the_last_step_that_is_queued(late: LateStep) -> None:
    options = {"mode": "pull", **GATHERED}
    with closing() as make:
        prefill, decode = make(NixlEngine, "p", options=options), make(NixlEngine, "d", options=options)
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        theirs, ours = list(range(0, 14, 2)), list(range(20, 27))
        prefill.fill(theirs, 100, 1)
        content = poison(prefill)
        worker = prefill.ranks[0].worker
        meta = prefill.scheduler.build_connector_meta(SchedulerView(1, [], [], [], [], [], []))
        meta.this_step = late
        worker.start_load_kv(meta)
        worker.wait_for_save()
        decode.load(awaiting(prefill.hand_off("t", theirs, 100)), ours)
        late.wait_asked()
        restore(prefill, content)
        late.end()
        assert decode.outcome("t").code == ""
        assert decode.wrong_tokens(ours, 0, 100, 1) == []


# --- on the way to the readers --------------------------------------------------------------------------------------


def test_the_children_of_multi_hear_which_steps_to_wait_for() -> None:
    with engines() as (_, make):
        source = make("p")
        metas: list[KVConnectorMetadata] = []
        source.worker.start_load_kv = metas.append  # type: ignore[method-assign, assignment]

        class Named:
            name = "store"
            connector = source.connectors[0]

        part = msgspec.Raw(msgspec.msgpack.encode(StoreMetadata(step_id=3)))
        meta = MultiMetadata(step_id=3, parts=[part])
        meta.earlier_steps, meta.this_step = LateStep(), LateStep()
        MultiWorker([Named()], [source.worker]).start_load_kv(meta)  # type: ignore[list-item]
        assert metas[0].earlier_steps is meta.earlier_steps
        assert metas[0].this_step is meta.this_step


# --- streams and events, written down ---------------------------------------------------------------------------------


class FakeCuda:
    """Streams and events of torch.cuda that write down what is queued where; the work itself runs at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stack = [FakeStream(self, "compute")]
        self.is_done = False
        cuda: Any = torch.cuda
        monkeypatch.setattr(cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(cuda, "Stream", lambda device: FakeStream(self, "copy"))
        monkeypatch.setattr(cuda, "current_stream", lambda: self.stack[-1])
        monkeypatch.setattr(cuda, "stream", self._stream)

    @contextlib.contextmanager
    def _stream(self, stream: "FakeStream") -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def note(self, what: str) -> None:
        self.log.append(f"{self.stack[-1].name}: {what}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self.cuda.note("synchronize")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.note("record")

    def wait(self) -> None:
        self.cuda.note("wait")

    def query(self) -> bool:
        return self.cuda.is_done


@pytest.fixture(name="cuda")
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("num_heads", [2, 1])
def test_a_gather_on_its_own_stream_is_queued_behind_the_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, num_heads: int
) -> None:
    """With the kernel that copies all heads, and with rows of some."""
    pool = torch.rand(4, 2, 2, 2, 16, 4)
    units = UnitPool(pool)
    part = units.whole._replace(head_stop=num_heads)
    out = np.zeros(2 * units.unit_bytes(part), dtype=np.uint8)
    units.flat = None  # as on a device
    read = torch.Tensor.index_select

    def noted(copies: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*args: Any) -> Any:
            cuda.note("copy")
            return copies(*args)

        return copy

    monkeypatch.setattr(torch.Tensor, "index_select", noted(read))
    monkeypatch.setattr(kv_copy, "gather_blocks", noted(kv_copy.gather_blocks))
    step = CudaStepDone()
    step.record()
    units.gather(as_ids([3, 1]), part, out, after=step, timeout_s=WAIT_S)
    assert cuda.log[:3] == ["compute: record", "copy: wait", "copy: copy"]
    assert cuda.log[-1] == "copy: synchronize"
    assert out.tobytes() == pool[[3, 1], :, :, :num_heads].contiguous().numpy().tobytes()


def test_a_step_that_is_not_queued_yet_cannot_be_waited_for_by_a_stream(cuda: FakeCuda) -> None:
    """CUDA takes the wait for an event that was never recorded as none at all."""
    with pytest.raises(TransferTimeout):
        CudaStepDone().wait_on_stream(0.001)
    with pytest.raises(TransferTimeout):
        CudaStepDone().wait(0.001)
    assert cuda.log == []


def test_a_thread_waits_until_the_event_has_come(cuda: FakeCuda) -> None:
    step = CudaStepDone()
    step.record()
    with pytest.raises(TransferTimeout):
        step.wait(0.001)
    cuda.is_done = True
    step.wait(0.001)
