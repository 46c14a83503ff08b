"""Logprobs in the formats of OpenAI's two APIs, and in vLLM's format for prompts."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from pdkv.router.http.answer.choice import ShownLogprob
from pdkv.text import Tokenizer
from pdkv.wire.messages import TokenLogprob

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def completion_logprobs(
    logprobs: Iterable[ShownLogprob], tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """The legacy format: parallel lists. `top_logprobs` includes the token itself, as OpenAI's does. `as_ids`: tokens
    are named token_id:5, as in vLLM.
    """
    named = _id_name if as_ids else functools.partial(_legacy_token, tokenizer)
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for shown in logprobs:
        token = named(shown.token_id)
        tokens.append(token)
        offsets.append(shown.text_offset)
        if shown.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        value = max(shown.logprob.logprob, _LEAST_LOGPROB)
        values.append(value)
        top = {named(i): max(p, _LEAST_LOGPROB) for i, p in shown.logprob.top}
        tops.append({**top, token: value})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _legacy_token(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a dictionary key: OpenAI's "bytes:" form if it is part of a character, so that keys stay distinct."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(logprobs: Iterable[ShownLogprob], tokenizer: Tokenizer, *, as_ids: bool = False) -> dict[str, Any]:
    """The chat format: one entry per token, each with its bytes. `as_ids`: as for `completion_logprobs`."""
    content = []
    for shown in logprobs:
        assert shown.logprob is not None
        entry = _chat_token(shown.token_id, shown.logprob.logprob, tokenizer, as_ids=as_ids)
        entry["top_logprobs"] = [_chat_token(i, p, tokenizer, as_ids=as_ids) for i, p in shown.logprob.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer, *, as_ids: bool) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    name = _id_name(token_id) if as_ids else data.decode(errors="replace")
    return {"token": name, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}


def prompt_logprobs(
    token_logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer, num_asked: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: per prompt token {token id: {logprob, rank, decoded_token}}; the first token has none."""
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
