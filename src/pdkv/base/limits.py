"""Limits on the contents of one request: the router checks them before any work, the engine again on every Submit.

They are constants, not options: both sides of the wire must agree on them. The HTTP server's own limits, which are
options, are in `HttpLimits` (`src/pdkv/config.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest

MAX_CACHE_SALT_BYTES = 256
"""Bytes of UTF-8 of `cache_salt`, the size of a key. It is hashed once per prompt and copied into every choice's
Submit.
"""

MAX_AFFINITY_BYTES = 256
"""Bytes of UTF-8 of `prompt_cache_key` and of `session_id`."""

MAX_STOPS = 64
"""Stop strings of one request (OpenAI: 4)."""

MAX_LOGIT_BIAS = 1024
"""Entries of one request's `logit_bias` (OpenAI: 300)."""

MAX_PROCESSOR_BYTES = 16 * 1024
"""Bytes of their names and arguments, as msgpack."""

MAX_N = 128
"""Choices per prompt; `choice` of a Submit is below it."""

MAX_CHOICES = 1024
"""Prompts times n of one request."""

MAX_INPUTS = 2048
"""Inputs of one request for embeddings, as at OpenAI's; and documents of one ranking."""

MAX_MESSAGES = 8192
"""Turns of one chat request; and text parts and calls of all of its turns together."""

MAX_TOTAL_PROMPT_TOKENS = 2**24
"""Prompt tokens times n of one request: each choice's Submit carries its prompt."""

MAX_GRAMMAR_BYTES_OF_CHOICES = 2**26
"""Size of a grammar times prompts times n of one request: each choice's Submit carries it."""

MAX_PROMPT_LOGPROBS = 2**20
"""Logprobs of prompt tokens in one reply: tokens times n times those per token. Each is some 30 bytes of JSON."""

MAX_RESPONSE_LOGPROBS = 2**20
"""Logprobs of output tokens in one response: tokens times those per token. A stream keeps them, and repeats them."""

MAX_SHOWN_PROMPT_TOKENS = 2**21
"""Prompt tokens times n in one reply, as ids or as text: encoding them takes some 10 ms, and 15 MB."""

MAX_REPEATED_BYTES = 2**20
"""Bytes of JSON that a response repeats of its request: a stream says it three times."""

MAX_ADAPTER_BYTES = 256
"""Bytes of UTF-8 of an adapter's name."""

MAX_WAIT_S = 24 * 3600.0
"""Longest time that an operator's request may wait, and the limit of every duration such requests give."""

MAX_ID_CHARS = 256
"""Characters of a request's, a transfer's, an engine's or a router's id."""

MAX_ECHO_CHARS = 128
"""Characters of a client's name or value that an error repeats."""


def utf8_bytes(text: str, limit: int) -> int:
    """Number of bytes of `text` in UTF-8 or, if it has more than `limit` characters, the number of characters, without
    a copy.
    """
    return len(text) if len(text) > limit else len(text.encode("utf-8", "surrogatepass"))


def check_cache_salt(cache_salt: str) -> None:
    """Raise InvalidRequest for more than MAX_CACHE_SALT_BYTES of UTF-8."""
    if utf8_bytes(cache_salt, MAX_CACHE_SALT_BYTES) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes of UTF-8, got {len(cache_salt)} characters: "
            "send a hash of it instead",
            param="cache_salt",
        )


def check_bytes(name: str, texts: Sequence[str], limit: int) -> None:
    """Raise InvalidRequest if the texts of the field `name` have more than `limit` bytes together."""
    size = sum(utf8_bytes(text, limit) for text in texts)
    if size > limit:
        raise InvalidRequest(
            f"{name} must have at most {limit} bytes of UTF-8 in total, got {size} or more", param=name
        )


def check_processor_arguments(asked: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for too many logits processors, or arguments that are too long or not a JSON object."""
    if not asked:
        return
    try:
        size = len(msgspec.msgpack.encode(asked))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"logits_processors must be JSON, with integers of 64 bits: {type(error).__name__}: {clip(str(error))}"
        raise InvalidRequest(text, param="logits_processors") from None
    if size > MAX_PROCESSOR_BYTES:
        raise InvalidRequest(
            f"logits_processors must have at most {MAX_PROCESSOR_BYTES} bytes, got {size}", param="logits_processors"
        )


def clip(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """`text`, or its beginning and its length if it is long: as much of a client's text as an error may repeat."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
