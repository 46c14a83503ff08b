"""Turns a typed OpenAI request into a job for the engines: every check, the chat template, the tokenizer.

Nothing here awaits: small bodies are prepared on the event loop, others on a thread of `text_pool.py`. Counts and
lengths are checked before anything is done per choice, prompt, message or character.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.base.limits import (
    MAX_AFFINITY_BYTES,
    MAX_GRAMMAR_BYTES_OF_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_SHOWN_PROMPT_TOKENS,
    MAX_TOTAL_PROMPT_TOKENS,
    check_cache_salt,
    utf8_bytes,
)
from pdkv.errors import InvalidRequest
from pdkv.grammar.schema_time import SchemaTime
from pdkv.parsers.answer import AnswerFormat
from pdkv.parsers.answer_grammar import AnswerRules
from pdkv.router.http.read.bodies import ChatBody, CompletionBody
from pdkv.router.http.read.chat import read_conversation
from pdkv.router.http.read.prompts import Prompt, check_length, encode, longest, read_prompts, read_truncation
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.read.shapes import read_shape
from pdkv.router.http.read.tools import answer_format, call_rules, check_tools
from pdkv.router.request import Common
from pdkv.sampling.logits_processors import check_known
from pdkv.sampling.params import PARAMS_IN_BODIES, SamplingParams
from pdkv.sampling.shape import Grammar
from pdkv.text import StopAutomaton, with_bad_word_ids
from pdkv.wire.messages import PROBE_SALT

_SAMPLING_FIELDS = ("n", *PARAMS_IN_BODIES)
_NEUTRAL = SamplingParams()


class PooledForm(NamedTuple):
    """How what is pooled of prompts is sent: as embeddings or, of documents, as a ranking of them."""

    dimensions: int | None = None
    normalize: bool = True
    base64: bool = False
    documents: Sequence[str] = ()
    top_n: int | None = None
    shows_documents: bool = True


class Job(Common, frozen=True, kw_only=True):
    """A checked request: choice j of prompt i is number i * n + j of the reply."""

    chat: bool
    prompts: list[Prompt]
    params: SamplingParams  # of every choice; without a seed from the client, one is drawn per prompt
    grammar_param: str = ""  # the field that asks for params.grammar
    stops: StopAutomaton | None = None  # of params.stop
    shows_stop: bool = False  # the string that ends the text is part of it
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool = False  # usage in every chunk, too
    echo: bool = False
    prompt_only: bool = False  # max_tokens 0: one token is generated but not shown
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_ids: bool = False  # logprobs name tokens by their ids
    num_prompt_logprobs: int | None = None  # requested by name; echo has its own way to show them
    served: ServedModel | None = None  # by whose text it is read and answered
    answer: AnswerFormat | None = None  # how its calls and reasoning are told apart from its text; None: it is all text
    own_tools: Mapping[str, Any] = {}  # of /v1/responses: the client's names of its functions
    # of /v1/responses: keeps a response by its id, and the items of its output
    keep: Callable[[str, bytes], None] | None = None
    pooled: PooledForm = PooledForm()  # with params.pooling
    repeated: bytes = b""  # of /v1/responses: what its reply repeats of the request, a JSON object in ASCII


def prepare_completion(body: CompletionBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check and tokenize a completions request.

    Raises:
        InvalidRequest: names the field and what was expected.
        RequestAborted: the request was cancelled.
    """
    echo = body.echo or False
    prompt_only = echo and body.max_tokens == 0
    num_prompt_logprobs = body.prompt_logprobs
    if echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    params = _sampling_params(
        body,
        model,
        max_tokens=1 if prompt_only else 16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    _check_params(params, body, model)
    if body.best_of is not None and body.best_of != params.n:
        raise InvalidRequest(
            f"best_of must be n ({params.n}), got {body.best_of}: all choices are returned", param="best_of"
        )
    shape = read_shape(body)
    prompts = read_prompts(
        body.prompt,
        params.n,
        model,
        cancelled,
        add_special_tokens=body.add_special_tokens is not False,
        truncation=read_truncation(body.truncate_prompt_tokens, body.truncation_side, model),
    )
    check_length(longest(prompts), params.max_tokens if body.max_tokens else None, model, "prompt")
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    check_total(num_tokens, params.n, "prompt")
    _check_prompt_logprobs(num_tokens, body.prompt_logprobs, params.n, "prompt_logprobs")
    _check_prompt_logprobs(num_tokens, body.logprobs if echo else None, params.n, "logprobs")
    _check_shown(num_tokens, params.n, body.return_token_ids or False, "return_token_ids")
    _check_shown(num_tokens, params.n, echo, "echo")
    rules = AnswerRules(shape=shape)
    grammar = _grammar(rules, model, len(prompts) * params.n, cancelled)
    return _job(body, prompts, params, rules, None if prompt_only else grammar, echo=echo, prompt_only=prompt_only)


def prepare_chat(body: ChatBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check, render and tokenize a chat request; raises the same as `prepare_completion`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and max_tokens != body.max_tokens:
        raise InvalidRequest(
            f"max_tokens ({body.max_tokens}) and max_completion_tokens ({max_tokens}) disagree", param="max_tokens"
        )
    params = _sampling_params(
        body,
        model,
        max_tokens=model.sampling_defaults.get("max_tokens") if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    _check_params(params, body, model)
    tools, shape = check_tools(body, model), read_shape(body)
    truncation = read_truncation(body.truncate_prompt_tokens, body.truncation_side, model)
    prompt = read_conversation(body, model, cancelled, truncation=truncation)
    num_tokens = len(prompt.token_ids)
    check_length(num_tokens, max_tokens, model, "messages")
    check_total(num_tokens, params.n, "messages")
    predicted = _read_prediction(body, model, cancelled)
    check_total(num_tokens + len(predicted), params.n, "prediction")
    _check_prompt_logprobs(num_tokens, body.prompt_logprobs, 1, "prompt_logprobs")
    _check_shown(num_tokens, params.n, body.return_token_ids or False, "return_token_ids")
    answer = answer_format(body, prompt, tools, model)
    rules = AnswerRules(
        shape=shape,
        calls=call_rules(body, tools, model),
        reasoning_parser=model.reasoning_parser,
        prompt="closed" if answer is None else answer.prompt,
    )
    grammar = _grammar(rules, model, params.n, cancelled)
    job = _job(body, [prompt], params, rules, grammar, answer=answer)
    return msgspec.structs.replace(job, prediction_token_ids=predicted) if predicted else job


def _job(
    body: CompletionBody | ChatBody,
    prompts: list[Prompt],
    params: SamplingParams,
    rules: AnswerRules,
    grammar: Grammar | None,
    *,
    echo: bool = False,
    prompt_only: bool = False,
    answer: AnswerFormat | None = None,
) -> Job:
    stream, options = body.stream or False, body.stream_options
    if body.stream_options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return Job(
        chat=isinstance(body, ChatBody),
        prompts=prompts,
        params=msgspec.structs.replace(params, n=1, grammar=grammar),
        grammar_param=rules.param,
        stops=StopAutomaton(params.stop) if params.stop else None,
        shows_stop=body.include_stop_str_in_output or False,
        n=params.n,
        stream=stream,
        include_usage=options is not None and (options.include_usage or False),
        continuous_usage=bool(options is not None and options.include_usage and options.continuous_usage_stats),
        echo=echo,
        prompt_only=prompt_only,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=body.return_token_ids or False,
        return_tokens_as_ids=body.return_tokens_as_token_ids or False,
        num_prompt_logprobs=body.prompt_logprobs,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        affinity=body.prompt_cache_key or body.session_id or "",
        answer=answer,
    )


def _read_prediction(body: ChatBody, model: ServedModel, cancelled: Cancelled) -> list[int]:
    """The tokens of the expected answer. Raises InvalidRequest for one that is longer than any answer."""
    if body.prediction is None:
        return []
    text, limit = body.prediction.text, model.max_model_len
    if len(text) > limit * model.tokenizer.max_token_chars:
        raise InvalidRequest(f"prediction has {len(text)} characters, more than {limit} tokens", param="prediction")
    token_ids = encode(text, model, "prediction", cancelled, add_special_tokens=False)
    if len(token_ids) > limit:
        raise InvalidRequest(
            f"prediction must have at most {limit} tokens, the model's length, got {len(token_ids)}", param="prediction"
        )
    return token_ids


# --- checks -------------------------------------------------------------------------------------------------------


def _sampling_params(
    body: CompletionBody | ChatBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The client's sampling parameters, or the model's defaults, checked against their ranges."""
    given: dict[str, Any] = {name: value for name, value in model.sampling_defaults.items() if name in _SAMPLING_FIELDS}
    for name in _SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            given[name] = (value,) if isinstance(value, str) else value
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    try:
        params.validate()
        params = with_bad_word_ids(params, model.tokenizer)
    except InvalidRequest as error:
        name = error.param or ""
        theirs = _client_name(name, body)
        raise InvalidRequest(str(error).replace(name, theirs, 1), param=theirs) from None
    return params


def _grammar(rules: AnswerRules, model: ServedModel, num_choices: int, cancelled: Cancelled) -> Grammar | None:
    """The shape of an answer, sent to engines in the Submit of every choice."""
    grammar = rules.grammar(model.tokenizer.knows, SchemaTime(cancelled))
    if grammar is not None and "structured_outputs" in model.lacks:
        raise lacking(rules.param, model.lacks["structured_outputs"])
    size = 0 if grammar is None else len(grammar.text)
    if size * num_choices > MAX_GRAMMAR_BYTES_OF_CHOICES:
        raise InvalidRequest(
            f"the grammar's size times the number of choices must be at most {MAX_GRAMMAR_BYTES_OF_CHOICES}, got "
            f"{size} * {num_choices}",
            param="n",
        )
    return grammar


def _client_name(param: str, body: CompletionBody | ChatBody) -> str:
    """The client's name of a field of SamplingParams."""
    if isinstance(body, ChatBody):
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    if param == "prompt_logprobs" and body.prompt_logprobs is None:
        return "logprobs"
    return param


def _check_params(params: SamplingParams, body: CompletionBody | ChatBody, model: ServedModel) -> None:
    """Check what SamplingParams cannot, since it knows no model."""
    if body.cache_salt is not None:
        check_cache_salt(body.cache_salt)
        if body.cache_salt == PROBE_SALT:
            raise InvalidRequest("cache_salt has a value that is reserved for the router", param="cache_salt")
    for name in ("prompt_cache_key", "session_id"):
        key = getattr(body, name)
        if key is not None and utf8_bytes(key, MAX_AFFINITY_BYTES) > MAX_AFFINITY_BYTES:
            raise InvalidRequest(f"{name} must have at most {MAX_AFFINITY_BYTES} bytes of UTF-8", param=name)
    model.check_token_ids(params.stop_token_ids, "stop_token_ids")
    model.check_token_ids(tuple(params.logit_bias), "logit_bias")
    model.check_token_ids(params.allowed_token_ids or (), "allowed_token_ids")
    check_known(params.logits_processors, model.logits_processors)
    for name, engine in model.lacks.items():
        if _asks(name, params, body):
            raise lacking(_client_name(name, body), engine)
    if params.min_tokens > model.max_model_len:
        raise InvalidRequest(
            f"min_tokens must be at most the model's length ({model.max_model_len}), got {params.min_tokens}",
            param="min_tokens",
        )
    check_priority(body.priority)


def check_priority(priority: int | None) -> None:
    """Raise InvalidRequest for more than 32 bits."""
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {priority}", param="priority")


def _asks(name: str, params: SamplingParams, body: CompletionBody | ChatBody) -> bool:
    """Whether the client asks for something by a field; not where it has no effect."""
    if name in ("logprobs", "prompt_logprobs"):
        return getattr(params, name) is not None
    given = getattr(body, name, None)
    has_effect = given is not None and given not in ([], {}, getattr(_NEUTRAL, name, ""))
    return has_effect and not (name == "seed" and params.greedy)


def lacking(name: str, engine: str) -> InvalidRequest:
    """The error for a field that an engine lacks."""
    return InvalidRequest(f"{name} is not possible here: {engine} lacks it (docs/other-engines.md)", param=name)


def check_total(num_tokens: int, n: int, param: str) -> None:
    """Check the tokens of all choices together: every choice's Submit carries its prompt."""
    if num_tokens * n > MAX_TOTAL_PROMPT_TOKENS:
        raise InvalidRequest(
            f"prompt tokens times n must be at most {MAX_TOTAL_PROMPT_TOKENS}, got {num_tokens} * {n}", param=param
        )


def _check_shown(num_tokens: int, n: int, shown: bool, param: str) -> None:
    """Check the prompt tokens to show: each choice of the reply shows its prompt."""
    if shown and num_tokens * n > MAX_SHOWN_PROMPT_TOKENS:
        raise InvalidRequest(
            f"{param}: the reply would show more than {MAX_SHOWN_PROMPT_TOKENS} prompt tokens: {num_tokens} * {n}",
            param=param,
        )


def _check_prompt_logprobs(num_tokens: int, num_logprobs: int | None, num_shown: int, param: str) -> None:
    """Check the prompt's logprobs, which are in the reply `num_shown` times."""
    if num_logprobs is not None and num_tokens * (num_logprobs + 1) * num_shown > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{param}: the reply would hold more than {MAX_PROMPT_LOGPROBS} logprobs of prompt tokens: "
            f"{num_tokens} tokens, {num_logprobs} + 1 of each, {num_shown} times",
            param=param,
        )
