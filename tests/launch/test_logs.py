"""Log lines: one record is one line, nobody forges one, and who does not read them stops nobody."""

import fcntl
import json
import logging
import os
import re
import sys

import pytest

from pdkv.base.log_fields import RequestName, printable
from pdkv.launch.logs import PIPE_ROOM, JsonFormatter, LineHandler, TextFormatter

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NAME = RequestName("3f2a", 1, label="client-7", traceparent=TRACEPARENT)
HOSTILE = "a\n12:00:00 ERROR   router: forged\r\x1b[31m\x9b\u2028\ud800\x00 é…"


def record(text: str, *args: object, error: bool = False) -> logging.LogRecord:
    """A record as a logger makes it; `error`: with a traceback whose text is hostile, too."""
    exc_info = None
    if error:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord("pdkv.x", logging.WARNING, __file__, 1, text, args, exc_info)


def test_a_text_line_names_the_request() -> None:
    line = TextFormatter("decode-1").format(record("request %s failed: %s", NAME, "timeout"))
    expected = "request client-7 (attempt 1, trace 4bf92f3577b34da6a3ce929d0e0e4736) failed: timeout"
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING decode-1: (.*)", line)[1] == expected  # type: ignore[index]


def test_a_request_without_a_label_has_the_routers_id() -> None:
    assert str(RequestName("3f2a", 0)) == "3f2a (attempt 0)"


def test_a_json_line_has_the_request_in_fields() -> None:
    values = json.loads(JsonFormatter("decode-1").format(record("request %s failed: %s", NAME, "timeout")))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", values.pop("time"))
    assert values == {
        "level": "warning",
        "process": "decode-1",
        "logger": "pdkv.x",
        "message": "request client-7 (attempt 1, trace 4bf92f3577b34da6a3ce929d0e0e4736) failed: timeout",
        "request_id": "client-7",
        "generation_id": "3f2a",
        "attempt": 1,
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }


def test_nothing_that_is_logged_forges_a_line() -> None:
    text = TextFormatter("router").format(record("bad: %s", HOSTILE, error=True))
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if not line.startswith("  ")] == [lines[0]]
    assert lines[0].endswith(r"bad: a\n12:00:00 ERROR   router: forged\r\x1b[31m\x9b\u2028\ud800\x00 é…")
    shown = JsonFormatter("router").format(record("bad: %s", RequestName(HOSTILE, 0), error=True))
    assert shown.isprintable()
    assert json.loads(shown)["request_id"] == printable(HOSTILE)


def test_passwords_are_masked_in_fields_and_tracebacks_too() -> None:
    name = RequestName("redis://:pw@host", 0)
    for formatter in (TextFormatter("p"), JsonFormatter("p")):
        line = formatter.format(record("%s %s", name, "http://user:pw@host/x"))
        assert "pw" not in line
        assert "***@host" in line


def test_a_reader_that_stops_costs_lines_and_no_time() -> None:
    """A pipe that nobody reads: without the handler's look at it the write would wait for ever."""
    reading, writing = os.pipe()
    try:
        size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        handler = LineHandler(writing)
        handler.setFormatter(TextFormatter("p"))
        line_bytes = len(handler.format(record("%s", "x" * 1000))) + 1
        for _ in range(size // 1000 + 10):
            handler.emit(record("%s", "x" * 1000))
        assert handler.num_dropped >= 10
        num_written = size // 1000 + 10 - handler.num_dropped
        assert os.read(reading, 1 << 20).count(b"\n") == num_written
        assert num_written * line_bytes > size // 2
        handler.emit(record("again"))
        told, again = os.read(reading, 1 << 20).decode().splitlines()
        assert f"{handler.num_dropped} log lines were lost" in told
        assert again.endswith("again")
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("close", ["reader", "disk"])
def test_nobody_to_write_to_is_no_error(close: str) -> None:
    if close == "reader":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        handler = LineHandler(writing)
        handler.setFormatter(TextFormatter("p"))
        handler.emit(record("x"))
        assert handler.num_dropped == 1
    finally:
        os.close(writing)


def test_a_line_longer_than_a_pipes_room_arrives_whole() -> None:
    reading, writing = os.pipe()
    try:
        handler = LineHandler(writing)
        handler.setFormatter(JsonFormatter("p"))
        handler.emit(record("%s", "y" * 20_000))
        assert len(json.loads(os.read(reading, 1 << 20))["message"]) == 20_000
    finally:
        os.close(reading)
        os.close(writing)


def test_a_line_that_was_cut_does_not_run_into_the_next_one() -> None:
    """The pipe was full in the middle of it."""
    reading, writing = os.pipe()
    try:
        room = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4 * PIPE_ROOM)
        handler = LineHandler(writing)
        handler.setFormatter(TextFormatter("p"))
        handler.emit(record("%s", "x" * 2 * room))
        assert handler.num_dropped == 1
        assert b"\n" not in os.read(reading, 1 << 20)
        handler.emit(record("whole"))
        end, told, whole = os.read(reading, 1 << 20).decode().splitlines()
        assert (end, told.partition(": ")[2], whole.partition(": ")[2]) == (
            "",
            "1 log lines were lost because they were not read",
            "whole",
        )
    finally:
        os.close(reading)
        os.close(writing)
