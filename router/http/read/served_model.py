"""The model that a router serves, against which every kind of request is checked."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, RequestAborted
from pdkv.models.pooling_config import BY_LAST_TOKEN, Pooling
from pdkv.parsers.reasoning import ReasoningParser
from pdkv.parsers.tool_parser import ToolParser
from pdkv.router.request import Split
from pdkv.text import Tokenizer

Cancelled = Callable[[], bool]
"""Whether the result is no longer wanted; called between two prompts."""


def check_wanted(cancelled: Cancelled) -> None:
    """Raise RequestAborted for what is no longer wanted."""
    if cancelled():
        raise RequestAborted("the client went away", request_id="")


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
    pool: str = ""  # that runs requests for it; "": the launch's own engines
    others: Sequence["ServedModel"] = ()  # of the launch's own: the models of pools
    shares: Mapping[str, float] = field(default_factory=dict)  # percent of its requests that pools run, now
    down: Sequence[str] = ()  # pools without engines that serve, now

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def usable(self, allowed: Sequence[str] = ()) -> "list[ServedModel]":
        """This model and those of pools, as far as a key may use them; `allowed` names some of each; empty: all."""
        return [m for m in (self, *self.others) if not allowed or not set(allowed).isdisjoint(m.names)]

    def named(self, name: str | None, allowed: Sequence[str] = ()) -> "ServedModel":
        """The model of this name; without one, this model. Raises InvalidRequest (404) if a key may not use it."""
        for model in self.usable(allowed):
            if name in model.names or (name is None and model is self):
                return model
        known = ", ".join(repr(each) for model in self.usable(allowed) for each in model.names)
        wanted = clip(self.name if name is None else name)
        raise InvalidRequest(
            f"the model {wanted!r} does not exist; this server has {known or 'none for this key'}",
            param="model",
            status=404,
            code="model_not_found",
        )

    def split(self, key: bytes, allowed: Sequence[str] = ()) -> Split:
        """Whether a pool runs a request for this model. `key`: what requests that the same one should run share."""
        digest = hashlib.blake2b(key, digest_size=8, person=b"pdkv-split").digest()
        usable = {model.pool for model in self.usable(allowed)} - {*self.down}
        return Split(int.from_bytes(digest) / 2**64 * 100.0, self.shares, sorted(self.shares.keys() - usable))

    def taken_up(self, pool: str) -> "ServedModel":
        """This model for a request that a pool ("": none) began to run, whatever the split is now."""
        return replace(self, shares={pool: 100.0} if pool else {}, down=())

    def run_by(self, pool: str) -> "ServedModel":
        """The model of a pool under this one's names."""
        return next((replace(model, names=self.names) for model in self.others if model.pool == pool), self)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is not in the vocabulary of {self.vocab_size}", param=param
            )
