"""From a typed OpenAI request to what is generated: every check, the chat template, the tokenizer.

Nothing here awaits: small bodies are prepared on the event loop, others on a thread of `router/text_pool.py`. Counts
and lengths are checked before anything is done per choice, prompt, message or character.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import msgspec

from pdkv.errors import InvalidRequest, RequestAborted
from pdkv.limits import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PROMPT_LOGPROBS,
    MAX_TOTAL_PROMPT_TOKENS,
    check_cache_salt,
    clip,
)
from pdkv.router.http.protocol import ChatBody, CompletionBody, Message
from pdkv.sampling_params import SamplingParams
from pdkv.text import StopAutomaton, Tokenizer

SAMPLE_CHARS_PER_TOKEN = 16
"""Of a text with more characters per token of the model's length, the beginning is tokenized first."""

Cancelled = Callable[[], bool]
"""Whether nobody waits for the result any more; asked between two prompts."""

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and output together
    sampling_defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # of SamplingParams, where a request says nothing

    @property
    def max_prompt_chars(self) -> int:
        """No text with more characters can fit into the model's length."""
        return self.max_model_len * self.tokenizer.max_token_chars

    def with_max_model_len(self, max_model_len: int) -> "ServedModel":
        """The same model with another length."""
        return replace(self, max_model_len=max_model_len)


class Prompt(NamedTuple):
    """One prompt."""

    token_ids: list[int]
    text: str | None  # as the client wrote it; None: it gave token ids


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: choice j of prompt i is number i * n + j of the reply."""

    chat: bool
    prompts: list[Prompt]
    params: SamplingParams  # of every choice; where the client gave no seed, one is drawn per prompt
    stops: StopAutomaton | None = None  # of params.stop
    n: int
    stream: bool
    include_usage: bool
    echo: bool = False
    prompt_only: bool = False  # max_tokens 0: one token is generated and not shown
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    num_prompt_logprobs: int | None = None  # asked for by name; echo has its own way to show them
    cache_salt: str = ""
    priority: int = 0


def prepare_completion(body: CompletionBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check and tokenize a completions request.

    Raises:
        InvalidRequest: names the field and what was expected of it.
        RequestAborted: it was cancelled meanwhile.
    """
    _check_model(body.model, model)
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
    prompts = _prompts(body.prompt, params.n, model, cancelled)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    _check_length(longest, params.max_tokens if body.max_tokens else None, model, "prompt")
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    _check_total(num_tokens, params.n, "prompt")
    _check_prompt_logprobs(num_tokens, body.prompt_logprobs, params.n, "prompt_logprobs")
    _check_prompt_logprobs(num_tokens, body.logprobs if echo else None, params.n, "logprobs")
    return _job(body, prompts, params, chat=False, echo=echo, prompt_only=prompt_only)


