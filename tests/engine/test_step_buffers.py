"""Steps in buffers: what is read back is what was loaded, padding is nobody's, and nothing is overwritten too early."""

import numpy as np
import pytest
import torch

from pdkv.engine import step_buffers
from pdkv.engine.batch import PersistentBatch, StepInputs
from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.engine.step_buffers import HostSlabs, StepBuffers, StepTensors
from pdkv.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make_batch(lengths: list[int]) -> PersistentBatch:
    """Requests of so many tokens 1, 2, 3 …; request i's blocks begin at 100 * (i + 1), in the second group 50 later."""
    batch = PersistentBatch(8, 160, 16, 2)
    for i, length in enumerate(lengths):
        blocks = [[100 * (i + 1) + 50 * group + j for j in range(-(-length // 16))] for group in (0, 1)]
        batch.add(NewRequest((str(i), 0), 0, list(range(1, length + 1)), [], SamplingParams(), blocks))
    return batch


def schedule(batch: PersistentBatch, shares: dict[int, tuple[int, int]]) -> StepInputs:
    return batch.prepare([ScheduledRequest((str(i), 0), done, n, [], True) for i, (done, n) in shares.items()])


def make_buffers() -> StepBuffers:
    return StepBuffers(CPU, 16, (2, 8, 10), num_tokens=8)


def test_a_step_is_read_back_as_it_is() -> None:
    batch = make_batch([5, 40, 33])
    inputs = schedule(batch, {1: (20, 20), 2: (32, 1)})
    step = make_buffers().load(inputs, batch.block_tables, np.array([19, 20]))
    assert step.token_ids.tolist() == [*range(21, 41), 33]
    assert step.positions.tolist() == [*range(20, 40), 32]
    assert step.slot_mapping.tolist() == inputs.slot_mapping(16).tolist()
    assert (step.seq_lens.tolist(), step.cu_seqlens_q.tolist()) == ([40, 33], [0, 20, 21])
    assert step.block_tables.tolist() == [
        [[200, 201, 202], [300, 301, 302]],
        [[250, 251, 252], [350, 351, 352]],
    ]
    assert step.rows is not None
    assert step.rows.tolist() == [19, 20]


def test_padding_has_no_slot_and_no_query() -> None:
    """Whatever a larger step has left in the buffers."""
    batch, buffers = make_batch([30, 40, 33, 20, 25, 31, 64]), make_buffers()
    buffers.load(schedule(batch, dict.fromkeys(range(7), (17, 1))), batch.block_tables, size=8)
    buffers.load(schedule(batch, dict.fromkeys(range(7), (17, 2))), batch.block_tables)
    inputs = schedule(batch, {1: (39, 1), 2: (31, 1)})
    step = buffers.load(inputs, batch.block_tables, size=8)
    assert step.slot_mapping[:, :2].tolist() == inputs.slot_mapping(16).tolist()
    assert (step.slot_mapping[:, 2:] < 0).all()
    assert step.slot_mapping.shape == (2, 8)
    assert step.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert step.seq_lens.tolist() == [40, 32, 0, 0, 0, 0, 0, 0]
    assert step.token_ids.tolist() == [40, 32, 0, 0, 0, 0, 0, 0]
    assert step.positions.tolist() == [39, 31, 0, 0, 0, 0, 0, 0]


def addresses(step: StepTensors) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(t.data_ptr(), tuple(t.shape), t.stride()) for t in step if t is not None]


def test_steps_of_one_padded_size_lie_in_one_place() -> None:
    batch, buffers = make_batch([30, 160, 33]), make_buffers()
    nobody = buffers.load(StepInputs.of_nobody(2), batch.block_tables, size=4)
    first = buffers.load(schedule(batch, {0: (29, 1)}), batch.block_tables, size=4)
    buffers.load(schedule(batch, {0: (2, 1), 1: (149, 1), 2: (7, 1)}), batch.block_tables, size=8)
    second = buffers.load(schedule(batch, {1: (159, 1), 2: (32, 1)}), batch.block_tables, size=4)
    assert addresses(nobody) == addresses(first) == addresses(second)


@pytest.mark.parametrize("size", [None, 1, 3, 8])
def test_addresses_and_strides_are_multiples_of_sixteen(size: int | None) -> None:
    """Triton compiles another variant of a kernel for those that are not, also behind Ready."""
    batch, buffers = make_batch([30]), make_buffers()
    step = buffers.load(schedule(batch, {0: (7, 1)}), batch.block_tables, size=size)
    for tensor in (*step[:5], *step.slot_mapping, *step.block_tables):
        assert tensor.data_ptr() % 16 == 0
    assert step.block_tables.stride(1) % 16 == step.slot_mapping.stride(0) % 16 == 0


class Copy:
    """A device's event whose work is done when it is told so."""

    def __init__(self) -> None:
        self.is_recorded, self.is_done = False, False

    def record(self) -> None:
        self.is_recorded, self.is_done = True, False

    def query(self) -> bool:
        return self.is_done or not self.is_recorded


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    made: list[Copy] = []

    def make_event(device: torch.device) -> Copy:
        made.append(Copy())
        return made[-1]

    monkeypatch.setattr(HostSlabs.__init__, "__defaults__", (make_event,))
    return made


def test_memory_that_a_device_may_still_read_is_not_written(
    copies: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is three steps behind reads each step as it was loaded."""
    batch, sent = make_batch([30, 40]), []
    copy = torch.Tensor.copy_

    def late_copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            sent.append((source, source.clone()))
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    buffers = make_buffers()
    for length in range(20, 25):
        buffers.load(schedule(batch, {0: (length, 1), 1: (length + 3, 1)}), batch.block_tables, size=4)
    assert len(sent) == 5
    for now, then in sent:
        assert torch.equal(now, then)
    held = len(buffers._host)
    for event in copies:
        event.is_done = True
    for length in range(5):
        buffers.load(schedule(batch, {0: (length, 1)}), batch.block_tables, size=4)
        for event in copies:
            event.is_done = True
    assert len(buffers._host) == held == 5


def test_what_is_copied_is_pinned_for_a_device_only() -> None:
    assert isinstance(step_buffers._make_event(CPU), step_buffers._Done)
    assert not HostSlabs(CPU).take(100).memory.is_pinned()
