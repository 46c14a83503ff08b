"""Logits processors of third parties: the interface, the names that `--logits-processors` takes, what an engine has.

No torch here: the router and the launcher look at names. docs/logits-processors.md has an example.
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
"""What a request says to a processor: a JSON object."""


class ModelInfo(NamedTuple):
    """The model that an engine runs."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    path: Path  # its directory, where its tokenizer is


class LogitsProcessor(ABC):
    """Changes the logits of one request. Each engine, and each rank of it, makes its own where the request joins it.

    A request may begin on one engine and go on on another, so what is drawn must follow from the prompt and the output
    alone: no clock, no random numbers, nothing of other requests. What an object keeps may only save work. Other
    requests wait while a method runs.
    """

    @classmethod
    def validate_params(cls, arguments: Arguments, model: ModelInfo) -> None:
        """Look at the arguments before a request is taken. Raises ValueError for wrong ones: the client reads it."""

    @abstractmethod
    def __init__(self, arguments: Arguments, model: ModelInfo) -> None:
        """For one request, whose arguments have been validated."""

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest: then greedy requests do without `apply`."""
        return False

    @abstractmethod
    def apply(
        self, logits: "torch.Tensor", prompt_token_ids: "NDArray[np.int32]", output_token_ids: "NDArray[np.int32]"
    ) -> "torch.Tensor":
        """The logits from which the next token is drawn.

        Args:
            logits: (vocab,) float32, on the model's device; may be changed in place. -inf: a token that is forbidden,
                and stays so.
            output_token_ids: all so far; in the next call it may be shorter, where the last ones were guesses.

        Returns:
            The same shape; no NaN, and no +inf. What this raises, or any other result, fails the request.
        """


LOGITS_PROCESSORS: Registry[LogitsProcessor] = Registry(
    "logits processor", "pdkv.sampling.logits_processors", {}, f"{__name__}:LogitsProcessor"
)


def check_known(asked: Iterable[str], names: Iterable[str]) -> None:
    """Raise InvalidRequest for a processor that a request names and `names` lack."""
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
        """Import them. Raises ConfigError for a name that stands for none."""
        return cls({name: LOGITS_PROCESSORS.load(name) for name in names}, model)

    def check(self, asked: Mapping[str, Arguments]) -> None:
        """Raise InvalidRequest for a processor that is not there, or that refuses its arguments."""
        check_known(asked, self._kinds)
        for name, arguments in asked.items():
            try:
                self._kinds[name].validate_params(arguments, self._model)
            except (ValueError, TypeError, LookupError) as error:
                raise refused(name, error) from error

    def make(self, name: str, arguments: Arguments) -> LogitsProcessor:
        """One for one request, which has passed `check`. Raises what its constructor raises."""
        return self._kinds[name](arguments, self._model)


def refused(name: str, error: Exception) -> InvalidRequest:
    """What a client hears of arguments that a processor does not take."""
    text = f"missing {error}" if isinstance(error, KeyError) else str(error)
    return InvalidRequest(f"logits_processors: {name}: {text}", param="logits_processors")


NO_PROCESSORS = ProcessorSet({}, ModelInfo(0, (), Path()))
"""Of an engine that was given none."""
