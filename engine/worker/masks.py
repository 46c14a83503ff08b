"""The tokens that grammars allow in the rows of a step. Tracks each answer in the batch, and which masks are ready in
time.

Masks are made elsewhere, after each draw, while the next step is computed. A row without a mask at the time of its draw
is left out of the step, and its request is held until a plan lets it draw again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.batch import IntArray, PersistentBatch
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.sampling.logit_processors import TokenMasks
from pdkv.grammar.matching.host import GrammarHost, Words
from pdkv.wire.types import RequestKey


class StepMasks(NamedTuple):
    """The masks of one step."""

    masks: TokenMasks | None  # None: for no row
    late: list[int]  # the drawing requests that are left out, by their position among them


NO_MASKS = StepMasks(None, [])


class Masks(Protocol):
    """The grammars of the batch, as a rank's runner sees them."""

    def add(self, slot: int, request: NewRequest) -> None:
        """Add a request to the batch."""
        ...

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        ...

    def resume(self, slots: Iterable[int]) -> None:
        """Let left-out requests in these slots draw again from the next step on."""
        ...

    def masks_in(self, slots: IntArray) -> bool:
        """Whether one of those slots has a grammar, which must accept the tokens before the next draw."""
        ...

    def take(self, drawn: DrawRows, batch: PersistentBatch) -> StepMasks:
        """The tokens that may be drawn.

        A row after a draft that the grammar refuses, or that ends the answer, has no mask: its draws are dropped.
        """
        ...

    def accept(self, drawn: DrawRows, tokens: IntArray, counts: IntArray, batch: PersistentBatch) -> None:
        """Advance by the tokens drawn and kept: the first counts[i] of each request's rows of `tokens` (n,). The batch
        knows these tokens, and the drafts proposed after them.
        """
        ...


class GrammarMasks:
    """The grammars of the running batch. Requests without one cost nothing.

    Args:
        maker: None: no request has a grammar.
        share: called with the masks of each step in which a request with a grammar draws.
    """

    def __init__(
        self,
        maker: GrammarHost | None,
        eos_token_ids: Collection[int],
        share: Callable[[StepMasks], None] | None = None,
    ) -> None:
        self._maker = maker
        self._eos_token_ids = eos_token_ids
        self._share = share
        self._answers: dict[int, _Answer] = {}  # by slot

    def add(self, slot: int, request: NewRequest) -> None:
        if request.grammar is None:
            return
        assert self._maker is not None
        answer = self._answers[slot] = _Answer(request, self._eos_token_ids)
        self._maker.open(
            request.key, request.grammar, answer.go_on(request.output_token_ids), request.params.stop_token_ids
        )

    def remove(self, slot: int) -> None:
        answer = self._answers.pop(slot, None)
        if answer is not None and self._maker is not None:
            self._maker.end(answer.key)

    def resume(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._answers[slot].is_held = False

    def masks_in(self, slots: IntArray) -> bool:
        return bool(self._answers) and any(slot in self._answers for slot in slots.tolist())

    def take(self, drawn: DrawRows, batch: PersistentBatch) -> StepMasks:
        if not self.masks_in(drawn.slots):
            return NO_MASKS
        assert self._maker is not None
        shares = [(i, self._answers.get(slot), start, stop) for i, (slot, start, stop) in enumerate(drawn.shares())]
        wanted = [(i, answer, start, stop) for i, answer, start, stop in shares if answer and not answer.is_over]
        found = self._maker.masks([answer.key for _, answer, _, _ in wanted if not answer.is_held])
        taken = iter(found)
        rows, bits, late = list[int](), list[Words](), list[int]()
        for i, answer, start, stop in wanted:
            words = None if answer.is_held else next(taken)
            if words is None:
                answer.is_held = True
                late.append(i)
                continue
            words = words[: stop - start]
            rows += range(start, start + len(words))
            bits.append(words)
        masks = TokenMasks(np.array(rows, np.int64), torch.from_numpy(np.concatenate(bits))) if rows else None
        step = StepMasks(masks, late)
        if self._share is not None:
            self._share(step)
        return step

    def accept(self, drawn: DrawRows, tokens: IntArray, counts: IntArray, batch: PersistentBatch) -> None:
        if not self._answers:
            return
        steps = list[tuple[RequestKey, list[int], list[int]]]()
        for (slot, start, _), count in zip(drawn.shares(), counts.tolist(), strict=True):
            answer = self._answers.get(slot)
            if answer is None or answer.is_over or not count:
                continue
            accepted = answer.go_on(tokens[start : start + count].tolist())
            if accepted and not answer.is_over:
                known = int(batch.num_tokens[slot])
                drafts = batch.token_ids[slot, known : known + batch.num_drafts[slot]].tolist()
                steps.append((answer.key, accepted, answer.up_to_stop(drafts)))
        if steps:
            assert self._maker is not None
            self._maker.go_on(steps)


class _Answer:
    """The state of one request's output."""

    def __init__(self, request: NewRequest, eos_token_ids: Collection[int]) -> None:
        self.key = request.key
        self.is_over = False  # it has ended: further draws are dropped
        self.is_held = False  # it was left out
        self._stops = {*eos_token_ids, *request.params.stop_token_ids}

    def go_on(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first one that ends the answer."""
        accepted = self.up_to_stop(token_ids)
        self.is_over = self.is_over or len(accepted) < len(token_ids)
        return accepted

    def up_to_stop(self, token_ids: Sequence[int]) -> list[int]:
        """As `go_on`, but without changing anything."""
        stop = next((i for i, token_id in enumerate(token_ids) if token_id in self._stops), len(token_ids))
        return list(token_ids[:stop])
