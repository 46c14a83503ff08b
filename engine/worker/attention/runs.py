"""Dividing a step on a CPU: runs of prompts' tokens, and single tokens of outputs. Pure numpy."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdkv.engine.worker.batch import IntArray, StepInputs


class Prompts(NamedTuple):
    """Runs of a prompt's tokens at adjacent positions, in adjacent rows; one entry each."""

    slots: IntArray
    qkv_rows: IntArray  # of each run's first query in the step
    out_rows: IntArray  # row of its output
    positions: IntArray  # its position
    counts: IntArray  # number of queries
    window: int  # number of keys that each query sees, including its own; 0: all up to its own

    def only(self, which: NDArray[np.bool_]) -> "Prompts":
        """Some of the runs."""
        return Prompts._make([*(each[which] for each in self[:-1]), self.window])


class Singles(NamedTuple):
    """Single queries of outputs; one entry each."""

    slots: IntArray
    qkv_rows: IntArray  # of each query in the step
    out_rows: IntArray  # row of its output
    first_blocks: IntArray  # blocks of the request that it does not see
    seq_lens: IntArray  # keys from there on, up to its own
    hidden: IntArray  # number of the first of those that it does not see, either; less than a block

    @classmethod
    def at(
        cls, slots: IntArray, rows: IntArray, outs: IntArray, positions: IntArray, block_size: int, window: int | None
    ) -> "Singles":
        """Singles for queries in the step's rows `rows` at `positions`; `outs` are the rows of their outputs."""
        if window is None:
            nothing = np.zeros_like(positions)
            return cls(slots, rows, outs, nothing, positions + 1, nothing)
        skipped = np.maximum(positions + 1 - window, 0) // block_size
        seen = positions + 1 - skipped * block_size
        return cls(slots, rows, outs, skipped, seen, np.maximum(seen - window, 0))


class RunPlan(NamedTuple):
    """A step's queries are the rows [0, num_rows), each once, in a run or single."""

    prompts: Prompts
    singles: Singles
    num_rows: int


_NONE: IntArray = np.empty(0, dtype=np.int64)
_NO_PROMPTS = Prompts(_NONE, _NONE, _NONE, _NONE, _NONE, 0)


def plan_runs(inputs: StepInputs, rows: IntArray | None, block_size: int, *, window: int | None = None) -> RunPlan:
    """Plan all of the step's tokens, or only the tokens `rows` (ascending).

    A token of a prompt is in a run and one of an output is single, whatever else the step holds. So when it is computed
    again, as after a death or a preemption, the result is the same.

    Args:
        window: keys that each query sees, including its own; None: all up to its own.
    """
    outs = np.arange(len(inputs.positions) if rows is None else len(rows))
    rows = outs if rows is None else rows
    if len(inputs.slots) == len(inputs.positions):  # one token each, as in most steps
        request = rows
    else:
        request = np.searchsorted(inputs.cu_seqlens_q, rows, side="right") - 1
    slots, positions = inputs.slots[request], inputs.positions[rows]
    in_prompt = positions < inputs.num_prompt[request]
    if not in_prompt.any():
        return RunPlan(_NO_PROMPTS, Singles.at(slots, rows, outs, positions, block_size, window), len(rows))
    single = ~in_prompt
    starts = in_prompt.copy()
    starts[1:] &= (np.diff(rows) != 1) | (np.diff(request) != 0) | single[:-1]
    [first] = np.nonzero(starts)
    counts = np.add.reduceat(in_prompt, first, dtype=np.int64)
    prompts = Prompts(slots[first], rows[first], outs[first], positions[first], counts, window or 0)
    singles = Singles.at(slots[single], rows[single], outs[single], positions[single], block_size, window)
    return RunPlan(prompts, singles, len(rows))
