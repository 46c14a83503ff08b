"""--check-finite: finds the requests of a step with NaN or infinity, and which of their blocks contain such values.

Keys and values are checked as each layer computes them, so that a chunk in mid-prompt, which has no logits, is found
before its blocks enter the cache; logits reveal values loaded from outside.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.plan import ScheduledRequest, StepFailure
from pdkv.engine.worker.batch import IntArray, PersistentBatch, StepInputs
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.readback import Read, read_here
from pdkv.errors import NonFiniteLogits
from pdkv.kernels.kv_copy import FP8, raw
from pdkv.kernels.upload import to_tensor
from pdkv.models.decoder import Attend
from pdkv.models.heads import Heads
from pdkv.models.latent_heads import LatentHeads
from pdkv.wire.types import RequestKey

_BLOCKS_AT_ONCE = 64

_MESSAGE = (
    "the model computed NaN or infinity in this request's KV or logits, so --check-finite ended it (the model may "
    "overflow in this dtype)"
)


def finite_rows(x: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of each row of (n, m) are finite, (n,) bool."""
    low, high = torch.aminmax(x, dim=1)  # both are NaN if one number is
    return low.isfinite() & high.isfinite()


def usable_rows(logits: torch.Tensor) -> torch.Tensor:
    """Whether a token can be chosen from each row of (n, vocab), (n,) bool: single logits may be -inf, not all."""
    return logits.amax(dim=1).isfinite()


class FiniteCheck:
    """The findings in one step."""

    def __init__(self, inputs: StepInputs, read: Read = read_here) -> None:
        """`read`: reads from the model's device."""
        self._inputs = inputs
        self._read = read
        self._num_rows = len(inputs.positions)
        self._finite: torch.Tensor | None = None  # (n,) so far
        self._rejected: IntArray = np.zeros(0, np.int64)  # rows of wrong guesses
        self._unusable: set[int] = set()  # requests of the step whose logits are not finite

    def around(self, attend: Attend) -> Attend:
        """Wrap `attend` with a check of the layer's queries, keys and values."""

        def attend_and_look(layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None) -> torch.Tensor:
            looked_at = qkv
            if isinstance(heads, LatentHeads):
                looked_at = torch.cat([heads.queries.flatten(1), qkv[:, -1]], dim=1)
            elif heads is not None:
                heads.apply(qkv)
                heads = None
            finite = finite_rows(looked_at[: self._num_rows].flatten(1))
            self._finite = finite if self._finite is None else self._finite & finite
            return attend(layer, qkv, heads)

        return attend_and_look

    def look_at_prompt_logits(self, logits: torch.Tensor, request: int) -> None:
        """Check logits (m, vocab) of the request's prompt in this step."""
        [usable] = self._read([usable_rows(logits)])
        if not usable.all():
            self._unusable.add(request)

    def look_at_logits(self, logits: torch.Tensor, drawn: DrawRows, counts: IntArray) -> None:
        """Check logits (n, vocab) of the rows drawn from, of which counts[i] (m,) of request i are kept. The other rows
        belong to wrong guesses, and nothing computed for them counts, including KV.
        """
        kept = drawn.kept(np.maximum(counts, 1))
        self._rejected = drawn.rows[~kept]
        [usable] = self._read([usable_rows(logits)])
        unusable = ~usable & kept
        owners = np.searchsorted(drawn.starts, np.flatnonzero(unusable), side="right") - 1
        self._unusable.update(drawn.requests[owners].tolist())

    def failures(
        self, scheduled: Sequence[ScheduledRequest], batch: PersistentBatch, kv_pool: torch.Tensor
    ) -> dict[RequestKey, StepFailure]:
        """The requests that fail, each with those of its full blocks that hold NaN or infinity."""
        assert self._finite is not None, "a step must have layers"
        [finite] = self._read([self._finite])
        bad = ~finite
        bad[self._rejected] = False
        failing = self._unusable
        if bad.any():
            request_of_row = np.repeat(np.arange(len(scheduled)), np.diff(self._inputs.cu_seqlens_q))
            failing = failing | set(request_of_row[bad].tolist())
        failures = {}
        for i in sorted(failing):
            num_full = int(self._inputs.seq_lens[i]) // batch.block_size
            blocks = np.unique(batch.block_tables[:, self._inputs.slots[i], :num_full])
            failures[scheduled[i].key] = StepFailure(NonFiniteLogits.code, _MESSAGE, self._bad_blocks(kv_pool, blocks))
        return failures

    def _bad_blocks(self, kv_pool: torch.Tensor, blocks: NDArray[np.integer]) -> list[int]:
        bad: list[int] = []
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            some = blocks[start : start + _BLOCKS_AT_ONCE].astype(np.int64)
            found = raw(kv_pool).index_select(0, to_tensor(some, kv_pool.device)).view(kv_pool.dtype)
            [finite] = self._read([finite_rows((found.float() if found.dtype == FP8 else found).flatten(1))])
            bad += some[~finite].tolist()
        return bad
