"""Messages as clients write them, and the turns that a chat template takes: one rule for HTTP and offline.

Messages are OpenAI's: text or text parts, arguments of calls as JSON text. Turns are what Hugging Face's templates
expect: text or parts as the template takes them (`find_forms`), arguments as objects.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, ModelError

Messages = Sequence[Mapping[str, Any]]


class TurnForm(NamedTuple):
    """How a template takes what the turns of a role say."""

    text: bool = True  # a text as it is; False: as a list of one part
    parts: bool = False  # several text parts as they are; False: joined to one text by newlines, as in vLLM


TurnForms = Mapping[str, TurnForm]  # by role; those that are not named have the form of "tool"
_MARKERS = ("firstmarker", "secondmarker")


def as_turns(messages: Messages, forms: TurnForms) -> list[dict[str, Any]]:
    """New turns; the messages stay as they are. Fields that are null are left out, unknown ones are the template's.

    Raises:
        InvalidRequest: names the message's field and what was expected.
    """
    return [_turn(message, forms, f"messages[{index}]") for index, message in enumerate(messages)]


def find_forms(render: Callable[[Messages], str | None]) -> TurnForms:
    """How a template takes turns, by conversations of marked words.

    Args:
        render: the prompt of turns; None: the template refuses them.

    Raises:
        ModelError: the template takes a user's turn, and leaves out what it says.
    """
    user = _form_of(lambda content: render([_said("user", content)]), TurnForm())
    if user is None:
        wanted = "repair the template, or remove it to serve completions alone"
        raise ModelError(
            f"the model's chat template leaves out what the user says, as text and as text parts: {wanted}"
        )
    other, asks = TurnForm(text=user.text), _said("user", "x" if user.text else [_part("x")])
    system = _form_of(lambda content: render([_said("system", content), asks]), other)
    assistant = _form_of(lambda content: render([asks, _said("assistant", content), asks]), other)
    return {"user": user, "system": system or other, "assistant": assistant or other, "tool": other}


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _form_of(render: Callable[[Any], str | None], refused: TurnForm) -> TurnForm | None:
    """Of the role whose content `render` is given; `refused` if it takes none; None: what it says does not arrive."""
    first, second = _MARKERS
    text, part = render(first), render([_part(first)])
    several = render([_part(first), _part(second)]) or ""
    if text is None and part is None:
        return refused
    takes_text = first in (text or "")
    takes_part = part == text if takes_text else first in (part or "")  # a list may also arrive as its repr
    if not takes_text and not takes_part:
        return None
    return TurnForm(takes_text, takes_part and first in several and second in several)


def _turn(message: Mapping[str, Any], forms: TurnForms, at: str) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if value is not None or name == "content"}
    role, content, calls = str(turn.get("role")), turn.get("content"), turn.pop("tool_calls", ())
    said = "" if content is None and role == "assistant" else content
    turn["content"] = _content(said, forms.get(role, forms["tool"]), f"{at}.content")
    if not isinstance(calls, list | tuple):
        raise _wrong(f"{at}.tool_calls", "a list of calls", calls)
    if calls:
        turn["tool_calls"] = [_tool_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    thoughts = turn.get("reasoning", turn.get("reasoning_content"))
    if thoughts is not None:
        turn["reasoning"] = turn["reasoning_content"] = thoughts
    return turn


def _content(content: Any, form: TurnForm, at: str) -> Any:
    if not isinstance(content, str | list | tuple):
        raise _wrong(at, "a text or a list of text parts, required and not null except in an assistant's turn", content)
    texts = [content] if isinstance(content, str) else [_text(part, f"{at}[{i}]") for i, part in enumerate(content)]
    if form.parts and len(texts) > 1:
        return [_part(text) for text in texts]
    text = "\n".join(texts)
    return text if form.text else [_part(text)]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text(part: Any, at: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong(at, "a text part such as {'type': 'text', 'text': 'Hello'}", part)
    return text


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    """Without its place in a stream."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(at, "a call such as {'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # else it is shown as the model once wrote it
            arguments = msgspec.json.decode(arguments)
    elif not isinstance(arguments, Mapping):
        raise _wrong(f"{at}.function.arguments", "a JSON text or an object", arguments)
    rest = {name: value for name, value in call.items() if value is not None and name != "index"}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _wrong(at: str, expected: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{at} must be {expected}, got {clip(repr(got))}", param=at)
