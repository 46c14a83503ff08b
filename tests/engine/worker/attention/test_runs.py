"""Which of a step's tokens the compiled kernels take as prompts and which as single queries."""

import numpy as np
import pytest
import torch
from attention_case import MIXES, Case, Shape, layers_of

from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.engine.worker.attention.cpu import CpuAttention
from pdkv.engine.worker.attention.runs import RunPlan, plan_runs
from pdkv.engine.worker.batch import IntArray, PersistentBatch, StepInputs
from pdkv.kernels.linear import available
from pdkv.sampling.params import SamplingParams


def step(*requests: tuple[int, int, int]) -> StepInputs:
    """(prompt, computed, scheduled) tokens of each."""
    batch, scheduled = PersistentBatch(len(requests), 4096, 16), []
    for i, (prompt, computed, count) in enumerate(requests):
        key, output = (str(i), 0), [0] * (computed + count - prompt)
        batch.add(NewRequest(key, 0, [0] * prompt, output, SamplingParams(), [list(range(200))]))
        scheduled.append(ScheduledRequest(key, computed, count, [], True))
    return batch.prepare(scheduled)


def parts(plan: RunPlan) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(first row, where its output goes, position, queries) of each run; (row, output) of each single query."""
    prompts, singles = plan.prompts, plan.singles
    columns = (prompts.qkv_rows, prompts.out_rows, prompts.positions, prompts.counts)
    runs = [tuple(map(int, run)) for run in zip(*columns, strict=True)]
    return runs, [tuple(map(int, each)) for each in zip(singles.qkv_rows, singles.out_rows, strict=True)]


def test_a_token_of_a_prompt_is_in_a_run_and_one_of_an_output_single() -> None:
    inputs = step((40, 8, 32), (5, 5, 1), (30, 29, 1), (10, 0, 10), (10, 4, 9))
    runs, singles = parts(plan_runs(inputs, None, 16))
    assert runs == [(0, 0, 8, 32), (33, 33, 29, 1), (34, 34, 0, 10), (44, 44, 4, 6)]
    assert singles == [(32, 32), (50, 50), (51, 51), (52, 52)]


def test_the_last_token_of_a_prompt_is_in_a_run_whether_it_comes_alone_or_is_all_that_is_wanted() -> None:
    assert parts(plan_runs(step((30, 29, 1), (7, 7, 1)), None, 16)) == ([(0, 0, 29, 1)], [(1, 1)])
    inputs = step((30, 0, 30), (7, 7, 1), (20, 10, 10))
    assert parts(plan_runs(inputs, np.array([29, 30, 40]), 16)) == ([(29, 0, 29, 1), (40, 2, 19, 1)], [(30, 1)])
    assert parts(plan_runs(inputs, np.array([3, 4, 29, 40]), 16))[0] == [(3, 0, 3, 2), (29, 2, 29, 1), (40, 3, 19, 1)]


def test_runs_of_different_prompts_are_not_one_although_their_rows_are_adjacent() -> None:
    inputs = step((10, 0, 10), (10, 0, 10))
    assert parts(plan_runs(inputs, np.array([9, 10]), 16))[0] == [(9, 0, 9, 1), (10, 1, 0, 1)]


def test_single_queries_begin_at_the_block_in_which_their_window_does() -> None:
    singles = plan_runs(step((5, 100, 1)), None, 16, window=20).singles
    assert (singles.first_blocks.tolist(), singles.seq_lens.tolist(), singles.hidden.tolist()) == ([5], [21], [1])


@pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_alone_and_in_any_chunk_beside_any_others(dtype: torch.dtype) -> None:
    """A prompt of 200 tokens over the same KV, whole and in chunks, one of them of a single token, among decodes."""
    whole = Case([(0, 200)], dtype, shape=Shape(6, 2, 32))
    windows: list[int | None] = [None, 50]
    expected = [whole.run(CpuAttention(whole.pool, 6, layers_of(windows)), layer) for layer in (0, 1)]
    own: IntArray = whole.batch.block_tables[0, 0]
    for computed, count in ((0, 77), (77, 1), (78, 122), (199, 1)):
        case = Case([(9, 1), (computed, count + 1), *MIXES[3]], dtype, seed=1, shape=Shape(6, 2, 32))
        case.batch.num_prompt[1] = computed + count  # and a token of the output behind it
        case.inputs = case.inputs._replace(num_prompt=case.batch.num_prompt[case.inputs.slots])
        for i, block in enumerate(case.blocks(1)):
            case.pool[block] = whole.pool[own[min(i, 12)]]
        rows = slice(1, 1 + count)
        case.qkv[rows] = whole.qkv[computed : computed + count]
        for layer in (0, 1):
            result = case.run(CpuAttention(case.pool, 6, layers_of(windows)), layer)
            assert torch.equal(result[rows], expected[layer][computed : computed + count])
