"""Logits processors of third parties: the interface, the names for `--logits-processors`, and an engine's set of them.

No torch here: the router and the launcher check names. docs/logits-processors.md has an example.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdkv.base.registry import Registry
from pdkv.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Arguments = Mapping[str, Any]
"""The arguments of a processor in a request: a JSON object."""


class ModelInfo(NamedTuple):
    """The model that an engine runs."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    path: Path  # its directory, where its tokenizer is


class LogitsProcessor(ABC):
    """Changes the logits of one request. Each rank of each engine makes its own object when the request joins it.

    A request may begin on one engine and continue on another, so the result must depend only on the prompt and the
    output: no clock, no random numbers, no other requests. State in an object may only save work. Other requests wait
    while a method runs.
    """

    @classmethod
    def validate_params(cls, arguments: Arguments, model: ModelInfo) -> None:
        """Check the arguments before a request is accepted. Raises ValueError for wrong ones; the client gets its
        message.
        """

    @abstractmethod
    def __init__(self, arguments: Arguments, model: ModelInfo) -> None:
        """Make an object for one request with validated arguments."""

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest, in which case greedy requests skip `apply`."""
        return False

    @abstractmethod
    def apply(
        self, logits: "torch.Tensor", prompt_token_ids: "NDArray[np.int32]", output_token_ids: "NDArray[np.int32]"
    ) -> "torch.Tensor":
        """The logits from which the next token is drawn.

        Args:
            logits: (vocab,) float32, on the model's device; may be changed in place. -inf: a forbidden token, which
                stays forbidden.
            output_token_ids: all output tokens so far; the next call may have fewer, if the last ones were guesses.

        Returns:
            The same shape; no NaN, and no +inf. An error, or any other result, fails the request.
        """


LOGITS_PROCESSORS: Registry[LogitsProcessor] = Registry(
    "logits processor", "pdkv.logits_processors", {}, f"{__name__}:LogitsProcessor"
)


def check_known(asked: Iterable[str], names: Iterable[str]) -> None:
    """Raise InvalidRequest for a processor in a request that is not in `names`."""
    known = tuple(names)
    for name in asked:
        if name not in known:
            have = f"this server has {', '.join(known)}" if known else "this server has none (--logits-processors)"
            raise InvalidRequest(f"logits_processors: {name!r:.80} is unknown; {have}", param="logits_processors")


class ProcessorSet:
    """The processors that an engine has, by name."""

    def __init__(self, kinds: Mapping[str, type[LogitsProcessor]], model: ModelInfo) -> None:
        self._kinds = kinds
        self._model = model

    @classmethod
    def load(cls, names: Iterable[str], model: ModelInfo) -> "ProcessorSet":
        """Import them. Raises ConfigError for an unknown name."""
        return cls({name: LOGITS_PROCESSORS.load(name) for name in names}, model)

    def check(self, asked: Mapping[str, Arguments]) -> None:
        """Raise InvalidRequest for an unknown processor, or one that refuses its arguments."""
        check_known(asked, self._kinds)
        for name, arguments in asked.items():
            try:
                self._kinds[name].validate_params(arguments, self._model)
            except (ValueError, TypeError, LookupError) as error:
                raise refused(name, error) from error

    def make(self, name: str, arguments: Arguments) -> LogitsProcessor:
        """Make a processor for one request that has passed `check`. Raises what its constructor raises."""
        return self._kinds[name](arguments, self._model)


def refused(name: str, error: Exception) -> InvalidRequest:
    """The client's error for arguments that a processor does not accept."""
    text = f"missing {error}" if isinstance(error, KeyError) else str(error)
    return InvalidRequest(f"logits_processors: {name}: {text}", param="logits_processors")


NO_PROCESSORS = ProcessorSet({}, ModelInfo(0, (), Path()))
"""The set of an engine without processors."""
