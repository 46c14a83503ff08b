"""Streams of exact lengths, by the client of `pd bench`."""

import json

from pdkv.bench.client import Client, Reply


async def complete(
    url: str,
    *,
    model: str,
    prompt: list[int],
    max_tokens: int,
    reply: Reply | None = None,
    token_ids: bool = False,
) -> Reply:
    """Stream one greedy completion of exactly `max_tokens` tokens. Never raises: the reply says what went wrong.

    Args:
        reply: is filled in while the answer comes, for callers that cancel this before its end.
        token_ids: store the answer's token ids in the reply; for clients whose time does not matter.
    """
    body = json.dumps({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **({"return_token_ids": True} if token_ids else {}),
    }).encode()  # fmt: skip
    reply = Reply() if reply is None else reply
    reply.keep_text = token_ids
    with Client(url) as client:
        await client.stream("/v1/completions", body, reply)
    if reply.ok and reply.num_tokens != max_tokens:
        reply.error = f"{reply.num_tokens} tokens instead of {max_tokens}"
    return reply
