"""How tokens are drawn and when generation ends; shared by the router, the engines and the offline API."""

import enum
import math
from collections.abc import Callable
from typing import Any

import msgspec

from pdkv.base.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    check_bad_words,
    check_count,
    check_processor_arguments,
    check_stops,
    clip,
)
from pdkv.errors import InvalidRequest
from pdkv.sampling.shape import Grammar, StructuredOutputs

MAX_LOGPROBS = 20

GREEDY_BELOW = 1e-5
"""Lower temperatures are 0: vLLM's _SAMPLING_EPS."""


class RequestOutputKind(enum.StrEnum):
    """What the outputs of an `AsyncLLM` have, as vLLM calls it."""

    CUMULATIVE = "cumulative"  # all so far
    DELTA = "delta"  # what is new since the last output
    FINAL_ONLY = "final_only"  # all, once, at the end


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request; field names are OpenAI's and vLLM's.

    `seed` is drawn by the router (or `LLM`) where the client gave none, so that on the wire it is always set:
    the token at output position i is a pure function of (seed, choice, i) and the logits.
    """

    temperature: float = 1.0  # below GREEDY_BELOW: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16  # None = up to the model's length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is drawn; None = all may be
    bad_words: tuple[str, ...] = ()  # texts that the output may not hold; whoever has the tokenizer makes them:
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the last token of each never follows its others
    logits_processors: dict[str, dict[str, Any]] = {}  # arguments by name: JSON objects, as the processor takes them
    logprobs: int | None = None  # number of alternatives per output token; 0 = the sampled token only
    prompt_logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of `AsyncLLM`; LLM and the router look at none
    structured_outputs: StructuredOutputs | None = None  # the answer's shape; whoever checks it makes of it:
    grammar: Grammar | None = None  # no token is drawn that it does not allow

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def checked(self) -> "SamplingParams":
        """The same, with values of their fields' types; None is the default as in vLLM, and a text one stop string or
        bad word. Raises InvalidRequest naming the first field of another type, or out of its range.
        """
        values: dict[str, Any] = {}
        for field in _FIELDS:
            value = getattr(self, field.name)
            if value is field.default or (value is None and field.name in _NONE_IS_DEFAULT):
                continue
            one_text = isinstance(value, str) and field.name in ("stop", "bad_words")
            values[field.name] = as_type((value,) if one_text else value, field.type, field.name)
        params = SamplingParams(**values)
        params.validate()
        return params

    def validate(self) -> None:
        """Raise InvalidRequest naming the first field that is out of its range."""
        for name, accepts, expected in _RANGES:
            value = getattr(self, name)
            if value is not None and not accepts(value):
                raise InvalidRequest(f"{name} must be {expected}, got {value!r}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        check_stops(self.stop)
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        check_bad_words(self.bad_words)
        check_processor_arguments(self.logits_processors)
        self._check_token_lists()
        self._check_grammar()
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias must be in [-100, 100], got {bias!r} for token {token_id}", param="logit_bias"
                )

    def _check_grammar(self) -> None:
        if self.grammar is not None:
            self.grammar.validate()
        if self.ignore_eos and (self.grammar is not None or self.structured_outputs is not None):
            raise InvalidRequest(
                "ignore_eos must be false with structured_outputs: the answer ends where its grammar does",
                param="ignore_eos",
            )

    def _check_token_lists(self) -> None:
        if self.allowed_token_ids is not None:
            check_count("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must not be empty: leave it out where all tokens are allowed",
                    param="allowed_token_ids",
                )
        if self.bad_words_token_ids:
            words = self.bad_words_token_ids
            num_tokens = sum(map(len, words))
            if len(words) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS or not all(words):
                raise InvalidRequest(
                    f"bad_words must be at most {MAX_BAD_WORDS} token sequences with at most {MAX_BAD_WORD_TOKENS} "
                    f"tokens in all, none of them empty; got {len(words)} with {num_tokens} tokens "
                    "(a word counts twice where a space before it makes another token)",
                    param="bad_words",
                )


def as_type(value: Any, kind: Any, name: str) -> Any:
    """A field's value, which must have that type, as in a body over HTTP; numbers may be numpy's.

    Raises InvalidRequest naming field and value.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(value, enc_hook=_of_numpy), kind)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        choices = f", one of {', '.join(kind)} was expected" if kind is RequestOutputKind else ""
        raise InvalidRequest(f"{name}={clip(repr(value))}: {error}{choices}", param=name) from None


def _of_numpy(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"a value of type {type(value).__name__} is not expected")
    return value.tolist()


_FIELDS = msgspec.structs.fields(SamplingParams)
_NONE_IS_DEFAULT = ("stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors")

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda v: v >= 0.0 and math.isfinite(v), "a finite number of at least 0"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    ("top_k", lambda v: -1 <= v < 2**31, "-1 or 0 (all), or at least 1 and below 2**31"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    ("repetition_penalty", lambda v: v > 0.0 and math.isfinite(v), "a finite number above 0"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("seed", lambda v: -(2**63) <= v < 2**63, "a 64-bit integer"),
    ("n", lambda v: 1 <= v <= MAX_N, f"in [1, {MAX_N}]"),
    ("max_tokens", lambda v: 1 <= v < 2**31, "at least 1 and below 2**31"),
    ("min_tokens", lambda v: 0 <= v < 2**31, "at least 0 and below 2**31"),
    ("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
    ("prompt_logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
)
