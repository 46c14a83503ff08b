"""Turns the body of POST /v1/responses into a checked request by way of a chat; errors name its own fields."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.base.limits import MAX_REPEATED_BYTES, MAX_RESPONSE_LOGPROBS, clip
from pdkv.errors import InvalidRequest
from pdkv.parsers.answer import AnswerFormat
from pdkv.parsers.tools import NamedToolChoice, ToolName
from pdkv.router.http.read.ascii_json import ascii_json
from pdkv.router.http.read.bodies import ChatBody, GenerationBody, JsonSchema, ResponseFormat, StreamOptions
from pdkv.router.http.read.body_complexity import check_complexity
from pdkv.router.http.read.decoding import BodyDecoder
from pdkv.router.http.read.job import Job, prepare_chat
from pdkv.router.http.read.pool_choice import User, prepare_for
from pdkv.router.http.read.served_model import Cancelled, ServedModel, check_wanted
from pdkv.router.http.responses_api.conversation import messages_of
from pdkv.router.http.responses_api.protocol import (
    LOGPROBS,
    STATELESS,
    InputItem,
    InputPart,
    ResponsesBody,
    TextFormat,
    ToolChoiceFunction,
)
from pdkv.router.http.responses_api.store import ResponseStore
from pdkv.router.http.responses_api.tools import OwnTools, read_own_tools
from pdkv.sampling.params import SamplingParams

RESPONSES = BodyDecoder(ResponsesBody)

_OWN_NAMES = (
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\b(tools\[\d+](?:\.tools\[\d+])?|tool_choice)\.function\b"), r"\1"),
)
"""Names of fields in chat, and their names here."""

_INPUT = (re.compile(r"\bmessages\b"), "input")
"""Renamed only in errors about these fields; elsewhere it is an ordinary word."""


class Kept(NamedTuple):
    """The store of the responses of one API key."""

    store: ResponseStore
    owner: str

    def items(self, response_id: str, cancelled: Cancelled) -> list[InputItem]:
        """Items of a conversation up to and including a response. Raises InvalidRequest, also for one that could be no
        body, and RequestAborted.
        """
        parts, items = self.store.conversation(self.owner, response_id), list[InputItem]()
        check_complexity(b",".join(parts))
        for part in parts:
            check_wanted(cancelled)
            items += _ITEMS.decode(b"[" + part + b"]")
        return items


_ITEMS = msgspec.json.Decoder(list[InputItem])


def prepare_responses(
    body: ResponsesBody,
    model: ServedModel,
    cancelled: Cancelled = lambda: False,
    kept: Kept | None = None,
    tenant: User | None = None,
) -> Job:
    """Check, render and tokenize a request. `kept`: None keeps no responses; `model`, `tenant`: of `prepare_for`.

    Raises:
        InvalidRequest: names the field and what was expected.
        RequestAborted: the request was cancelled.
    """
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f"top_logprobs requires `include` to contain {LOGPROBS!r}", param="top_logprobs")
    if kept is None:
        _check_stateless(body)
    own = read_own_tools(body.tools or [])
    before = kept.items(body.previous_response_id, cancelled) if kept is not None and body.previous_response_id else []
    try:
        chat = _as_chat(body, own, before, cancelled)
        job = prepare_for(chat, model, tenant, lambda chosen: prepare_chat(chat, chosen, cancelled))
    except InvalidRequest as error:
        raise _renamed(error, own) from None
    _check_logprobs(job.params, job.served or model)
    keeps = kept is not None and body.store is not False
    repeated = _encoded(_repeated(body, job.params, own, keeps=keeps))
    return msgspec.structs.replace(
        job,
        answer=job.answer or AnswerFormat(),
        grammar_param=_own_name(job.grammar_param, _OWN_NAMES),
        repeated=repeated,
        own_tools=own.names,
        keep=_keeper(body, kept) if kept is not None and keeps else None,
    )


def _check_stateless(body: ResponsesBody) -> None:
    for name, given in (("previous_response_id", body.previous_response_id), ("store", body.store or None)):
        if given is not None:
            text = (
                f"{name}: {clip(repr(given))} is not supported, since {STATELESS}; only clients with an API key have "
                "them"
            )
            raise InvalidRequest(text, param=name)


def _keeper(body: ResponsesBody, kept: Kept) -> Callable[[str, bytes], None]:
    """A function that keeps the response: the new part of its request, and its output."""
    given = body.input
    if isinstance(given, str):
        given = [InputItem(role="user", content=[InputPart(type="input_text", text=given)])]
    new = msgspec.json.encode(given)[1:-1]
    return kept.store.begin(kept.owner, body.previous_response_id, new)


def _as_chat(body: ResponsesBody, own: OwnTools, before: Sequence[InputItem], cancelled: Cancelled) -> ChatBody:
    shared = {name: getattr(body, name) for name in GenerationBody.__struct_fields__}
    shows_logprobs = LOGPROBS in (body.include or ())
    choice = body.tool_choice
    given = body.input
    if before:
        given = [*before, *([InputItem(role="user", content=given)] if isinstance(given, str) else given)]
    return ChatBody(
        **shared,
        messages=messages_of(body.instructions, given, cancelled),
        max_completion_tokens=body.max_output_tokens,
        logprobs=shows_logprobs,
        top_logprobs=body.top_logprobs if shows_logprobs else None,
        stream_options=None if body.stream_options is None else StreamOptions(),
        tools=own.functions or None,
        tool_choice=NamedToolChoice(type="function", function=ToolName(name=choice.name))
        if isinstance(choice, ToolChoiceFunction)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None else _response_format(body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _check_logprobs(params: SamplingParams, model: ServedModel) -> None:
    num_tokens = params.max_tokens or model.max_model_len
    if params.logprobs is not None and num_tokens * (params.logprobs + 1) > MAX_RESPONSE_LOGPROBS:
        raise InvalidRequest(
            f"max_output_tokens: the response could hold more than {MAX_RESPONSE_LOGPROBS} logprobs: "
            f"{num_tokens} tokens, {params.logprobs} + 1 of each",
            param="max_output_tokens",
        )


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    """A shape in chat's format, with the schema's fields in a separate object. Raises InvalidRequest."""
    if given is None:
        return None
    about = {name: getattr(given, name) for name in ("schema", "description", "strict")}
    if given.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(given, name) is None:
                param = f"text.format.{name}"
                raise InvalidRequest(f"{param} is required with text.format.type 'json_schema'", param=param)
        return ResponseFormat(type=given.type, json_schema=JsonSchema(name=given.name or "", **about))
    for name, value in {"name": given.name, **about}.items():
        if value is not None:
            param = f"text.format.{name}"
            raise InvalidRequest(f"{param} requires text.format.type 'json_schema', got {given.type!r}", param=param)
    return ResponseFormat(type=given.type)


def _renamed(error: InvalidRequest, own: OwnTools) -> InvalidRequest:
    """The same error in the words of this API."""
    message, param = (
        re.sub(r"\btools\[(\d+)]", lambda found: own.places[int(found[1])], text, count=1)
        for text in (str(error), error.param or "")
    )
    names = (*_OWN_NAMES, _INPUT) if param.startswith("messages") else _OWN_NAMES
    renamed = _own_name(param, names) or None
    return InvalidRequest(_own_name(message, names), param=renamed, status=error.status, code=error.code)


def _own_name(text: str, names: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """The name of a field, or a message with the field's name replaced once."""
    for pattern, name in names:
        text = pattern.sub(name, text, count=1)
    return text


def _encoded(repeated: dict[str, Any]) -> bytes:
    try:
        data = ascii_json(repeated)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply to be repeated in a response") from None
    if len(data) > MAX_REPEATED_BYTES:
        largest = max(repeated, key=lambda name: len(ascii_json(repeated[name])))
        raise InvalidRequest(
            f"{largest} is too large: the parts of the request that a response repeats must have at most "
            f"{MAX_REPEATED_BYTES} bytes, got {len(data)}",
            param=largest,
        )
    return data


def _repeated(body: ResponsesBody, params: SamplingParams, own: OwnTools, *, keeps: bool) -> dict[str, Any]:
    """The fields of a response that repeat the request, with defaults filled in."""
    text, reasoning = body.text, body.reasoning
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": keeps,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if text is None or text.format is None else text.format},
        "tool_choice": body.tool_choice or "auto",
        "tools": own.kept,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
