"""KV on GPUs over p2p: in which order an end gathers, sends, receives and scatters, and how a group ends.

Over recorded streams with a twin of NCCL, and over Gloo, whose groups torch gives the same interface.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from digests_in_torch import use_digests_in_torch
from push_rig import PushEngine, full_kv, make_layout, pushing, view
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from torch.distributed import ProcessGroupGloo
from traffic import wait_until_true
from twin_nccl import TwinNccl, use_gpus, use_twin_nccl

from pdkv.connectors.base import ScheduledRange, SchedulerView, TransferKey
from pdkv.connectors.p2p import nccl
from pdkv.connectors.p2p import pieces as p2p_pieces
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.peer import push_worker
from pdkv.connectors.step_done import make_step_done
from pdkv.kernels import streams
from pdkv.kernels.streams import Streams

SOURCE, TARGET = [9, 3, 1], [0, 1, 2]
CPU = torch.device("cpu")
DIGESTS = [("record", "PoolDigests._device_digests"), ("synchronize", "PoolDigests._device_digests")]
"""Both ends would have the same ones of nothing: test_orders.py looks at them."""


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_digests_in_torch(monkeypatch)


def begin(prefill: PushEngine, decode: PushEngine) -> None:
    """40 tokens begin to move."""
    ticket = decode.want(view("t", kv="await_peer", num_tokens=40), TARGET)
    prefill.give(view("t", kv="handoff", num_tokens=40, ticket=ticket), SOURCE, 40)


def blocks_of(engine: PushEngine, kv: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """What a pool holds where the engine has such KV in these blocks."""
    before = engine.pools[0].clone()
    engine.fill(block_ids, kv)
    filled = engine.pools[0].clone()
    engine.pools[0].copy_(before)
    return filled


def pushes(recorded: RecordedStreams, kv_checksum: str = "on") -> bool:
    """Into blocks that a step of the receiver still writes; a step of the sender computes them, the next one others."""
    with pushing(P2PConnector, kv_checksum=kv_checksum) as (prefill, decode):
        kv = full_kv(40, prefill.layout, seed=1)
        computed = blocks_of(prefill, kv, SOURCE)
        prefill.earlier_steps, decode.earlier_steps = make_step_done(CPU), make_step_done(CPU)
        with recorded.make_stream().on():  # another process' compute
            prefill.pools[0].copy_(computed)
            prefill.earlier_steps.record()
        with recorded.compute.on():
            decode.pools[0].fill_(-77.0)
            decode.earlier_steps.record()
        begin(prefill, decode)
        ok = not decode.outcome("receiving", TransferKey("t", 1)).code
        with recorded.compute.on():
            read = decode.pools[0].clone()
        recorded.finish_all()
        decode.pools[0].copy_(read)
        found = decode.pools[0][TARGET].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:40]
        return ok and torch.equal(found, kv)


def test_each_order_of_a_piece_through_host_memory_is_missed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_pieces, "STAGED_BYTES", 1)  # a batch of each unit, all in one buffer
        check_every_call(pushes, but=DIGESTS)


def pushes_layers(recorded: RecordedStreams) -> bool:
    """A step's layers: when the device is given the last one, the others have arrived."""
    layout = make_layout(num_layers=3)
    with pushing(P2PConnector, kv_checksum="off", layout=layout) as (prefill, decode):
        kv, worker, pool = full_kv(40, layout, seed=1), prefill.workers[0], prefill.pools[0]
        computed = blocks_of(prefill, kv, SOURCE)
        ticket = decode.want(view("t", kv="await_peer", num_tokens=40), TARGET)
        scheduled = [ScheduledRange(view("t", kv="handoff", num_tokens=40, ticket=ticket), 0, 40, [SOURCE])]
        meta = prefill.scheduler.build_connector_meta(SchedulerView(1, scheduled, [], [], [], [], []))
        worker.start_load_kv(meta)
        for layer in range(layout.num_layers):
            wait_until_true(lambda left=3 - layer: worker.num_open_jobs == left, "what is computed is there")
            with recorded.compute.on():
                pool[:, layer].copy_(computed[:, layer])
                worker.save_kv_layer(layer, pool, meta)
        worker.wait_for_save()
        ok = not decode.outcome("receiving", TransferKey("t", 1)).code
        with recorded.compute.on():
            read = decode.pools[0].clone()
        recorded.finish_all()
        return ok and torch.equal(read[TARGET].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:40], kv)


def test_a_layer_is_pushed_behind_its_own_event_before_the_last_one_is_computed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push_worker, "MIN_GROUP_BYTES", 1)
        check_every_call(pushes_layers)


