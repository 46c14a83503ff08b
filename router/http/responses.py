"""Bodies that are sent whole: replies, usage, logprobs, errors."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdkv.errors import (
    EngineDied,
    EngineGivenUp,
    EngineUnavailable,
    InvalidRequest,
    PdkvError,
    RequestAborted,
    RequestTimeout,
    ServerBusy,
    TooManyRequests,
    Unauthorized,
)
from pdkv.limits import clip
from pdkv.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pdkv.router.http.choice import Choice, ChoiceDelta, ShownLogprob
from pdkv.router.http.openai import Job
from pdkv.text import Tokenizer
from pdkv.wire.messages import TokenLogprob

_MAX_MESSAGE_CHARS = 1024
"""Of an error: whatever of the client's words is in it, the reply is small."""

_KINDS = {403: "permission_error", 429: "rate_limit_error"}

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def error_status(error: PdkvError) -> int:
    """HTTP status of a failure."""
    match error:
        case InvalidRequest() | Unauthorized():
            return error.status
        case TooManyRequests():
            return 429
        case EngineUnavailable() | EngineDied() | EngineGivenUp() | ServerBusy():
            return 503
        case RequestAborted():  # the server's own
            return 503
        case RequestTimeout():
            return 504
        case _:
            return 500


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape; a long message or field name is clipped."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else clip(param)
    return {"error": {"message": clip(message, _MAX_MESSAGE_CHARS), "type": kind, "param": param, "code": code}}


def describe_error(error: PdkvError) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of a failure."""
    status = error_status(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    code = None if error.code == InvalidRequest.code else error.code
    return status, error_body(str(error), status=status, param=param, code=code)


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Token counts of a request; `num_reasoning_tokens` where thoughts are told from answers."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return counts


def completion_logprobs(logprobs: Iterable[ShownLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The legacy form: parallel lists. `top_logprobs` holds the token itself too, as OpenAI's does."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for shown in logprobs:
        token = _legacy_token(shown.token_id, tokenizer)
        tokens.append(token)
        offsets.append(shown.text_offset)
        if shown.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        value = max(shown.logprob.logprob, _LEAST_LOGPROB)
        values.append(value)
        top = {_legacy_token(i, tokenizer): max(p, _LEAST_LOGPROB) for i, p in shown.logprob.top}
        tops.append({**top, token: value})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _legacy_token(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as a dictionary key: OpenAI's "bytes:" form where it is part of a character, so that keys stay apart."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(logprobs: Iterable[ShownLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat form: one entry per token, each with its bytes."""
    content = []
    for shown in logprobs:
        assert shown.logprob is not None
        entry = _chat_token(shown.token_id, shown.logprob.logprob, tokenizer)
        entry["top_logprobs"] = [_chat_token(i, p, tokenizer) for i, p in shown.logprob.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}


def prompt_logprobs(
    token_logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer, num_asked: int
) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token {token id: {logprob, rank, decoded_token}}; the first token has none."""
    entries: list[dict[str, Any] | None] = []
    for value in token_logprobs:
        if value is None:
            entries.append(None)
            continue
        ranked = [(i, p, rank) for rank, (i, p) in enumerate(value.top[:num_asked], 1)]
        ranked.append((value.token_id, value.logprob, value.rank))
        entries.append(
            {
                str(i): {
                    "logprob": max(p, _LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(i).decode(errors="replace"),
                }
                for i, p, rank in ranked
            }
        )
    return entries


class WholeChoice:
    """Gathers the deltas of one choice of a reply that is not streamed."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._texts: list[str] = []
        self._parts: list[Part] = []
        self._token_ids: list[int] = []
        self._logprobs: list[ShownLogprob] = []
        self._last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """The next delta."""
        self._texts.append(delta.text)
        if delta.parts is not None:
            self._parts.extend(delta.parts)
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.extend(delta.logprobs)
        self._last = delta

    @property
    def num_logprobs(self) -> int:
        """Tokens whose logprobs are shown, the prompt's included."""
        return len(self._logprobs) + self._choice.num_prompt_logprobs

    def encoded(self, job: Job, tokenizer: Tokenizer) -> msgspec.Raw:
        """The entry of `choices` as JSON."""
        return msgspec.Raw(msgspec.json.encode(self._body(job, tokenizer)))

    def _body(self, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
        assert self._last is not None
        text = "".join(self._texts)
        format_logprobs = chat_logprobs if job.chat else completion_logprobs
        logprobs = format_logprobs(self._logprobs, tokenizer) if job.params.logprobs is not None else None
        body: dict[str, Any] = {"index": self._choice.index}
        if job.chat:
            said = {"content": text} if job.answer is None else message_of(self._parts)
            body["message"] = {"role": "assistant", **said, "refusal": None}
        else:
            body["text"] = text
        body |= {"logprobs": logprobs, "finish_reason": self._last.finish_reason, "stop_reason": self._last.stop_reason}
        if job.return_token_ids:
            body["token_ids"] = self._token_ids
        if job.chat:
            return body
        return body | prompt_extras(self._choice, job, tokenizer)


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole message's content, thoughts and calls; the latter two where there are any."""
    content = "".join([part.text for part in parts if isinstance(part, Content)])
    reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
    calls = [part for part in parts if isinstance(part, CallBegin)]
    arguments: list[list[str]] = [[] for _ in calls]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call].append(part.text)
    message: dict[str, Any] = {"content": content if content or not (reasoning or calls) else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(arguments[call.call])},
            }
            for call in calls
        ]
    return message


def prompt_extras(choice: Choice, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """What vLLM's extras say about the prompt: in each choice of completions, beside the choices of chat."""
    extras: dict[str, Any] = {}
    if job.return_token_ids:
        extras["prompt_token_ids"] = choice.prompt.token_ids
    if job.num_prompt_logprobs is not None and (of_prompt := choice.prompt_logprobs) is not None:
        entries = prompt_logprobs(of_prompt, tokenizer, job.num_prompt_logprobs)
        extras["prompt_logprobs"] = msgspec.Raw(msgspec.json.encode(entries))
    return extras
