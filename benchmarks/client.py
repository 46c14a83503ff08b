"""Streams of exact lengths, by the client of `pd bench`."""

from pdkv.bench.client import Client, Reply
from pdkv.bench.serve import Conversation, Target
from pdkv.bench.workload import Turn


async def complete(
    url: str,
    *,
    model: str,
    prompt: list[int],
    max_tokens: int,
    reply: Reply | None = None,
) -> Reply:
    """Stream one greedy completion of exactly `max_tokens` tokens. Never raises: the reply says what went wrong.

    Args:
        reply: is filled in while the answer comes, for callers that cancel this before its end.
    """
    ahead = Conversation("completions", is_talk=False)
    ahead.ask(prompt)
    body = ahead.body(Target(url, model), Turn(prompt, max_tokens))
    reply = Reply() if reply is None else reply
    with Client(url) as client:
        await client.stream("/v1/completions", body, reply)
    if reply.ok and reply.num_tokens != max_tokens:
        reply.error = f"{reply.num_tokens} tokens instead of {max_tokens}"
    return reply
