"""Messages as clients write them, and the turns that a chat template accepts: one rule for HTTP and offline.

Messages are OpenAI's: text or text parts, arguments of calls as JSON text. Turns are what Hugging Face's templates
expect: text or parts as the template accepts them (`find_forms`), arguments as objects.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, ModelError

Messages = Sequence[Mapping[str, Any]]

ContentFormat = Literal["auto", "string", "openai"]
"""The format of turns' content: what the template accepts, texts, or lists of text parts."""


Arguments = Literal["object", "text"]
"""The format of a call's arguments: an object, or its JSON text."""


class TurnForm(NamedTuple):
    """The content formats that a template accepts for turns of a role."""

    text: bool = True  # a text as it is; False: as a list of one part
    parts: bool = False  # several text parts as they are; False: joined to one text by newlines, as in vLLM

    def __str__(self) -> str:
        return ("text" if self.text else "parts") + (" or parts" if self.text and self.parts else "")


class TurnForms(NamedTuple):
    """The formats that a template accepts."""

    roles: Mapping[str, TurnForm]  # roles not in it have the format of "tool"
    arguments: Arguments = "object"  # of calls
    null: bool = False  # an assistant's turn with only calls has null as its content; False: an empty text
    developer: bool = True  # the role is known; False: its turns become the system's
    left_out: tuple[str, ...] = ()  # what does not appear in a prompt

    def __str__(self) -> str:
        roles = ", ".join(f"{role} {form}" for role, form in self.roles.items())
        calls = f"arguments as {self.arguments}, beside {'null' if self.null else 'an empty text'}"
        lost = f"; it leaves out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{roles}; {calls}; developer {'has its role' if self.developer else 'speaks as system'}{lost}"


_FIRST, _SECOND = "firstmarker", "secondmarker"
_A_CALL = {"id": "call00001", "function": {"name": "f", "arguments": {_FIRST: _SECOND}}}
_PYTHON = repr({_FIRST: _SECOND})  # what an object becomes where a text was expected
_ARGUMENTS: tuple[Arguments, ...] = ("object", "text")
_FIXED: Mapping[str, TurnForm] = {"string": TurnForm(), "openai": TurnForm(text=False, parts=True)}


def as_turns(messages: Messages, forms: TurnForms) -> list[dict[str, Any]]:
    """The messages as new turns; the messages themselves are not changed. Fields that are null are left out; unknown
    fields are passed to the template.

    Raises:
        InvalidRequest: names the message's field and what was expected.
    """
    return [_turn(message, forms, f"messages[{index}]") for index, message in enumerate(messages)]


def find_forms(render: Callable[[Messages], str | None], content_format: ContentFormat = "auto") -> TurnForms:
    """Find the formats that a template accepts, by rendering test conversations that contain marker words.

    Args:
        render: renders turns to a prompt; None: the template refuses them.
        content_format: the format of all turns' content, unless it is to be found.

    Raises:
        ModelError: the template accepts a user's turn, but omits its content.
    """
    fixed = _FIXED.get(content_format)
    user = _form_of(lambda content: render([_said("user", content)]), TurnForm(), fixed)
    if user is None:
        shape = {"string": "as text", "openai": "as text parts"}.get(content_format, "as text and as text parts")
        wanted = "repair the template, or remove it to serve completions alone"
        raise ModelError(f"the chat template omits the user's message, {shape}: {wanted}")
    other = TurnForm(text=user.text) if fixed is None else fixed
    asks = _said("user", _as_form("x", other))
    system = _form_of(lambda content: render([_said("system", content), asks]), other, fixed)
    assistant = _form_of(lambda content: render([asks, _said("assistant", content), asks]), other, fixed)
    forms = {"user": user, "system": system or other, "assistant": assistant or other, "tool": other}
    developer = _FIRST in (render([_said("developer", _as_form(_FIRST, other)), asks]) or "")
    calls = _call_form(render, asks, forms["assistant"])
    found = {"system": system, "assistant": assistant, "calls": calls}
    return TurnForms(forms, *(calls or ("object", False)), developer, tuple(name for name in found if not found[name]))


def _call_form(
    render: Callable[[Messages], str | None], asks: Mapping[str, Any], form: TurnForm
) -> tuple[Arguments, bool] | None:
    """The format of calls and whether null is next to them; None: they do not appear in either form."""
    prompts: dict[tuple[str, bool], str] = {}
    for kind, null in itertools.product(_ARGUMENTS, (False, True)):
        call = _tool_call(_A_CALL, kind, "")
        turn = {**_said("assistant", None if null else _as_form("", form)), "tool_calls": [call]}
        result = {**_said("tool", _as_form("x", form)), "tool_call_id": call["id"], "name": "f"}
        prompt = render([asks, turn, result]) or ""
        if _FIRST in prompt and _SECOND in prompt and _PYTHON not in prompt:
            prompts[kind, null] = prompt
    for kind in _ARGUMENTS:
        empty, alone = prompts.get((kind, False)), prompts.get((kind, True))
        if alone is not None and (empty is None or len(alone) < len(empty)):  # otherwise an empty turn is next to it
            return kind, True
        if empty is not None:
            return kind, False
    return None


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _as_form(text: str, form: TurnForm) -> Any:
    return text if form.text else [_part(text)]


def _form_of(render: Callable[[Any], str | None], refused: TurnForm, fixed: TurnForm | None) -> TurnForm | None:
    """The format of the role that `render` renders; `refused` if it accepts none; None: its content does not appear."""
    text, part = render(_FIRST), render([_part(_FIRST)])
    if fixed is not None:
        prompt, other = (text, part) if fixed.text else (part, text)
        return fixed if _FIRST in (prompt or "") or prompt is other is None else None
    several = render([_part(_FIRST), _part(_SECOND)]) or ""
    if text is None and part is None:
        return refused
    takes_text = _FIRST in (text or "")
    takes_part = part == text if takes_text else _FIRST in (part or "")  # a list may also arrive as its repr
    if not takes_text and not takes_part:
        return None
    return TurnForm(takes_text, takes_part and _FIRST in several and _SECOND in several)


def _turn(message: Mapping[str, Any], forms: TurnForms, at: str) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if value is not None or name == "content"}
    role, content, calls = str(turn.get("role")), turn.get("content"), turn.pop("tool_calls", ())
    if role == "developer" and not forms.developer:
        role = turn["role"] = "system"
    if not isinstance(calls, list | tuple):
        raise _wrong(f"{at}.tool_calls", "a list of calls", calls)
    if calls and not content and forms.null:
        turn["content"] = None
    else:
        said = "" if content is None and role == "assistant" else content
        turn["content"] = _content(said, forms.roles.get(role, forms.roles["tool"]), f"{at}.content")
    if calls:
        turn["tool_calls"] = [
            _tool_call(call, forms.arguments, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
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


def _tool_call(call: Any, kind: Arguments, at: str) -> dict[str, Any]:
    """Without its place in a stream."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(at, "a call such as {'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str | Mapping):
        raise _wrong(f"{at}.function.arguments", "a JSON text or an object", arguments)
    if kind == "text":
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # else it is shown as the model once wrote it
            arguments = msgspec.json.decode(arguments)
    rest = {name: value for name, value in call.items() if value is not None and name != "index"}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _wrong(at: str, expected: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{at} must be {expected}, got {clip(repr(got))}", param=at)
