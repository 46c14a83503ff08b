"""The request bodies of the OpenAI API that the router takes, as typed structs. Nothing in a body is ever ignored.

A field whose type is `None` alone is known and not supported: null is accepted, anything else is refused by its name.
"""

import re
from typing import Annotated, Literal, TypeVar

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.limits import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_STOPS, clip

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What the wire to the engines can carry."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share; null is the same as absent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # vLLM's extras
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int64 | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Int64 | None = None
    echo: bool | None = None
    best_of: None = None
    suffix: None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation. The fields of a reply that clients send back are accepted where they are null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: None = None
    refusal: None = None
    tool_call_id: None = None
    tool_calls: None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The only response format without a grammar."""

    type: Literal["text"]


class ChatBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    response_format: TextFormat | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: None = None
    store: None = None
    tool_choice: None = None
    tools: None = None
    web_search_options: None = None


_MAX_CONTAINERS = 2 * MAX_MESSAGES + MAX_CHOICES + 64
"""Lists and objects of one body: those of messages and their parts, or of prompts, and the few of other fields."""

_MAX_STRINGS = 8 * MAX_MESSAGES + MAX_CHOICES + MAX_LOGIT_BIAS + MAX_STOPS + 256
"""Strings of one body, names of fields included: four pairs per message or part."""

_MAX_VALUES = 2**20
"""Values of one body, as counted by commas: token ids for the most part."""

_B = TypeVar("_B", CompletionBody, ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")


def decode_completion(body: bytes | bytearray) -> CompletionBody:
    """Decode the body of POST /v1/completions.

    Raises:
        InvalidRequest: malformed JSON, an unknown, missing or unsupported field, or a wrong type; names the field.
    """
    return _decode(body, _completion_decoder)


def decode_chat(body: bytes | bytearray) -> ChatBody:
    """Decode the body of POST /v1/chat/completions; raises as `decode_completion`."""
    return _decode(body, _chat_decoder)


def _decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[_B]) -> _B:
    _check_size(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: it is nested too deeply") from None


def _check_size(body: bytes | bytearray) -> None:
    """Refuse what would become a million small objects: 4 MiB of `[5],` take half a second to decode.

    Counting is a hundred times cheaper. A text with many brackets is counted again without its strings.
    """
    num_containers = body.count(b"[") + body.count(b"{")
    many_values = body.count(b",") > _MAX_VALUES
    if num_containers <= _MAX_CONTAINERS and body.count(b'"') <= 2 * _MAX_STRINGS and not many_values:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins or ends a string
    if plain.count(b'"') > 2 * _MAX_STRINGS:
        raise InvalidRequest(f"the body is not a request: it has more than {_MAX_STRINGS} texts and names of fields")
    outside = b"".join(plain.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > _MAX_CONTAINERS:
        raise InvalidRequest(f"the body is not a request: it has more than {_MAX_CONTAINERS} lists and objects")
    if outside.count(b",") > _MAX_VALUES:
        raise InvalidRequest(f"the body is not a request: it has more than {_MAX_VALUES} values")


def _invalid_field(text: str) -> InvalidRequest:
    """msgspec's message as an error that names the field."""
    at = _AT.search(text)
    path = clip(at["path"].replace("[...]", "[]")) if at else ""
    what = text[: at.start()] if at else text
    if (unknown := _UNKNOWN.match(what)) is not None:
        param = ".".join(part for part in (path, clip(unknown["field"])) if part)
        return InvalidRequest(f"{param} is not a known field", param=param)
    if (missing := _MISSING.match(what)) is not None:
        param = ".".join(part for part in (path, missing["field"]) if part)
        return InvalidRequest(f"{param} is required", param=param)
    if not path:
        return InvalidRequest(f"the body is not a request: {what}")
    if what.startswith("Expected `null`"):
        return InvalidRequest(f"{path} is not supported", param=path)
    return InvalidRequest(f"{path}: {what}", param=path)
