"""Replies to POST /v1/responses: the typed events of a stream, or the whole response."""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from pdkv.base.clock import unix_time
from pdkv.errors import PdkvError, TooManyRequests
from pdkv.parsers.parts import Part, joined
from pdkv.router.http.answer.choice import ChoiceDelta, ShownLogprob, TokenCounts
from pdkv.router.http.answer.replies import Asked, Work
from pdkv.router.http.read.ascii_json import ascii_json
from pdkv.router.http.responses_api.items import Event, OutputItems
from pdkv.router.http.server.errors import describe_error


class ResponseEvents:
    """Encodes and numbers the events of one response."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._items = OutputItems(asked.serial, asked.model.tokenizer, asked.job.own_tools)
        self._finish_reason: str | None = None
        self._num_events = 0

    def begin(self) -> bytes:
        """The events before output: the response without its output."""
        response = _response(self._asked, "in_progress", ())
        return self._encoded(
            [{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")]
        )

    def encode(self, delta: ChoiceDelta) -> bytes:
        """An event per part, and those of items that begin and end."""
        assert delta.parts is not None
        events = self._items.push(delta.parts, delta.logprobs)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            events += self._items.finish(complete=delta.finish_reason != "length")
        return self._encoded(events)

    def end(self, counts: TokenCounts) -> bytes:
        """The last event: the response with all of its output."""
        response = _ended(self._asked, self._items, self._finish_reason, counts)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        return self._encoded([{"type": f"response.{status}", "response": response}])

    def fail(self, error: PdkvError) -> bytes:
        """The error as an event of its own, which OpenAI's clients raise, and as the response's end."""
        _, body = describe_error(error)
        said = body["error"]
        flat = {name: said[name] for name in ("code", "message", "param")}
        code = "rate_limit_exceeded" if isinstance(error, TooManyRequests) else "server_error"  # only OpenAI's
        failure = {"code": code, "message": said["message"]}
        response = _response(self._asked, "failed", self._items.output, error=failure)
        return self._encoded(
            [{"type": "error", **flat, "error": said}, {"type": "response.failed", "response": response}]
        )

    def _encoded(self, events: Iterable[Event]) -> bytes:
        data = []
        for event in events:
            numbered = ascii_json({**event, "sequence_number": self._num_events})
            data.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), numbered))
            self._num_events += 1
        return b"".join(data)


class WholeResponse:
    """Gathers a whole response."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._parts: list[Part] = []
        self._logprobs: list[tuple[int, list[ShownLogprob]]] = []  # number of parts before them
        self._finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta."""
        self._parts += delta.parts or ()
        if delta.logprobs:
            self._logprobs.append((len(self._parts), delta.logprobs))
        self._finish_reason = delta.finish_reason

    @property
    def num_logprobs(self) -> int:
        """Number of tokens whose logprobs are shown, or might be."""
        return sum(len(logprobs) for _, logprobs in self._logprobs)

    async def body(self, counts: TokenCounts, work: Work) -> object:
        """The response as JSON."""
        return await work(functools.partial(self._body, counts))

    def _body(self, counts: TokenCounts) -> msgspec.Raw:
        items = OutputItems(self._asked.serial, self._asked.model.tokenizer, self._asked.job.own_tools)
        begin = 0
        for end, logprobs in self._logprobs:
            items.push(self._parts[begin:end], logprobs)
            begin = end
        items.push(joined(self._parts[begin:]))
        items.finish(complete=self._finish_reason != "length")
        return _ended(self._asked, items, self._finish_reason, counts)


def _ended(asked: Asked, items: OutputItems, finish_reason: str | None, counts: TokenCounts) -> msgspec.Raw:
    if asked.job.keep is not None:
        asked.job.keep(_response_id(asked.serial), ascii_json(items.output)[1:-1])
    fields: dict[str, Any] = {"usage": _usage(counts)}
    if finish_reason == "length":
        return _response(
            asked, "incomplete", items.output, incomplete_details={"reason": "max_output_tokens"}, **fields
        )
    return _response(asked, "completed", items.output, completed_at=int(unix_time()), **fields)


def _response_id(serial: str) -> str:
    return f"resp_{serial}"


def _response(asked: Asked, status: str, output: Iterable[dict[str, Any]], **fields: Any) -> msgspec.Raw:
    """A response object; the part that repeats the request is already encoded."""
    body = {
        "id": _response_id(asked.serial),
        "object": "response",
        "created_at": asked.created,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": asked.model.name,
        "output": output,
        "usage": None,
        **fields,
    }
    return msgspec.Raw(ascii_json(body)[:-1] + b"," + asked.job.repeated[1:])


def _usage(counts: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {**counts.of_prompt, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
        "total_tokens": counts.prompt + counts.completion,
    }
