"""The output items of a response, and the events that report them as they come."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pdkv.parsers.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from pdkv.router.http.answer.choice import ShownLogprob
from pdkv.router.http.read.ascii_json import ascii_json
from pdkv.router.http.responses_api.protocol import Status
from pdkv.router.http.responses_api.token_entries import TokenEntries
from pdkv.router.http.responses_api.tools import OwnTool, custom_input
from pdkv.text import Tokenizer

Event = dict[str, Any]
"""A typed event that has no number yet."""


class _Item:
    """An item that is not complete: `begin`, then `add` for each addition, then `end`."""

    kind = ""
    prefix = ""

    def __init__(self, serial: str, index: int) -> None:
        self.id = f"{self.prefix}_{serial}{index:02x}"
        self._index = index
        self._texts: list[str] = []

    @property
    def _text(self) -> msgspec.Raw:
        return msgspec.Raw(ascii_json("".join(self._texts)))

    def begin(self) -> list[Event]:
        return [self._about_item("added", "in_progress")]

    def end(self, status: Status) -> list[Event]:
        return [self._about_item("done", status)]

    def body(self, status: Status) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": status}

    def _about_item(self, what: str, status: Status) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": self.body(status)}

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"response.{what}", "item_id": self.id, "output_index": self._index, **fields}


class _TextItem(_Item):
    """An item whose content is one text."""

    part_kind = ""

    def begin(self) -> list[Event]:
        return [*super().begin(), self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return self._event(f"{self.part_kind}.delta", content_index=0, delta=text)

    def end(self, status: Status) -> list[Event]:
        return [
            self._event(f"{self.part_kind}.done", content_index=0, text=self._text),
            self._event("content_part.done", content_index=0, part=self._part()),
            *super().end(status),
        ]

    def body(self, status: Status) -> dict[str, Any]:
        content = [self._part()] if self._texts or status != "in_progress" else []
        return {**super().body(status), "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": self.part_kind, "text": self._text}


class _Thoughts(_TextItem):
    kind, prefix, part_kind = "reasoning", "rs", "reasoning_text"

    def body(self, status: Status) -> dict[str, Any]:
        return {**super().body(status), "summary": []}


class _Message(_TextItem):
    kind, prefix, part_kind = "message", "msg", "output_text"

    def __init__(self, serial: str, index: int) -> None:
        super().__init__(serial, index)
        self._logprobs: list[bytes] = []  # entries as JSON: three events and the response repeat them

    def add_with_logprobs(self, text: str, entries: Sequence[bytes]) -> Event:
        self._logprobs += entries
        return {**self.add(text), "logprobs": _listed(entries)}

    def end(self, status: Status) -> list[Event]:
        done, *others = super().end(status)
        return [{**done, "logprobs": _listed(self._logprobs)}, *others]

    def body(self, status: Status) -> dict[str, Any]:
        return {**super().body(status), "role": "assistant"}

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], "logprobs": _listed(self._logprobs)}


class _Call(_Item):
    kind, prefix = "function_call", "fc"

    def __init__(self, serial: str, index: int, part: CallBegin, own: OwnTool) -> None:
        super().__init__(serial, index)
        self._named = {"call_id": part.call_id, "name": own.name}
        if own.namespace is not None:
            self._named["namespace"] = own.namespace

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: Status) -> list[Event]:
        name, arguments = self._named["name"], self._text
        done = self._event("function_call_arguments.done", name=name, arguments=arguments)
        return [done, *super().end(status)]

    def body(self, status: Status) -> dict[str, Any]:
        return {**super().body(status), **self._named, "arguments": self._text}


class _CustomCall(_Call):
    """A custom call. Its input is within the arguments, so it is known once they are complete."""

    kind, prefix = "custom_tool_call", "ctc"

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return []

    def end(self, status: Status) -> list[Event]:
        given = custom_input("".join(self._texts))
        delta, done = "custom_tool_call_input.delta", "custom_tool_call_input.done"
        return [self._event(delta, delta=given), self._event(done, input=given), *_Item.end(self, status)]

    def body(self, status: Status) -> dict[str, Any]:
        given = custom_input("".join(self._texts)) if status != "in_progress" else ""
        return {**_Item.body(self, status), **self._named, "input": given}


T = TypeVar("T", _Message, _Thoughts)


class OutputItems:
    """The items of one response. Those not complete when it ends or fails are incomplete."""

    def __init__(self, serial: str, tokenizer: Tokenizer, tools: Mapping[str, OwnTool]) -> None:
        self._serial = serial
        self._tools = tools
        self._tokens = TokenEntries(tokenizer)
        self._done: list[dict[str, Any]] = []
        self._open: _Thoughts | _Message | _Call | None = None

    @property
    def output(self) -> list[dict[str, Any]]:
        """All items so far."""
        return self._done if self._open is None else [*self._done, self._open.body("incomplete")]

    def push(self, parts: Sequence[Part], logprobs: Sequence[ShownLogprob] | None = None) -> list[Event]:
        """The events of a delta, with the tokens that it came from."""
        if logprobs:
            self._tokens.add(logprobs)
        events: list[Event] = []
        for part in parts:
            events += self._push(part)
        if parts and not isinstance(parts[-1], Content):
            self._tokens.drop()
        return events

    def _push(self, part: Part) -> list[Event]:
        match part:
            case Content(text):
                message, begun = self._opened(_Message)
                return [*begun, message.add_with_logprobs(text, self._tokens.take(text))]
            case Reasoning(text):
                thoughts, begun = self._opened(_Thoughts)
                return [*begun, thoughts.add(text)]
            case CallBegin():
                own = self._tools.get(part.name, OwnTool(part.name, None, is_custom=False))
                return self._begin((_CustomCall if own.is_custom else _Call)(*self._next, part, own))
            case CallArguments(_, text):
                assert isinstance(self._open, _Call)
                return self._open.add(text)
            case CallEnd():
                return self._end("completed")

    def _opened(self, kind: type[T]) -> tuple[T, list[Event]]:
        """The open item if it is of that kind, else a new one, and the events of its beginning."""
        if isinstance(self._open, kind):
            return self._open, []
        item = kind(*self._next)
        return item, self._begin(item)

    def finish(self, *, complete: bool) -> list[Event]:
        """End the answer. An empty one becomes an empty message; a call that is still open was cut off."""
        begun = self._begin(_Message(*self._next)) if self._open is None and not self._done else []
        return begun + self._end("completed" if complete and isinstance(self._open, _TextItem) else "incomplete")

    @property
    def _next(self) -> tuple[str, int]:
        return self._serial, len(self._done) + (self._open is not None)

    def _begin(self, item: _Thoughts | _Message | _Call) -> list[Event]:
        """Begin an item; text that was open is complete."""
        ended = self._end("completed" if isinstance(self._open, _TextItem) else "incomplete")
        self._open = item
        return ended + item.begin()

    def _end(self, status: Status) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._done.append(item.body(status))
        return item.end(status)


def _listed(entries: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(entries) + b"]")