def prepare_chat(body: ChatBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check, render and tokenize a chat request; raises as `prepare_completion`."""
    _check_model(body.model, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
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
    _check_messages(body.messages, model)
    text = model.tokenizer.render_chat([_message(message) for message in body.messages])
    token_ids = _encode(text, model, "messages", cancelled, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequest("messages must not be empty: the prompt has no tokens", param="messages")
    _check_length(len(token_ids), max_tokens, model, "messages")
    _check_total(len(token_ids), params.n, "messages")
    _check_prompt_logprobs(len(token_ids), body.prompt_logprobs, 1, "prompt_logprobs")
    return _job(body, [Prompt(token_ids, text)], params, chat=True)


def _job(
    body: CompletionBody | ChatBody,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    echo: bool = False,
    prompt_only: bool = False,
) -> Job:
    stream = body.stream or False
    if body.stream_options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return Job(
        chat=chat,
        prompts=prompts,
        params=msgspec.structs.replace(params, n=1),
        stops=StopAutomaton(params.stop) if params.stop else None,
        n=params.n,
        stream=stream,
        include_usage=body.stream_options is not None and (body.stream_options.include_usage or False),
        echo=echo,
        prompt_only=prompt_only,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=body.return_token_ids or False,
        num_prompt_logprobs=body.prompt_logprobs,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )


# --- checks -------------------------------------------------------------------------------------------------------


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        raise unknown_model(name, model)


def unknown_model(name: str, model: ServedModel) -> InvalidRequest:
    """HTTP 404."""
    error = InvalidRequest(
        f"the model {clip(name)!r} does not exist; this server has {model.name!r}", param="model", status=404
    )
    error.code = "model_not_found"
    return error


def _sampling_params(
    body: CompletionBody | ChatBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters as the client gave them, else the model's defaults, in their ranges."""
    given: dict[str, Any] = {name: value for name, value in model.sampling_defaults.items() if name in _SAMPLING_FIELDS}
    given |= {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    stop = body.stop
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    try:
        params.validate()
    except InvalidRequest as error:
        name = error.param or ""
        theirs = _client_name(name, body)
        raise InvalidRequest(str(error).replace(name, theirs, 1), param=theirs) from None
    return params


def _client_name(param: str, body: CompletionBody | ChatBody) -> str:
    """The field that the client wrote for one of SamplingParams'."""
    if isinstance(body, ChatBody):
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    if param == "prompt_logprobs" and body.prompt_logprobs is None:
        return "logprobs"
    return param


def _check_params(params: SamplingParams, body: CompletionBody | ChatBody, model: ServedModel) -> None:
    """What SamplingParams cannot check by itself: it knows no model."""
    if body.cache_salt is not None:
        check_cache_salt(body.cache_salt)
    _check_token_ids(params.stop_token_ids, model, "stop_token_ids")
    _check_token_ids(tuple(params.logit_bias), model, "logit_bias")
    if params.min_tokens > model.max_model_len:
        raise InvalidRequest(
            f"min_tokens must be at most the model's length ({model.max_model_len}), got {params.min_tokens}",
            param="min_tokens",
        )
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {body.priority}", param="priority")


def _check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < model.vocab_size)
        raise InvalidRequest(f"{param}: token id {wrong} is not in the vocabulary of {model.vocab_size}", param=param)


def _check_length(num_prompt: int, max_tokens: int | None, model: ServedModel, param: str) -> None:
    """The prompt and the output that was asked for fit into the model's length."""
    limit = model.max_model_len
    if num_prompt >= limit:
        raise _too_long(
            f"the prompt has {num_prompt} tokens, but the model's length is {limit} tokens "
            "and at least one must be generated",
            param,
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise _too_long(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's length of {limit} tokens",
            "max_tokens",
        )


def _too_long(message: str, param: str) -> InvalidRequest:
    error = InvalidRequest(message, param=param)
    error.code = "context_length_exceeded"
    return error


def _check_total(num_tokens: int, n: int, param: str) -> None:
    """Every choice's Submit carries its prompt."""
    if num_tokens * n > MAX_TOTAL_PROMPT_TOKENS:
        raise InvalidRequest(
            f"prompt tokens times n must be at most {MAX_TOTAL_PROMPT_TOKENS}, got {num_tokens} * {n}", param=param
        )


def _check_prompt_logprobs(num_tokens: int, num_logprobs: int | None, num_shown: int, param: str) -> None:
    """They are in the reply `num_shown` times."""
    if num_logprobs is not None and num_tokens * (num_logprobs + 1) * num_shown > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{param}: the reply would hold more than {MAX_PROMPT_LOGPROBS} logprobs of prompt tokens: "
            f"{num_tokens} tokens, {num_logprobs} + 1 of each, {num_shown} times",
            param=param,
        )


def _check_messages(messages: Sequence[Message], model: ServedModel) -> None:
    """Counts and characters, before the template sees them."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    num_parts = sum(1 if isinstance(message.content, str) else len(message.content) for message in messages)
    if max(len(messages), num_parts) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must have at most {MAX_MESSAGES} turns and as many text parts, "
            f"got {len(messages)} and {num_parts}",
            param="messages",
        )
    num_chars = sum(
        len(message.content) if isinstance(message.content, str) else sum(len(part.text) for part in message.content)
        for message in messages
    )
    _check_chars(num_chars, model, "messages")


# --- prompts ------------------------------------------------------------------------------------------------------


def _prompts(
    prompt: str | list[str | int | list[int]], n: int, model: ServedModel, cancelled: Cancelled
) -> list[Prompt]:
    """A text, a list of texts, token ids or a list of them."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not parts:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if isinstance(parts[0], int):
        _check_length(len(parts), None, model, "prompt")
    elif len(parts) * n > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}, got {len(parts)} * {n}", param="prompt")
    kinds = set(map(type, parts))
    if len(kinds) > 1:
        raise InvalidRequest("prompt must be of one kind: texts, token ids, or lists of token ids", param="prompt")
    if kinds == {str}:
        texts = cast(list[str], parts)
        for text in texts:
            _check_chars(len(text), model, "prompt")
        prompts = [Prompt(_encode(text, model, "prompt", cancelled, add_special_tokens=True), text) for text in texts]
    else:
        prompts = [Prompt(ids, None) for ids in cast(list[list[int]], [parts] if kinds == {int} else parts)]
        _check_length(max(len(token_ids) for token_ids, _ in prompts), None, model, "prompt")
        for token_ids, _ in prompts:
            _check_token_ids(token_ids, model, "prompt")
    if any(not token_ids or text == "" for token_ids, text in prompts):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return prompts


def _check_chars(num_chars: int, model: ServedModel, param: str) -> None:
    """Before a text is tokenized: whether it can fit at all."""
    if num_chars > model.max_prompt_chars:
        raise _too_long(
            f"the prompt has {num_chars} characters, but the model's length is {model.max_model_len} tokens "
            f"of at most {model.tokenizer.max_token_chars} characters",
            param,
        )


def _encode(text: str, model: ServedModel, param: str, cancelled: Cancelled, *, add_special_tokens: bool) -> list[int]:
    """Tokens of a text.

    The tokenizer cannot be interrupted, so of a text that will hardly fit the beginning comes first: if that alone has
    twice the model's length, no ending can make it fit (what follows changes the last few of its tokens).

    Raises:
        InvalidRequest: it cannot fit.
        RequestAborted: it was cancelled meanwhile.
    """
    _check_chars(len(text), model, param)
    limit = model.max_model_len
    sample = text[: limit * SAMPLE_CHARS_PER_TOKEN]
    for piece in (sample, text) if len(sample) < len(text) else (text,):
        if cancelled():
            raise RequestAborted("the client went away", request_id="")
        token_ids = model.tokenizer.encode(piece, add_special_tokens=add_special_tokens)
        if piece is not text and len(token_ids) >= 2 * limit:
            raise _too_long(
                f"the prompt has {len(text)} characters, the first {len(piece)} of them have {len(token_ids)} tokens, "
                f"but the model's length is {limit} tokens",
                param,
            )
    return token_ids


def _message(message: Message) -> dict[str, str]:
    """A turn as chat templates expect it: parts joined by newlines."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    turn = {"role": message.role, "content": text}
    if message.name is not None:
        turn["name"] = message.name
    return turn
