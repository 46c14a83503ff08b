"""Bounds on what one request may hold: the router checks them before any work, the engine again on every Submit.

They are constants, not options: both sides of the wire must agree on them. The HTTP server's own bounds, which are
options, are in `HttpLimits` (`src/pdkv/config.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest

MAX_CACHE_SALT_BYTES = 256
"""UTF-8 of `cache_salt`: a key's worth. It is hashed once per prompt and copied into every choice's Submit."""

MAX_AFFINITY_BYTES = 256
"""UTF-8 of `prompt_cache_key` and of `session_id`."""

MAX_STOPS = 64
"""Stop strings of one request (OpenAI: 4)."""

MAX_STOP_BYTES = 4096
"""UTF-8 of all stop strings of one request together: one automaton is built from them, a state per character."""

MAX_STOP_TOKEN_IDS = 256
"""Stop token ids of one request."""

MAX_LOGIT_BIAS = 1024
"""Entries of one request's `logit_bias` (OpenAI: 300)."""

MAX_ALLOWED_TOKEN_IDS = 8192
"""Entries of one request's `allowed_token_ids`: every choice's Submit carries them."""

MAX_LOGITS_PROCESSORS = 8
"""Logits processors of one request."""

MAX_PROCESSOR_BYTES = 16 * 1024
"""Their names and arguments, as msgpack."""

MAX_BAD_WORDS = 128
"""Token sequences that one request may forbid; a bad word may be two, see `pdkv.text.bad_words` (vLLM: 128)."""

MAX_BAD_WORD_TOKENS = 1024
"""Tokens of all of them together: they are compared with the output in each step (vLLM: 1024)."""

MAX_BAD_WORD_BYTES = 4096
"""UTF-8 of all of one request's `bad_words`, before they are tokenized."""

MAX_N = 128
"""Choices per prompt; `choice` of a Submit is below it."""

MAX_CHOICES = 1024
"""Prompts times n of one request."""

MAX_MESSAGES = 4096
"""Turns of one chat request, and text parts of all of its turns together."""

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
"""JSON of what a response repeats of its request: a stream says it three times."""

MAX_ADAPTER_BYTES = 256
"""UTF-8 of an adapter's name."""

MAX_WAIT_S = 24 * 3600.0
"""How long an operator's request may wait, and so every duration that is waited for by one."""

MAX_ID_CHARS = 256
"""Of a request's, a transfer's, an engine's or a router's id."""

MAX_ECHO_CHARS = 128
"""Characters of a name or value of the client's that an error repeats."""


def utf8_bytes(text: str, limit: int) -> int:
    """Bytes of `text` in UTF-8; of one with more than `limit` characters, that count, without a copy of it."""
    return len(text) if len(text) > limit else len(text.encode("utf-8", "surrogatepass"))


def check_cache_salt(cache_salt: str) -> None:
    """Raises InvalidRequest for more than MAX_CACHE_SALT_BYTES of UTF-8."""
    if utf8_bytes(cache_salt, MAX_CACHE_SALT_BYTES) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes of UTF-8, got {len(cache_salt)} characters: "
            "send a hash of it instead",
            param="cache_salt",
        )


def check_stops(stop: Sequence[str]) -> None:
    """Raises InvalidRequest for too many stop strings, too many bytes of them together, or an empty one."""
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop must hold at most {MAX_STOPS} strings, got {len(stop)}", param="stop")
    size = sum(utf8_bytes(text, MAX_STOP_BYTES) for text in stop)
    if size > MAX_STOP_BYTES:
        raise InvalidRequest(
            f"stop must have at most {MAX_STOP_BYTES} bytes of UTF-8 in all, got at least {size}", param="stop"
        )
    if not all(stop):
        raise InvalidRequest("stop must not hold an empty string", param="stop")


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest for too many bad words, too many bytes of them together, or one without a letter."""
    check_count("bad_words", len(words), MAX_BAD_WORDS)
    size = sum(utf8_bytes(word, MAX_BAD_WORD_BYTES) for word in words)
    if size > MAX_BAD_WORD_BYTES:
        raise InvalidRequest(
            f"bad_words must have at most {MAX_BAD_WORD_BYTES} bytes of UTF-8 in all, got at least {size}",
            param="bad_words",
        )
    if not all(word.strip() for word in words):
        raise InvalidRequest("bad_words must not hold an empty string, nor one of spaces alone", param="bad_words")


def check_processor_arguments(asked: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for too many logits processors, or arguments that are too long or no JSON object."""
    if not asked:
        return
    check_count("logits_processors", len(asked), MAX_LOGITS_PROCESSORS)
    try:
        size = len(msgspec.msgpack.encode(asked))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"logits_processors must be JSON, with integers of 64 bits: {type(error).__name__}: {clip(str(error))}"
        raise InvalidRequest(text, param="logits_processors") from None
    if size > MAX_PROCESSOR_BYTES:
        raise InvalidRequest(
            f"logits_processors must have at most {MAX_PROCESSOR_BYTES} bytes, got {size}", param="logits_processors"
        )


def check_count(name: str, count: int, limit: int) -> None:
    """Raises InvalidRequest where the field `name` has more than `limit` entries."""
    if count > limit:
        raise InvalidRequest(f"{name} must have at most {limit} entries, got {count}", param=name)


def clip(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """`text`, or its beginning and how long it is: what an error may repeat of a client's words."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
