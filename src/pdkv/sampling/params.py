"""How tokens are drawn and when generation ends; shared by the router, the engines and the offline API."""

import copy
import enum
import sys
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_LOGIT_BIAS, MAX_N, MAX_STOPS, check_bytes, check_processor_arguments, clip
from pdkv.base.options import Option, options_of
from pdkv.base.vllm_api import known_arguments
from pdkv.errors import InvalidRequest
from pdkv.sampling.shape import Grammar, StructuredOutputs

MAX_LOGPROBS = 20

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024
"""The most token sequences that one request may forbid, and their tokens in total: they are compared with the output in
each step (as in vLLM). A bad word may be two sequences, see `pdkv.text.bad_words`.
"""

MAX_TEXT_BYTES = 4096
"""Bytes of UTF-8 of one request's stop strings, since an automaton has a state per character; and of its bad words."""

DRAWS = 2
"""Version of what is drawn with a seed. It rises with each change of that, if only of last digits: a sampled stream
does not migrate between engines of unequal ones. Version 1 inverted the distribution's CDF, 2 is an exponential race.
"""

GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0: vLLM's _SAMPLING_EPS."""


Pooling = Literal["last", "mean", "logits"]
"""What is returned of a prompt: its last hidden state, the mean of all of them, or the last logits of the tokens in
`allowed_token_ids`. Hidden states are those behind the last norm.
"""


class RequestOutputKind(enum.StrEnum):
    """The content of outputs of an `AsyncLLM`, by vLLM's names."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # everything since the last output
    FINAL_ONLY = "final_only"  # everything, once, at the end


def _param(help: str = "", *, body: Literal["any", "none"] = "any", of_model: bool = False, **bounds: Any) -> Meta:
    """Describe a parameter besides its type.

    Args:
        help: text of its flag in `pd generate`; "": it has none.
        body: "any": each request over HTTP has a field of its name and type; "none": some may declare their own.
        of_model: whether a model's generation_config.json may give its default.
        bounds: of the value, or of its length.
    """
    return Meta(description=help, extra={"body": body, "of_model": of_model}, **bounds)


_MOST = sys.float_info.max  # infinity is not a value
_Text = Annotated[str, Meta(min_length=1)]
_Word = Annotated[str, Meta(pattern=r"\S")]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class _ParamsType(type(msgspec.Struct)):  # type: ignore[misc]
    """Provides the descriptions that fields lack."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        return super().__call__(*args, **known_arguments(cls.__name__, given, cls.__struct_fields__))


