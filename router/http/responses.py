"""What replies and streams have in common: usage, logprobs, errors."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

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
from pdkv.router.http.choice import ShownLogprob, TokenCounts
from pdkv.text import Tokenizer
from pdkv.wire.messages import TokenLogprob

_MAX_MESSAGE_CHARS = 1024
"""Of an error: whatever of the client's words is in it, the reply is small."""

_KINDS = {403: "permission_error", 429: "rate_limit_error"}

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


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


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Token counts of a request, those of thoughts where they are told from answers."""
    shown: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": counts.of_prompt,
    }
    if counts.reasoning is not None:
        shown["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning}
    return shown


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
