"""Turns the items of a request's input into turns of a chat."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from pdkv.errors import InvalidRequest
from pdkv.router.http.read.bodies import Message, TextPart, ToolCall, ToolFunction
from pdkv.router.http.read.served_model import Cancelled, check_wanted
from pdkv.router.http.responses_api.protocol import CallOfServer, InputItem, InputPart
from pdkv.router.http.responses_api.tools import custom_arguments, function_name


class _Kind(NamedTuple):
    """The fields of an item of one type, besides type, id and status."""

    required: frozenset[str]
    optional: frozenset[str]
    parts: tuple[str, ...]  # kinds of text in its lists of parts


_OUTPUT = _Kind(frozenset({"call_id", "output"}), frozenset({"name"}), ("input_text", "output_text"))
_KINDS = {
    "message": _Kind(frozenset({"role", "content"}), frozenset({"phase"}), ("input_text", "output_text")),
    "function_call": _Kind(frozenset({"call_id", "name", "arguments"}), frozenset({"namespace"}), ()),
    "function_call_output": _OUTPUT,
    "custom_tool_call": _Kind(frozenset({"call_id", "name", "input"}), frozenset({"namespace"}), ()),
    "custom_tool_call_output": _OUTPUT,
    "reasoning": _Kind(frozenset(), frozenset({"summary", "content"}), ("reasoning_text",)),
}
_OF_SERVERS = frozenset(get_args(CallOfServer))
_ITEMS_IN_A_ROW = 64
"""Items that are read in half a millisecond."""

_FIELDS = sorted({name for kind in _KINDS.values() for name in kind.required | kind.optional})


def messages_of(
    instructions: str | None, given: str | Sequence[InputItem], cancelled: Cancelled = lambda: False
) -> list[Message]:
    """The turns of a chat: instructions as the system's turn, and everything that the model wrote, thought and called
    between two other turns as one turn.

    Raises:
        InvalidRequest: an item that lacks a field of its type, or has one of another type.
        RequestAborted: the request was cancelled.
    """
    turns = _Turns()
    if instructions is not None:
        turns.add(Message(role="system", content=instructions))
    if isinstance(given, str):
        turns.add(Message(role="user", content=given))
        return turns.messages
    for index, item in enumerate(given):
        if not index % _ITEMS_IN_A_ROW:
            check_wanted(cancelled)
        if item.type in _OF_SERVERS:
            continue
        _check(item, f"input[{index}]")
        turns.add_item(item)
    turns.end_answer()
    return turns.messages


class _Turns:
    """The turns so far; the model's last turn may continue."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._content: str | list[TextPart] | None = None
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        """Add a turn that is not the model's."""
        self.end_answer()
        self.messages.append(message)

    def add_item(self, item: InputItem) -> None:
        """Add an item that has been checked."""
        match item.type:
            case "reasoning":
                self._begin_answer()
                self._thoughts.append(_thoughts(item))
            case "function_call" | "custom_tool_call":
                arguments = item.arguments if item.input is None else custom_arguments(item.input)
                function = ToolFunction(name=function_name(item.namespace, item.name or ""), arguments=arguments)
                self._calls.append(ToolCall(id=item.call_id, type="function", function=function))
            case "function_call_output" | "custom_tool_call_output":
                self.add(Message(role="tool", content=_content(item.output), tool_call_id=item.call_id))
            case _ if item.role == "assistant":
                self._begin_answer()
                self._content = _content(item.content)
            case _:
                assert item.role is not None
                self.add(Message(role=item.role, content=_content(item.content)))

    def _begin_answer(self) -> None:
        """Start the model's turn: reasoning and text precede the calls of one turn."""
        if self._content is not None or self._calls:
            self.end_answer()

    def end_answer(self) -> None:
        """End the model's turn."""
        thoughts = "\n".join(filter(None, self._thoughts))
        if thoughts or self._content is not None or self._calls:
            calls = self._calls or None
            self.messages.append(
                Message(role="assistant", content=self._content, tool_calls=calls, reasoning_content=thoughts or None)
            )
        self._thoughts, self._content, self._calls = [], None, []


def _check(item: InputItem, place: str) -> None:
    name = item.type or "message"
    kind = _KINDS[name]
    for field in _FIELDS:
        given = getattr(item, field)
        if given is None and field in kind.required:
            raise InvalidRequest(f"{place}.{field} is required: the item is a {name}", param=f"{place}.{field}")
        if given is not None and field not in kind.required | kind.optional:
            allowed = ", ".join(sorted(kind.required | kind.optional))
            raise InvalidRequest(
                f"{place}.{field} is not a field of a {name}, which may have {allowed}", param=f"{place}.{field}"
            )
    if name == "reasoning" and isinstance(item.content, str):
        raise InvalidRequest(f"{place}.content must be a list of reasoning_text", param=f"{place}.content")
    _check_parts(item.content, kind.parts, f"{place}.content")
    _check_parts(item.output, kind.parts, f"{place}.output")


def _check_parts(parts: str | Sequence[InputPart] | None, kinds: Sequence[str], place: str) -> None:
    for index, part in enumerate(() if parts is None or isinstance(parts, str) else parts):
        if part.type not in kinds:
            raise InvalidRequest(
                f"{place}[{index}].type: {part.type!r} is not supported here; allowed: {', '.join(map(repr, kinds))}",
                param=f"{place}[{index}].type",
            )


def _content(parts: str | Sequence[InputPart] | None) -> str | list[TextPart]:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return [TextPart(type="text", text=part.text) for part in parts]


def _thoughts(item: InputItem) -> str:
    """The reasoning as the model wrote it, or else its summary."""
    given: Iterable[str] = () if isinstance(item.content, str) else (part.text for part in item.content or ())
    return "".join(given) or "\n".join(part.text for part in item.summary or ())
