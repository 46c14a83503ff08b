"""The order of work on a device, and the recorded device that tests have instead of one."""

from typing import Any

import numpy as np
import pytest
import torch
from recorded_streams import Order, RecordedStreams, check_every_call, use_recorded

from pdkv.errors import TransferTimeout
from pdkv.host import cuda_driver
from pdkv.host.cuda_driver import CudaDriverError
from pdkv.kernels.streams import HOST, CudaEvent, CudaStreams, streams_of

CPU = torch.device("cpu")


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    streams = streams_of(CPU)
    assert streams.is_host
    event = streams.make_event()
    with streams.make_stream().on():
        event.record()
    event.wait()
    event.synchronize(0.0)
    assert event.query()
    assert streams.make_pinned(3).tolist() == [0, 0, 0]


class SlowEvent:
    """An event of torch.cuda that has come when it was asked so often."""

    def __init__(self, num_queries: float) -> None:
        self.num_left = num_queries

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0


def test_the_host_waits_for_an_event_with_a_deadline() -> None:
    never: Any = SlowEvent(float("inf"))
    with pytest.raises(TransferTimeout, match=r"within 0\.002 s"):
        CudaEvent(never).synchronize(0.002)
    soon: Any = SlowEvent(3)
    CudaEvent(soon).synchronize(5.0)
    assert soon.num_left == -1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_copy_runs_behind_what_it_waits_for() -> None:
    device = torch.device("cuda", 0)
    streams = streams_of(device)
    value, slab = torch.zeros(1 << 20, device=device), streams.make_pinned(4 << 20)
    copies, computed, done = streams.make_stream(), streams.make_event(), streams.make_event()
    torch.cuda._sleep(500_000_000)
    value.fill_(3.0)
    computed.record()
    with copies.on():
        computed.wait()
        slab.copy_(value.view(torch.uint8), non_blocking=True)
        done.record()
    assert not done.query()
    done.synchronize(20.0)
    assert (slab.view(torch.float32) == 3.0).all()


def copy_out(recorded: RecordedStreams) -> bool:
    """A step writes, a copy stream copies, the step after it overwrites, the host reads."""
    pool, slab = torch.zeros(8), torch.zeros(8)
    streams = streams_of(CPU)
    copies, computed, copied = streams.make_stream(), streams.make_event(), streams.make_event()
    with recorded.compute.on():
        torch.mul(torch.ones(8), 3.0, out=pool)
        computed.record()
    with copies.on():
        computed.wait()
        slab.copy_(pool + 1.0, non_blocking=True)
        copied.record()
    with recorded.compute.on():
        copied.wait()
        pool.fill_(-1.0)
    copied.synchronize(1.0)
    return slab.tolist() == [4.0] * 8


def test_each_missing_call_shows() -> None:
    check_every_call(copy_out)


def test_a_call_that_nobody_misses_shows() -> None:
    def wait_twice(recorded: RecordedStreams) -> bool:
        value, written = torch.zeros(1), streams_of(CPU).make_event()
        with recorded.compute.on():
            value.fill_(1.0)
            written.record()
        written.synchronize(1.0)
        written.synchronize(1.0)
        return value.item() == 1.0

    with pytest.raises(AssertionError, match=r"nobody misses .*synchronize.*synchronize"):
        check_every_call(wait_twice)


@pytest.mark.parametrize("order", [Order.LATE, Order.SIDE_EARLY])
def test_the_host_sees_poison_before_an_operation_has_run(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    recorded = use_recorded(monkeypatch, order)
    with recorded.compute.on():
        total = torch.arange(3.0).sum()
        assert total.numpy() != 3.0
        assert recorded.num_syncs == 0
        assert total.item() == 3.0  # as on a device, the host waits for the answer
        assert recorded.num_syncs == 1
        assert torch.tensor([0, 4, 0, 1]).nonzero().tolist() == [[1], [3]]
    assert recorded.num_syncs == 2


def test_a_held_stream_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = use_recorded(monkeypatch)
    event, value = streams_of(CPU).make_event(), torch.zeros(1)
    with recorded.compute.on():
        value.fill_(1.0)
    event.record()
    recorded.compute.hold()
    with pytest.raises(TransferTimeout):
        event.synchronize(0.001)
    assert not event.query()
    recorded.compute.release()
    event.synchronize(1.0)
    assert (event.query(), value.item()) == (True, 1.0)


def test_memory_is_page_locked_by_its_address_or_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, calls = np.zeros(64, np.uint8), list[tuple[int, ...]]()
    monkeypatch.setattr(cuda_driver, "lock_pages", lambda *what: calls.append(what))
    monkeypatch.setattr(cuda_driver, "unlock_pages", lambda *what: calls.append(what))
    on_device = CudaStreams(torch.device("cuda", 3))
    unlock = on_device.lock_pages(memory)
    assert unlock is not None
    unlock()
    assert calls == [(3, memory.ctypes.data, 64), (3, memory.ctypes.data)]

    def refuse(*what: int) -> None:
        raise CudaDriverError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda_driver, "lock_pages", refuse)
    assert on_device.lock_pages(memory) is None
    assert "64 bytes of host memory are not page-locked: cuMemHostRegister_v2" in caplog.text
    assert HOST.lock_pages(memory) is None
