"""Steps in buffers: what is read back is what was loaded, padding is nobody's, and nothing is overwritten too early."""

from typing import Any

import numpy as np
import pytest
import torch
from recorded_streams import Order, RecordedStreams, check_every_call, use_recorded

from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.engine.worker.batch import PersistentBatch, StepInputs
from pdkv.engine.worker.step_buffers import DeviceTables, HostSlabs, Padding, StepBuffers, StepTensors
from pdkv.sampling.params import SamplingParams

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
    return StepBuffers(DeviceTables(CPU, (2, 8, 10)), 16, pads=True)


def test_a_step_is_read_back_as_it_is() -> None:
    batch = make_batch([5, 40, 33])
    inputs = schedule(batch, {1: (20, 20), 2: (32, 1)})
    step = make_buffers().load(inputs, batch.block_tables, np.array([19, 20]))
    assert step.token_ids.tolist() == [*range(21, 41), 33]
    assert step.positions.tolist() == [*range(20, 40), 32]
    assert step.slot_mapping.tolist() == inputs.slot_mapping(16).tolist()
    assert (step.seq_lens.tolist(), step.cu_seqlens_q.tolist()) == ([40, 33], [0, 20, 21])
    assert step.block_tables.tolist() == [[[200, 201, 202], [300, 301, 302]], [[250, 251, 252], [350, 351, 352]]]
    assert step.rows is not None
    assert step.rows.tolist() == [19, 20]


def test_padding_has_no_slot_and_no_query() -> None:
    """Whatever a larger step has left in the buffers."""
    batch, buffers = make_batch([30, 40, 33, 20, 25, 31, 64]), make_buffers()
    buffers.load(schedule(batch, dict.fromkeys(range(7), (17, 1))), batch.block_tables, size=Padding(8, 8))
    buffers.load(schedule(batch, dict.fromkeys(range(7), (17, 2))), batch.block_tables)
    inputs = schedule(batch, {1: (39, 1), 2: (31, 1)})
    step = buffers.load(inputs, batch.block_tables, size=Padding(8, 8))
    assert step.slot_mapping[:, :2].tolist() == inputs.slot_mapping(16).tolist()
    assert (step.slot_mapping[:, 2:] < 0).all()
    assert step.slot_mapping.shape == (2, 8)
    assert step.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert step.seq_lens.tolist() == [40, 32, 0, 0, 0, 0, 0, 0]
    assert step.token_ids.tolist() == [40, 32, 0, 0, 0, 0, 0, 0]
    assert step.positions.tolist() == [39, 31, 0, 0, 0, 0, 0, 0]


def test_prompts_have_a_place_behind_room_for_decodes() -> None:
    """Tokens follow one another; requests between have no queries."""
    batch, buffers = make_batch([30, 40, 33]), make_buffers()
    buffers.load(schedule(batch, dict.fromkeys(range(3), (17, 1))), batch.block_tables, size=Padding(8, 8))
    inputs, size = schedule(batch, {1: (39, 1), 0: (16, 12)}), Padding(24, 3, 2, 5)
    step = buffers.load(inputs, batch.block_tables, np.array([0, 12]), size=size)
    assert step.cu_seqlens_q.tolist() == [0, 1, 1, 1, 13, 13]
    assert step.seq_lens.tolist() == [40, 0, 0, 28, 0]
    assert step.token_ids.tolist() == [40, *range(17, 29), *[0] * 11]
    assert (step.slot_mapping[:, 13:] < 0).all()
    assert step.block_tables[0, [0, 3], :2].tolist() == [[200, 201], [100, 101]]
    assert step.rows is not None
    assert step.rows.tolist() == [0, 12, 0, 0, 0]