@contextlib.contextmanager
def over_nccl(recorded: RecordedStreams) -> Iterator[pytest.MonkeyPatch]:
    """Between two GPUs; messages of a unit each, two at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_pieces, "STAGED_BYTES", 1)
        patch.setattr(nccl, "MAX_POSTED", 2)
        use_gpus(patch)
        use_twin_nccl(patch, recorded)
        yield patch


def pushes_over_nccl(recorded: RecordedStreams) -> bool:
    with over_nccl(recorded):
        return pushes(recorded)


def is_cancelled(recorded: RecordedStreams) -> bool:
    """In the middle of a piece, of which a part is still to be scattered; then the blocks are another request's."""
    reached, go_on, number = threading.Event(), threading.Event(), itertools.count(1)
    send, receive = TwinNccl.send, TwinNccl.recv

    def sends_one(group: TwinNccl, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if next(number) > 1:
            go_on.wait(60.0)
        return send(group, tensors, peer, tag)

    def receives(group: TwinNccl, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if group.num_received == 1:
            reached.set()
        return receive(group, tensors, peer, tag)

    with over_nccl(recorded) as patch:
        patch.setattr(nccl, "MAX_POSTED", 1)
        patch.setattr(TwinNccl, "send", sends_one)
        patch.setattr(TwinNccl, "recv", receives)
        with pushing(P2PConnector, kv_checksum="off") as (prefill, decode):
            begin(prefill, decode)
            assert reached.wait(60.0)
            decode.cancel(TransferKey("t", 1), "receive")
            code = decode.outcome("receiving", TransferKey("t", 1)).code
            decode.pools[0][TARGET] = 5.0
            recorded.finish_all()
            go_on.set()
            return code == "transfer_cancelled" and bool((decode.pools[0][TARGET] == 5.0).all())


CLOSE = [("record", "NcclGroup.close"), ("synchronize", "NcclGroup.close")]
REACH = [("record", "NcclGroup._reach"), ("synchronize", "NcclGroup._reach")]


def test_each_order_of_a_piece_over_nccl_is_missed() -> None:
    check_every_call(pushes_over_nccl, but=[*CLOSE, *DIGESTS])


def test_a_group_that_is_torn_down_writes_no_more() -> None:
    check_every_call(is_cancelled, but=REACH)


@pytest.mark.parametrize("same", [False, True])
def test_two_ranks_on_one_gpu_are_told_why_nccl_is_not_for_them(
    same: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = use_recorded(monkeypatch)
    use_gpus(monkeypatch, same=same)
    use_twin_nccl(monkeypatch, recorded)
    with caplog.at_level(logging.INFO, "pdkv.connectors.p2p"), pushing(P2PConnector) as (prefill, decode):
        begin(prefill, decode)
        assert not decode.outcome("receiving", TransferKey("t", 1)).code
    reason = "through host memory: both keep KV on GPU GPU-0, but NCCL refuses two ranks on one GPU"
    assert [reason in record.message for record in caplog.records] == [True] * same


class PromptDevice(Streams):
    """A device that has done what it was called for."""

    is_host = False


@pytest.fixture
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two are Gloo's, whose store is the link."""

    def make_gloo(store: Any, rank: int, device: torch.device) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=5.0)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroupGloo(store, rank, 2, options)

    monkeypatch.setattr(streams, "HOST", PromptDevice())
    monkeypatch.setattr(p2p_pieces, "STAGED_BYTES", 1)
    use_gpus(monkeypatch)
    monkeypatch.setattr(nccl, "make_nccl", make_gloo)


@pytest.mark.usefixtures("over_gloo")
def test_a_group_of_torchs_moves_pieces() -> None:
    with pushing(P2PConnector) as (prefill, decode):
        kv = full_kv(40, prefill.layout, seed=1)
        prefill.fill(SOURCE, kv)
        begin(prefill, decode)
        assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
        decode.check(TARGET, kv)


def test_a_group_whose_other_end_does_not_come_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself would wait for it for ever; what it makes later is ended at once."""
    go_on, made = threading.Event(), []

    def make_late(store: Any, rank: int, device: torch.device) -> Any:
        assert go_on.wait(60.0)
        made.append(TwinNccl(_Store(), 0, recorded))
        return made[-1]

    recorded = use_recorded(monkeypatch)
    use_gpus(monkeypatch)
    monkeypatch.setattr(nccl, "make_nccl", make_late)
    with pushing(P2PConnector, timeout_s="1.0") as (prefill, decode):
        begin(prefill, decode)
        assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == "transfer_timeout"
        go_on.set()
        wait_until_true(lambda: bool(made) and all(group.is_aborted for group in made), "what is made late is ended")


class _Store:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]
