"""The parts of an answer, in the order in which they are written."""

import itertools
from collections.abc import Sequence

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A call of a tool begins."""

    call: int  # counts the calls of an answer
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as the model wrote them: JSON text."""

    call: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call's arguments are complete. A call that is cut off has no end."""

    call: int


class WholeCall(msgspec.Struct, frozen=True):
    """A call of a tool with all of its arguments."""

    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd


def joined(parts: list[Part]) -> list[Part]:
    """The same parts, with adjacent parts of one kind merged."""
    if len(parts) < 2:
        return parts
    result: list[Part] = []
    for (kind, call), group in itertools.groupby(parts, _kind):
        if kind in (CallBegin, CallEnd):
            result += group
            continue
        text = "".join([part.text for part in group])  # type: ignore[union-attr]
        if kind is CallArguments:
            result.append(CallArguments(call, text))
        else:
            result.append(Content(text) if kind is Content else Reasoning(text))
    return result


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.call if isinstance(part, CallBegin | CallArguments | CallEnd) else 0


def whole_calls(parts: Sequence[Part]) -> list[WholeCall]:
    """The calls in all parts of an answer."""
    begun = [part for part in parts if isinstance(part, CallBegin)]
    arguments: list[list[str]] = [[] for _ in begun]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call].append(part.text)
    return [WholeCall(call.call_id, call.name, "".join(arguments[call.call])) for call in begun]
