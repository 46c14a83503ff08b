"""How a request appears in a log line: a word in a text line, separate fields in a JSON line."""

from abc import ABC, abstractmethod

from pdkv.base.trace_context import trace_id_of

UNPRINTABLE = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class LogFields(ABC):
    """An argument of a log call that a JSON line shows as fields; a text line shows its `str`."""

    __slots__ = ()

    @abstractmethod
    def log_fields(self) -> dict[str, object]:
        """JSON-ready values by name."""


class RequestName(LogFields):
    """The name of one attempt of a client's request in every process: the client's own id comes first."""

    __slots__ = ("attempt", "label", "request_id", "traceparent")

    def __init__(self, request_id: str, attempt: int, *, label: str = "", traceparent: str = "") -> None:
        """`request_id`: the router's, one per choice; `label`: the client's, "" if it sent none."""
        self.request_id = request_id
        self.attempt = attempt
        self.label = label
        self.traceparent = traceparent

    def __str__(self) -> str:
        trace_id = trace_id_of(self.traceparent)
        trace = f", trace {trace_id}" if trace_id else ""
        return f"{self.label or self.request_id} (attempt {self.attempt}{trace})"

    def log_fields(self) -> dict[str, object]:
        """request_id (the client's), generation_id (the router's), attempt and trace_id."""
        fields: dict[str, object] = {
            "request_id": self.label or self.request_id,
            "generation_id": self.request_id,
            "attempt": self.attempt,
        }
        trace_id = trace_id_of(self.traceparent)
        return fields | {"trace_id": trace_id} if trace_id else fields


def printable(text: str) -> str:
    """The text with control characters, line ends and other unprintable ones escaped, so that it stays one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else UNPRINTABLE.get(c) or ascii(c)[1:-1] for c in text)
