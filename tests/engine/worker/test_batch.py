"""The persistent batch: slots, block tables, and the flattened inputs of a step."""

import numpy as np
import pytest

from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.engine.worker.batch import PersistentBatch
from pdkv.sampling.params import SamplingParams

BLOCK = 16


def new(name: str, prompt: list[int], blocks: list[int], output: list[int] | None = None) -> NewRequest:
    return NewRequest((name, 0), 0, prompt, output or [], SamplingParams(), [blocks])


def scheduled(name: str, num_computed: int, count: int, blocks: list[int] | None = None) -> ScheduledRequest:
    return ScheduledRequest((name, 0), num_computed, count, [blocks] if blocks else [], True)


def test_slot_mapping_of_the_published_example() -> None:
    batch = PersistentBatch(4, 64, BLOCK)
    batch.add(new("a", [1] * 4, [0]))
    batch.add(new("b", list(range(17)), [5, 6]))
    batch.add(new("c", [3] * 4, [11]))
    inputs = batch.prepare([scheduled("a", 0, 4), scheduled("b", 0, 17), scheduled("c", 0, 4)])
    assert inputs.slot_mapping(BLOCK)[0].tolist() == [*range(4), *range(80, 96), 96, *range(176, 180)]
    assert inputs.cu_seqlens_q.tolist() == [0, 4, 21, 25]
    assert inputs.seq_lens.tolist() == [4, 17, 4]
    assert inputs.positions.tolist() == [*range(4), *range(17), *range(4)]
    assert inputs.token_ids.tolist() == [1] * 4 + list(range(17)) + [3] * 4
    assert inputs.slots.tolist() == [0, 1, 2]


def test_no_entry_pads_into_slot_0() -> None:
    batch = PersistentBatch(4, 64, BLOCK)
    batch.add(new("a", [1] * 20, [3, 2]))
    inputs = batch.prepare([scheduled("a", 18, 2)])
    assert inputs.slot_mapping(BLOCK)[0].tolist() == [34, 35]


def test_chunks_and_new_blocks() -> None:
    batch = PersistentBatch(2, 64, BLOCK)
    batch.add(new("a", list(range(40)), [7]))
    batch.add(new("b", [9] * 3, [1]))
    first = batch.prepare([scheduled("a", 0, 10), scheduled("b", 0, 3)])
    assert first.positions.tolist() == [*range(10), 0, 1, 2]
    second = batch.prepare([scheduled("b", 3, 1), scheduled("a", 10, 30, [4, 2])])
    assert second.slot_mapping(BLOCK)[0].tolist() == [19, *range(122, 128), *range(64, 80), *range(32, 40)]
    assert second.token_ids.tolist()[1:] == list(range(10, 40))


def test_a_freed_slot_is_reused_without_its_past() -> None:
    batch = PersistentBatch(1, 64, BLOCK)
    slot = batch.add(new("a", [5] * 40, [1, 2, 3]))
    assert batch.remove(("a", 0)) == slot
    assert batch.add(new("b", [6, 7], [9], output=[8])) == slot
    assert batch.prepare([scheduled("b", 0, 3)]).token_ids.tolist() == [6, 7, 8]
    batch.append_blocks(slot, [[4]])
    assert batch.block_tables[0, slot, :2].tolist() == [9, 4]
    assert len(batch) == 1
    assert ("a", 0) not in batch


def test_the_end_of_an_unknown_request_changes_nothing() -> None:
    batch = PersistentBatch(1, 64, BLOCK)
    assert batch.remove(("never", 3)) is None
    batch.add(new("a", [1], [0]))
    with pytest.raises(IndexError):
        batch.add(new("b", [1], [0]))


def test_drawn_tokens_are_appended() -> None:
    batch = PersistentBatch(2, 64, BLOCK)
    batch.add(new("a", [1, 2], [0]))
    batch.add(new("b", [3], [1]))
    batch.append_tokens(np.array([0, 1]), np.array([2, 1]), np.array([7, 8]))
    assert batch.token_ids[0, :3].tolist() == [1, 2, 7]
    assert batch.token_ids[1, :2].tolist() == [3, 8]
