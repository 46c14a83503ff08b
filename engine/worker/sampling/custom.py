"""Third-party logits processors in the running batch: one object per request and processor."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.base.log_limit import LogLimit
from pdkv.engine.plan import NewRequest, StepFailure
from pdkv.engine.worker.readback import Read, read_here
from pdkv.errors import InvalidRequest, LogitsProcessorFailed
from pdkv.sampling.logits_processors import NO_PROCESSORS, LogitsProcessor, ProcessorSet, refused

logger = logging.getLogger(__name__)


class CustomProcessors:
    """The processors of each slot. An error in one fails only the rows of its own request."""

    def __init__(self, processors: ProcessorSet = NO_PROCESSORS, read: Read = read_here) -> None:
        """`read`: reads from the logits' device."""
        self._processors = processors
        self._read = read
        self._slots: dict[int, dict[str, LogitsProcessor] | StepFailure] = {}
        self._log_limit = LogLimit()

    def add(self, slot: int, request: NewRequest) -> bool:
        """Make the objects of a new request. Returns whether its logits need them."""
        params = request.params
        made: dict[str, LogitsProcessor] = {}
        for name, arguments in params.logits_processors.items():
            try:
                processor = self._processors.make(name, arguments)
                if not (params.greedy and processor.is_argmax_invariant()):
                    made[name] = processor
            except ValueError as error:
                self._slots[slot] = StepFailure(InvalidRequest.code, str(refused(name, error)))
                return True
            except Exception as error:
                self._slots[slot] = self._failure(name, error)
                return True
        if made:
            self._slots[slot] = made
        return bool(made)

    def refuse(self, slot: int, error: Exception) -> None:
        """Fail the request in `slot` when it draws: its parameters raised this error."""
        text = f"the sampling parameters cannot be served: {type(error).__name__}: {error}"
        self._slots[slot] = StepFailure(InvalidRequest.code, text)

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        self._slots.pop(slot, None)

    def apply(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.integer[Any]],
        token_ids: NDArray[np.int32],
        num_prompt: NDArray[np.int64],
        num_tokens: NDArray[np.integer[Any]],
    ) -> Mapping[int, StepFailure]:
        """Change these rows of float32 logits (n, vocab) in place; forbidden tokens stay forbidden.

        Args:
            rows: (m,) rows of the logits; the other arguments belong to them: (m,), `token_ids` (max_num_seqs, length).

        Returns:
            By row, why it failed, in which case all of its tokens are forbidden.
        """
        has_forbidden, was_sound = self._read([logits.amin(dim=1) == -torch.inf, _is_sound(logits)])
        failures: dict[int, StepFailure] = {}
        shares = zip(rows.tolist(), slots.tolist(), num_prompt.tolist(), num_tokens.tolist(), strict=True)
        for row, slot, first, stop in shares:
            own = logits[row]
            forbidden = own == -torch.inf if has_forbidden[row] else None
            failure = self._run(slot, own, token_ids[slot, :first], token_ids[slot, first:stop])
            if failure is not None:
                failures[row] = failure
            if forbidden is not None:
                own.masked_fill_(forbidden, -torch.inf)
        [is_sound] = self._read([_is_sound(logits)])
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if was_sound[row] and not is_sound[row] and row not in failures:
                failures[row] = self._failure(self._names(slot), ValueError("the logits became NaN or +inf"))
        if failures:
            logits[list(failures)] = -torch.inf
        return failures

    def _run(
        self, slot: int, logits: torch.Tensor, prompt: NDArray[np.int32], output: NDArray[np.int32]
    ) -> StepFailure | None:
        """Run all processors of a slot on its logits (vocab,), in place. Returns why one of them failed."""
        made = self._slots[slot]
        if isinstance(made, StepFailure):
            return made
        tokens = _read_only(prompt), _read_only(output)
        for name, processor in made.items():
            try:
                result = _checked(processor.apply(logits, *tokens), logits)
                if result is not logits:
                    logits.copy_(result)
            except Exception as error:
                return self._failure(name, error)
        return None

    def _names(self, slot: int) -> str:
        made = self._slots[slot]
        return "" if isinstance(made, StepFailure) else ", ".join(made)

    def _failure(self, name: str, error: Exception) -> StepFailure:
        if self._log_limit.passes():
            logger.warning("logits processor %s failed", name, exc_info=error)
        text = f"logits processor {name} failed: {type(error).__name__}: {error}"
        return StepFailure(LogitsProcessorFailed.code, text)


def _is_sound(logits: torch.Tensor) -> torch.Tensor:
    """Whether each row has neither NaN nor +inf."""
    return logits.amax(dim=1) < torch.inf  # the maximum of values with NaN is NaN


def _checked(result: object, expected: torch.Tensor) -> torch.Tensor:
    """A processor's result. Raises TypeError or ValueError if it is not a logits tensor."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it returned {type(result).__name__} instead of a tensor")
    if result.shape != expected.shape or not result.is_floating_point():
        raise ValueError(
            f"it returned {result.dtype} of {tuple(result.shape)} instead of floats of {tuple(expected.shape)}"
        )
    return result


def _read_only(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    view = token_ids[:]
    view.flags.writeable = False
    return view
