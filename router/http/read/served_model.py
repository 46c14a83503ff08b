"""The model that a router serves, against which every kind of request is checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.models.pooling_config import BY_LAST_TOKEN, Pooling
from pdkv.parsers.reasoning import ReasoningParser
from pdkv.parsers.tool_parser import ToolParser
from pdkv.text import Tokenizer

Cancelled = Callable[[], bool]
"""Whether the result is no longer wanted; called between two prompts."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model and its limits for requests."""

    names: Sequence[str]  # all mean this model; the first is used in answers
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # defaults of SamplingParams fields
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of SamplingParams fields
    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    stops_in_thoughts: bool = False  # whether stop strings apply to reasoning, too
    logits_processors: tuple[str, ...] = ()  # names that requests may use
    lacks: Mapping[str, str] = field(default_factory=dict)  # fields that requests cannot have, and an engine without it
    takes_templates: bool = False  # requests may bring chat templates
    pooling: Pooling = BY_LAST_TOKEN  # how prompts become embeddings

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raise InvalidRequest (404) for another model's name; no name means this model."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is not in the vocabulary of {self.vocab_size}", param=param
            )


def unknown_model(name: str, model: ServedModel) -> InvalidRequest:
    """The error for an unknown model: HTTP 404."""
    return InvalidRequest(
        f"the model {clip(name)!r} does not exist; this server has {', '.join(map(repr, model.names))}",
        param="model",
        status=404,
        code="model_not_found",
    )
