"""Messages of a conversation: their limits, and the prompt that the model's chat template makes of them."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from pdkv.base.limits import MAX_MESSAGES
from pdkv.errors import InvalidRequest, RequestAborted
from pdkv.router.http.read.bodies import ChatBody, Message, TokenizeChatBody
from pdkv.router.http.read.body_complexity import Characters, check_complexity
from pdkv.router.http.read.prompts import Prompt, Truncation, check_chars, encode
from pdkv.router.http.read.served_model import Cancelled, ServedModel

MAX_TEMPLATE_CHARS = 100_000

_SHOWN = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content")


def read_conversation(
    body: ChatBody | TokenizeChatBody, model: ServedModel, cancelled: Cancelled, *, truncation: Truncation | None = None
) -> Prompt:
    """The prompt of a conversation.

    Raises:
        InvalidRequest: there are no messages, too many or too long ones, or the chat template refuses them.
        RequestAborted: the request was cancelled.
    """
    _check_messages(body.messages, model, truncated=truncation is not None)
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.chat_template is not None:
        _check_template(body.chat_template, model)
    text = model.tokenizer.render_chat(
        [_as_mapping(message) for message in body.messages],
        tools=body.tools or None,
        chat_template=body.chat_template,
        bounded=True,
        variables=variables,
        **_ending(body),
    )
    token_ids = encode(
        text, model, "messages", cancelled, add_special_tokens=body.add_special_tokens or False, truncation=truncation
    )
    if truncation is not None:
        token_ids = truncation.cut(token_ids)
    if not token_ids:
        raise InvalidRequest("messages must not be empty: the prompt has no tokens", param="messages")
    return Prompt(token_ids, text)


def _check_template(source: str, model: ServedModel) -> None:
    """Raise InvalidRequest for a chat template that is not accepted, and RequestAborted if it would block a loop."""
    if not model.takes_templates:
        text = "chat_template is not accepted from requests: start the server with --trust-request-chat-template"
        raise InvalidRequest(text, param="chat_template")
    if len(source) > MAX_TEMPLATE_CHARS:
        text = f"chat_template must have at most {MAX_TEMPLATE_CHARS} characters, got {len(source)}"
        raise InvalidRequest(text, param="chat_template")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise RequestAborted("a chat template must be rendered on a thread", request_id="")


def _ending(body: ChatBody | TokenizeChatBody) -> dict[str, Any]:
    """The end of the prompt: the beginning of an answer, unless the request says otherwise."""
    continues = body.continue_final_message or False
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt must not both be true", param="continue_final_message"
        )
    begins = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    return {"add_generation_prompt": begins, "continue_final_message": continues}


def _check_messages(messages: Sequence[Message], model: ServedModel, *, truncated: bool) -> None:
    """Check counts and characters before the template sees the messages."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    num_parts = sum(_num_parts(message) for message in messages)
    if max(len(messages), num_parts) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must have at most {MAX_MESSAGES} turns and as many text parts and calls, got {len(messages)} "
            f"and {num_parts}: drop the oldest turns, or summarize them in one",
            param="messages",
        )
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    check_complexity(Characters(",".join(text for text in calls if isinstance(text, str))))  # arguments are JSON, too
    if not truncated:
        check_chars(sum(map(_num_chars, messages)), model, "messages")


def _num_parts(message: Message) -> int:
    content = message.content
    num_parts = 1 if content is None or isinstance(content, str) else len(content)
    return num_parts + len(message.tool_calls or ())


def _num_chars(message: Message) -> int:
    content = message.content or ""
    num_chars = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    for call in message.tool_calls or ():
        num_chars += len(call.function.name)
        num_chars += len(call.function.arguments) if isinstance(call.function.arguments, str) else 0
    return num_chars


def _as_mapping(message: Message) -> dict[str, Any]:
    """The part of a message that a template may see."""
    values = {name: getattr(message, name) for name in _SHOWN}
    shown: dict[str, Any] = msgspec.to_builtins(values)
    return shown
