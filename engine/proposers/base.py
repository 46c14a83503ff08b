"""What a proposer is: the interface, and its options. No torch here: the launcher checks options."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdkv.base.options import Options, option
from pdkv.engine.plan import NewRequest
from pdkv.wire.kv import KVLayout
from pdkv.wire.reports import MAX_DRAFTS

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.integer[Any]]


class ProposerOptions(Options):
    """Keys of `--speculative-config` that each method has."""

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = option(
        8, "the most tokens to guess for a request in one step"
    )
    adaptive: bool = option(True, "verify fewer guesses where they do not pay; false: verify all of them")


class Place(NamedTuple):
    """Where a proposer works: one rank of an engine."""

    model: Path  # the served model's directory
    vocab_size: int
    max_num_seqs: int  # slots
    max_model_len: int
    config: Any = None  # EngineConfig
    device: Any = None  # torch.device


class Asked(NamedTuple):
    """The m requests for which a step has drawn tokens, and for which the next ones are to be guessed."""

    requests: Sequence[NewRequest]
    slots: IntArray  # (m,)
    token_ids: npt.NDArray[np.int32]  # (slots, length) prompt and output in each slot; not to be changed or kept
    num_tokens: IntArray  # (m,) known of each request's
    most: IntArray  # (m,) at least 1
    hidden: "torch.Tensor | None" = (
        None  # (m, hidden) from which each last token was drawn, for a proposer that `wants_hidden`
    )


class Guesses(NamedTuple):
    """The tokens guessed for m requests."""

    counts: IntArray  # (m,)
    token_ids: IntArray  # (m, width): the first counts[i] of row i


class Proposer(ABC):
    """Guesses tokens, on each rank of an engine, after each step's draws. The guesses are verified by drawing what
    would be drawn anyway: they change how many steps an output takes, and none of its tokens.

    All ranks must guess the same, so no clock, no random numbers of its own, and no other order than that of the calls.
    A proposer that draws should use the target's random numbers: `draw` in `engine/worker/sampling/draw.py` with the
    same (seed, choice, position). Then its guesses are right nearly as often as possible.
    """

    options_type: type[ProposerOptions] = ProposerOptions
    wants_hidden: ClassVar[bool] = False
    is_costly: ClassVar[bool] = False
    """Whether it computes so much that it is seldom asked where guesses have not paid lately, nor for more than pay."""

    def __init__(self, options: Any = None) -> None:
        """`options`: of `options_type`."""
        self.options: Any = self.options_type() if options is None else options

    drafter_tokens: tuple[int, int] = (0, 0)
    """As in StepOutput."""
    is_shared: bool = False
    """Whether another engine that is known has the same drafter."""

    @property
    def num_tokens(self) -> int:
        """The most tokens that the proposer guesses for a request in one step."""
        return int(self.options.num_speculative_tokens)

    def with_room(self, layout: KVLayout, place: Place) -> KVLayout:
        """The layout of the engine's KV pool with layers for KV of the proposer's own, which goes wherever the engine's
        goes. Called before `attach`, if the engine's connector carries such layers.
        """
        return layout

    def follow(self, inputs: Any, batch: Any, kv_pool: "torch.Tensor") -> None:
        """Note the KV that a step has computed, before it draws and before others see that. For pdkv's own proposers.
        `inputs`, `batch`: the step's StepInputs, and the PersistentBatch.
        """

    def attach(self, place: Place) -> None:
        """Prepare to work there; called once, before anything else. Raises ConfigError."""

    def warm_up(self) -> None:
        """On a device: compute as much as beside any step, so that kernels are compiled, and memory is measured."""

    def add(self, slot: int, request: NewRequest) -> None:
        """Note a request of the batch, which may have output already."""

    def remove(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Forget a slot's request, with all of its tokens: it has ended, or was preempted and may come again."""

    @abstractmethod
    def propose(self, asked: Asked) -> Guesses:
        """Guess tokens of the vocabulary. An error, or a token out of range, costs guesses, not requests."""


class TokenProposer(Proposer):
    """A proposer that looks at one request at a time; simple, and slower with many of them."""

    @abstractmethod
    def guess(self, request: NewRequest, token_ids: npt.NDArray[np.int32], most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow `token_ids`, the request's whole prompt and output."""

    def propose(self, asked: Asked) -> Guesses:
        each = zip(asked.requests, asked.slots.tolist(), asked.num_tokens.tolist(), asked.most.tolist(), strict=True)
        found = [
            list(self.guess(request, asked.token_ids[slot, :known], most))[:most] for request, slot, known, most in each
        ]
        token_ids = np.zeros((len(found), max(map(len, found), default=0)), np.int64)
        for row, tokens in zip(token_ids, found, strict=True):
            row[: len(tokens)] = tokens
        return Guesses(np.fromiter(map(len, found), np.int64, len(found)), token_ids)
