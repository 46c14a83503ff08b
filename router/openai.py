"""From a typed OpenAI request to what is generated: every check, the chat template, the tokenizer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.limits import MAX_CHOICES, check_cache_salt, clip
from pdkv.router.protocol import ChatBody, CompletionBody, Message
from pdkv.sampling_params import SamplingParams
from pdkv.text import Tokenizer

LONG_TEXT = 2_000
"""Characters from which texts are tokenized on a thread: about 3 ms, which other requests would wait."""

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


async def prepare_completion(body: CompletionBody, model: ServedModel) -> Job:
    """Check and tokenize a completions request.

    Raises:
        InvalidRequest: names the field and what was expected of it.
    """
    _check_model(body.model, model)
    echo = body.echo or False
    prompt_only = echo and body.max_tokens == 0
    num_prompt_logprobs = body.prompt_logprobs
    if echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    params = _sampling_params(
        body,
        max_tokens=1 if prompt_only else 16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    _check_params(params, body, model)
    prompts = await _prompts(body.prompt, model)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    _check_length(longest, params.max_tokens if body.max_tokens else None, model, "prompt")
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(
            f"prompts times n must be at most {MAX_CHOICES}, got {len(prompts)} * {params.n}", param="prompt"
        )
    return _job(body, prompts, params, chat=False, echo=echo, prompt_only=prompt_only)


async def prepare_chat(body: ChatBody, model: ServedModel) -> Job:
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
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    _check_params(params, body, model)
    if not body.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    text = model.tokenizer.render_chat([_message(message) for message in body.messages])
    [token_ids] = await _encode([text], model.tokenizer, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequest("messages must not be empty: the prompt has no tokens", param="messages")
    _check_length(len(token_ids), max_tokens, model, "messages")
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
    body: CompletionBody | ChatBody, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters as the client gave them, in their ranges."""
    given: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
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
        error = InvalidRequest(
            f"the prompt has {num_prompt} tokens, but the model's length is {limit} tokens "
            "and at least one must be generated",
            param=param,
        )
    elif max_tokens is not None and num_prompt + max_tokens > limit:
        error = InvalidRequest(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's length of {limit} tokens",
            param="max_tokens",
        )
    else:
        return
    error.code = "context_length_exceeded"
    raise error


# --- prompts ------------------------------------------------------------------------------------------------------


async def _prompts(prompt: str | list[str | int | list[int]], model: ServedModel) -> list[Prompt]:
    """A text, a list of texts, token ids or a list of them."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    kinds = set(map(type, parts))
    if len(kinds) > 1:
        raise InvalidRequest("prompt must be of one kind: texts, token ids, or lists of token ids", param="prompt")
    if kinds == {str}:
        texts = cast(list[str], parts)
        token_lists = await _encode(texts, model.tokenizer, add_special_tokens=True)
        prompts = [Prompt(token_ids, text) for token_ids, text in zip(token_lists, texts, strict=True)]
    else:
        prompts = [Prompt(ids, None) for ids in cast(list[list[int]], [parts] if kinds == {int} else parts)]
        for token_ids, _ in prompts:
            _check_token_ids(token_ids, model, "prompt")
    if not prompts or any(not token_ids or text == "" for token_ids, text in prompts):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return prompts


async def _encode(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    if sum(map(len, texts)) < LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens)


def _message(message: Message) -> dict[str, str]:
    """A turn as chat templates expect it: parts joined by newlines."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    turn = {"role": message.role, "content": text}
    if message.name is not None:
        turn["name"] = message.name
    return turn