def copied_by(buffers: StepBuffers, inputs: StepInputs, batch: PersistentBatch) -> int:
    """Bytes that a step brings to the device."""
    taken: list[int] = []
    take = buffers._host.take

    def note(num_bytes: int) -> Any:
        taken.append(num_bytes)
        return take(num_bytes)

    buffers._host.take = note  # type: ignore[method-assign]
    step = buffers.load(inputs, batch.block_tables, size=Padding(8, 8))
    for group, tables in enumerate(step.block_tables.tolist()):
        for slot, table, seq_len in zip(inputs.slots, tables, inputs.seq_lens, strict=False):
            num_blocks = -(-int(seq_len) // 16)
            assert table[:num_blocks] == batch.block_tables[group, slot, :num_blocks].tolist()
    return sum(taken)


def test_a_step_brings_the_new_entries_of_block_tables_alone() -> None:
    """As much with long tables as with short ones; a slot that another request has got brings its own."""
    copied = []
    for length in (20, 150):
        batch, buffers = make_batch([length] * 7), make_buffers()
        copied_by(buffers, schedule(batch, dict.fromkeys(range(7), (length - 1, 1))), batch)
        copied.append(copied_by(buffers, schedule(batch, dict.fromkeys(range(7), (length - 2, 1))), batch))
        batch.append_blocks(3, [[7], [8]])
        more = copied_by(buffers, schedule(batch, dict.fromkeys((5, 3, 0), (length - 1, 1))), batch)
        assert 0 < more - copied[-1] <= 2 * 64  # one entry of each group, aligned
        batch.remove(("2", 0))
        batch.add(NewRequest(("2", 1), 0, [1] * 20, [], SamplingParams(), [[900, 901], [950, 951]]))
        copied_by(buffers, batch.prepare([ScheduledRequest(("2", 1), 19, 1, [], True)]), batch)
    assert copied[0] == copied[1]


def addresses(step: StepTensors) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(t.data_ptr(), tuple(t.shape), t.stride()) for t in step if t is not None]


def test_steps_of_one_padded_size_lie_in_one_place() -> None:
    batch, buffers = make_batch([30, 160, 33]), make_buffers()
    nobody = buffers.load(StepInputs.of_nobody(2), batch.block_tables, size=Padding(4, 4))
    first = buffers.load(schedule(batch, {0: (29, 1)}), batch.block_tables, size=Padding(4, 4))
    buffers.load(schedule(batch, {0: (2, 1), 1: (149, 1), 2: (7, 1)}), batch.block_tables, size=Padding(8, 8))
    second = buffers.load(schedule(batch, {1: (159, 1), 2: (32, 1)}), batch.block_tables, size=Padding(4, 4))
    assert addresses(nobody) == addresses(first) == addresses(second)


@pytest.mark.parametrize("size", [None, 1, 3, 8])
def test_addresses_and_strides_are_multiples_of_sixteen(size: int | None) -> None:
    """Triton compiles another variant of a kernel for those that are not, also behind Ready."""
    batch, buffers = make_batch([30]), make_buffers()
    step = buffers.load(schedule(batch, {0: (7, 1)}), batch.block_tables, size=size and Padding(size, size))
    for tensor in (*step[:5], *step.slot_mapping, *step.block_tables):
        assert tensor.data_ptr() % 16 == 0
    assert step.block_tables.stride(1) % 16 == step.slot_mapping.stride(0) % 16 == 0


def read_behind_each_load(recorded: RecordedStreams) -> bool:
    """Whether a device reads each of several steps as it was loaded, whenever it comes to them."""
    batch = make_batch([30, 40])
    buffers = make_buffers()
    steps, read = [schedule(batch, {0: (n, 1), 1: (n + 3, 1)}) for n in range(14, 21)], []
    first = None
    with recorded.compute.on():
        for inputs in steps:
            step = buffers.load(inputs, batch.block_tables, size=Padding(4, 4))
            read.append((step.positions.clone(), step.block_tables[0, :, :3].clone()))
            first = recorded.compute.last if len(read) == 1 else first
            if len(read) == 3:
                recorded.reach(first, 0.0)
    recorded.finish_all()
    return all(
        positions.tolist() == [*inputs.positions, 0, 0]
        and tables[:2].tolist() == [[100, 101, 0], [200, 201, 202 if inputs.seq_lens[1] > 32 else 0]]
        for inputs, (positions, tables) in zip(steps, read, strict=True)
    )


def test_memory_that_a_device_may_still_read_is_not_written() -> None:
    """The device has come to the first of three copies when there is a fourth; nobody looks at the last ones' ends."""
    check_every_call(read_behind_each_load, but=[("record", n) for n in range(2, 7)])


def test_slabs_take_turns_and_are_as_many_as_a_device_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = use_recorded(monkeypatch, Order.LATE)
    slabs = HostSlabs(recorded)
    for held in (2, 2, 3, 4):
        slabs.take(1000).copied.record()
        assert len(slabs) == held
    recorded.finish_all()
    for _ in range(9):
        slabs.take(1000).copied.record()
        recorded.finish_all()
    assert len(slabs) == 4