class SamplingParams(msgspec.Struct, metaclass=_ParamsType, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """The sampling parameters of one request; field names are OpenAI's and vLLM's.

    A parameter's name, type, range and default are defined by its field alone: requests over HTTP, `pd generate`, a
    model's generation_config.json, messages to engines and all checks use it.

    `seed` is drawn by the router (or `LLM`) if the client gave none, so that on the wire it is always set: the token at
    output position i is a pure function of (seed, choice, i) and the logits.
    """

    # fmt: off
    temperature: Annotated[float, _param("0 = greedy", of_model=True, ge=0, le=_MOST)] = 1.0  # see GREEDY_BELOW
    top_p: Annotated[float, _param("probability mass to draw from", of_model=True, gt=0, le=1)] = 1.0
    top_k: Annotated[int, _param("number of most likely tokens to draw from; 0 or -1: all",
                                 of_model=True, ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, _param("minimum probability of a token, relative to the most likely one",
                                   of_model=True, ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, _param("above 1: tokens of the prompt and the output become less likely",
                                                of_model=True, gt=0, le=_MOST)] = 1.0
    presence_penalty: Annotated[float, _param("above 0: tokens of the output become less likely",
                                              of_model=True, ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, _param(
        "above 0: tokens become less likely with each occurrence in the output", of_model=True, ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[int, _Bias], _param(max_length=MAX_LOGIT_BIAS)] = {}
    seed: Annotated[int, _param("the same seed gives the same tokens", ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, _param("number of completions per prompt", body="none", ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, _param("maximum number of tokens per completion", body="none", of_model=True,
                                      ge=1, lt=2**31)] | None = 16  # None: up to the model's length
    min_tokens: Annotated[int, _param("minimum number of tokens before a completion may end", ge=0, lt=2**31)] = 0
    stop: Annotated[tuple[_Text, ...], _param("texts that end a completion", max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], _param("token ids that end a completion", max_length=256)] = ()
    ignore_eos: Annotated[bool, _param("continue past the end-of-sequence token")] = False
    allowed_token_ids: Annotated[tuple[int, ...], _param("the only token ids to draw from", min_length=1,
                                                         max_length=8192)] | None = None  # None: all
    bad_words: Annotated[tuple[_Word, ...], _param("words that the output must not contain",
                                                   max_length=MAX_BAD_WORDS)] = ()  # the tokenizer makes of them:
    bad_words_token_ids: Annotated[tuple[tuple[int, ...], ...], _param(body="none")] = ()  # the last token of each
    # never follows its others
    logits_processors: Annotated[dict[str, dict[str, Any]], _param(max_length=8)] = {}  # arguments
    # by name: JSON objects, as the processor takes them
    logprobs: Annotated[int, _param("number of alternatives to report per token (with --json)", body="none",
                                    ge=0, le=MAX_LOGPROBS)] | None = None  # 0: only the sampled token
    prompt_logprobs: Annotated[int, _param(body="none", ge=0, le=MAX_LOGPROBS)] | None = None
    output_kind: Annotated[RequestOutputKind, _param(body="none")] = RequestOutputKind.CUMULATIVE  # of `AsyncLLM`
    structured_outputs: Annotated[StructuredOutputs, _param(body="none")] | None = None  # what checks it makes of it:
    grammar: Annotated[Grammar, _param(body="none")] | None = None  # no token is drawn that it does not allow
    skip_reading_prefix_cache: Annotated[bool, _param(body="none")] | None = None  # compute all of the prompt
    # of `LLM` and `AsyncLLM`, like output_kind:
    detokenize: Annotated[bool, _param(body="none")] = True  # False: no text is made
    skip_special_tokens: Annotated[bool, _param(body="none")] = True
    include_stop_str_in_output: Annotated[bool, _param(body="none")] = False  # the text ends with it
    truncate_prompt_tokens: Annotated[int, _param(body="none", ge=-1)] | None = None  # its last ones; -1: that fit
    spaces_between_special_tokens: Annotated[bool, _param(body="none")] = True  # neutral: tokenizer.json decides
    best_of: Annotated[int, _param(body="none")] | None = None  # n
    guided_decoding: Annotated[StructuredOutputs, _param(body="none")] | None = None  # structured_outputs
    extra_args: Annotated[dict[str, Any], _param(body="none")] | None = None  # empty
    pooling: Annotated[Pooling, _param(body="none")] | None = None  # what is wanted instead of tokens
    # fmt: on

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Make parameters from fields that may be None, which means the default, or no limit for max_tokens."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def computes_prompt(self) -> bool:
        """Whether all tokens of the prompt must be computed rather than found cached, as for prompt logprobs."""
        return self.prompt_logprobs is not None or bool(self.skip_reading_prefix_cache) or self.pooling == "mean"

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        """Whether any penalty is in effect."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def checked(self) -> "SamplingParams":
        """The same parameters with values converted to their fields' types; None means the default as in vLLM, a single
        text one stop string or bad word, and a seed of -1 none. Raises InvalidRequest that names the first invalid
        field.
        """
        values: dict[str, Any] = {}
        for name, item in _PARAMS.items():
            value = getattr(self, name)
            if value is not item.default and value is not None:
                one_text = isinstance(value, str) and name in ("stop", "bad_words")
                value = 1 if value is True and item.base is int and "logprobs" in name else value
                values[name] = _as_param((value,) if one_text else value, item)
            elif value is None and item.optional:
                values[name] = None  # for max_tokens it means no limit
        return SamplingParams(**values)._settled()

    def _settled(self) -> "SamplingParams":
        self._check_offline()
        self.structured_outputs = self.structured_outputs or self.guided_decoding
        self.seed = None if self.seed == -1 else self.seed
        self._check_together()
        return self

    def _check_offline(self) -> None:
        """Raise InvalidRequest for values that only concern `LLM` and `AsyncLLM`, and are not supported."""
        for wrong, name, expected in (
            (self.best_of not in (None, self.n), "best_of", f"n ({self.n}): all choices are returned"),
            (self.truncate_prompt_tokens == 0, "truncate_prompt_tokens", "-1 (as many as fit) or at least 1"),
            (self.extra_args, "extra_args", "empty: use logits_processors={name: arguments} instead"),
            (not self.detokenize and self.stop, "detokenize", "true with stop strings, which are looked for in text"),
            (self.structured_outputs and self.guided_decoding, "guided_decoding", "absent with structured_outputs"),
        ):
            if wrong:
                raise InvalidRequest(f"{name} must be {expected}, got {getattr(self, name)!r:.80}", param=name)

    def validate(self) -> None:
        """Raise InvalidRequest that names the first field out of its range."""
        try:
            _decode(msgspec.msgpack.encode(self))._settled()
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
            self.checked()  # which converts field by field

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        if self.pooling is not None and self.max_tokens != 1:
            raise InvalidRequest(f"max_tokens must be 1 with pooling, got {self.max_tokens}", param="max_tokens")
        check_bytes("stop", self.stop, MAX_TEXT_BYTES)
        check_bytes("bad_words", self.bad_words, MAX_TEXT_BYTES)
        check_processor_arguments(self.logits_processors)
        self._check_bad_word_ids()
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.grammar is not None:
            self.grammar.validate()
        if self.ignore_eos and (self.grammar is not None or self.structured_outputs is not None):
            raise InvalidRequest(
                "ignore_eos must be false with structured_outputs: the answer ends where its grammar does",
                param="ignore_eos",
            )

    def _check_bad_word_ids(self) -> None:
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

    Raises InvalidRequest that names field and value.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(value, enc_hook=_of_numpy), kind)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        is_output_kind = getattr(kind, "__origin__", None) is RequestOutputKind
        choices = f", one of {', '.join(RequestOutputKind)} was expected" if is_output_kind else ""
        raise InvalidRequest(f"{name}={clip(repr(value))}: {error}{choices}", param=name) from None


def _of_numpy(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"a value of type {type(value).__name__} is not allowed")
    return value.tolist()


_PARAMS = options_of(SamplingParams)
_decode = msgspec.msgpack.Decoder(SamplingParams).decode


def _as_param(value: Any, item: Option) -> Any:
    """A parameter of the right type and in its range. Raises InvalidRequest."""
    if isinstance(value, int | float):
        whole = item.base is int and isinstance(value, float) and value.is_integer()  # as in JSON
        try:
            return msgspec.convert(int(value) if whole else value, item.kind)
        except msgspec.ValidationError:
            raise InvalidRequest(f"{item.name} must be {item.expected}, got {value!r}", param=item.name) from None
    most = item.bounds.get("max_length")
    if most is not None and isinstance(value, Collection) and len(value) > most:
        raise InvalidRequest(f"{item.name} must have at most {most} entries, got {len(value)}", param=item.name)
    return as_type(value, item.kind, item.name)


PARAMS_IN_BODIES = [name for name, item in _PARAMS.items() if item.details["body"] == "any"]
"""Parameters that are fields of each request over HTTP."""

PARAMS_OF_MODELS = [name for name, item in _PARAMS.items() if item.details["of_model"]]
"""Parameters that may have a model's default."""
