"""Logging of one process: lines on stderr that name the process, as text or as JSON."""

import contextlib
import logging
import os
import select
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

from pdkv.base.log_fields import LogFields, printable
from pdkv.base.secret_options import without_secrets

LogFormat = Literal["text", "json"]

PIPE_ROOM = 4096
"""Bytes that a pipe which is ready for writing takes without waiting (PIPE_BUF)."""


class TextFormatter(logging.Formatter):
    """Formats records as `time level process: message`, with a traceback in indented lines after it. Passwords are
    masked.

    A record is one line that begins in the first column, so that text repeated from others cannot forge a line.
    """

    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        begin = f"{self.formatTime(record, self.datefmt)} {record.levelname:7} {self._process}: "
        return "\n  ".join([begin + _shown(record.getMessage().rstrip()), *_traceback(self, record)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger and message, then the fields of the message's subject."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _shown(record.getMessage().rstrip()),
        }
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, LogFields):
                fields = argument.log_fields().items()
                values |= {name: _shown(value) if isinstance(value, str) else value for name, value in fields}
        trace = _traceback(self, record)
        if trace:
            values["exception"] = "\n".join(trace)
        return msgspec.json.encode(values).decode()


def _shown(text: str) -> str:
    """The text in one line, and without passwords."""
    return printable(without_secrets(text))


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """The traceback's lines."""
    text = formatter.formatException(record.exc_info) if record.exc_info else ""
    return [_shown(line) for line in (text + (record.stack_info or "")).splitlines()]


class LineHandler(logging.Handler):
    """Writes lines to a descriptor without ever waiting for the reader: if they are not read, lines are lost and
    counted.

    Without that, a stopped `pd launch 2>&1 | less` would stop every process as soon as its pipe is full.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.num_dropped = 0
        self._fd = fd
        self._num_told = 0
        self._cut = False  # the last line was written without its end
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line, or count it."""
        try:
            text = self.format(record)
            if self.num_dropped > self._num_told and self._is_ready():
                self._tell_dropped(record)
            self.write(text)
        except Exception:
            self.handleError(record)

    def _tell_dropped(self, record: logging.LogRecord) -> None:
        text = "%d log lines were lost because they were not read"
        args = (self.num_dropped - self._num_told,)
        lost = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, args, None)
        self._num_told = self.num_dropped
        self.write(self.format(lost))

    def write(self, line: str) -> None:
        """Write a line that is formatted already, or several, or count it."""
        data = memoryview((("\n" if self._cut else "") + line + "\n").encode(errors="backslashreplace"))
        rest = data
        with contextlib.suppress(
            OSError
        ):  # another process has made it non-blocking, the reader is gone, or a disk is full
            while rest and self._is_ready():
                rest = rest[os.write(self._fd, rest[:PIPE_ROOM]) :]
        if rest:
            self.num_dropped += 1
        if len(rest) < len(data):
            self._cut = bool(rest)

    def _is_ready(self) -> bool:
        """Whether PIPE_ROOM bytes can be written at once. Also True for an error, which the write will report."""
        return bool(self._poll.poll(0))


def configure_logging(process: str, level: str, log_format: LogFormat = "text", *, access_log: bool = True) -> None:
    """Send this process's log records to stderr as `log_format` says. Called by process mains only.

    Args:
        access_log: whether each request has its own line, at level info.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file, as in a test: it keeps its handlers
        handler = LineHandler(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]  # a forked child has its parent's handler
    root.setLevel(logging.WARNING)
    logging.getLogger("pdkv").setLevel(level.upper())
    logging.getLogger("pdkv.access").setLevel(logging.NOTSET if access_log else logging.WARNING)
