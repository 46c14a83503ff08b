"""Masks on a rank other than the first: rank 0 makes them, and sends them along with the rows that it leaves out."""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.batch import IntArray, PersistentBatch
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.masks import NO_MASKS, StepMasks
from pdkv.engine.worker.ranks.messages import MasksTaken
from pdkv.engine.worker.sampling.logit_processors import TokenMasks


class RankMasks:
    """Like `GrammarMasks`, but receives the masks of each step from rank 0.

    Args:
        hear: waits for them; raises RankTimeout and RankGone.
    """

    def __init__(self, hear: Callable[[], MasksTaken]) -> None:
        self._hear = hear
        self._slots: set[int] = set()

    def add(self, slot: int, request: NewRequest) -> None:
        if request.grammar is not None:
            self._slots.add(slot)

    def remove(self, slot: int) -> None:
        self._slots.discard(slot)

    def resume(self, slots: Iterable[int]) -> None:
        """No effect: rank 0 keeps them."""

    def masks_in(self, slots: IntArray) -> bool:
        return not self._slots.isdisjoint(slots.tolist())

    def take(self, drawn: DrawRows, batch: PersistentBatch) -> StepMasks:
        return unpack(self._hear()) if self.masks_in(drawn.slots) else NO_MASKS

    def accept(self, drawn: DrawRows, tokens: IntArray, counts: IntArray, batch: PersistentBatch) -> None:
        """No effect: rank 0 does it."""


def pack(step: StepMasks) -> MasksTaken:
    """Encode for the other ranks."""
    if step.masks is None:
        return MasksTaken([], b"", list(step.late))
    return MasksTaken(step.masks.rows.tolist(), step.masks.bits.numpy().tobytes(), list(step.late))


def unpack(taken: MasksTaken) -> StepMasks:
    """Decode the masks that `pack` encoded on rank 0."""
    if not taken.rows:
        return StepMasks(None, taken.late)
    bits = np.frombuffer(bytearray(taken.bits), np.int32).reshape(len(taken.rows), -1)
    return StepMasks(TokenMasks(np.array(taken.rows, np.int64), torch.from_numpy(bits)), taken.late)
