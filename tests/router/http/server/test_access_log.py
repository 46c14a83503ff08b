"""The line per request: what is in it, and what must never be."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asgi_client import begin, call
from fake_dispatcher import FakeDispatcher, say, tokens
from small_app import MODEL, ids, make_app

from pdkv.base.log_fields import LogFields
from pdkv.errors import EngineDied
from pdkv.launch.logs import JsonFormatter
from pdkv.router.http.server.access_log import AccessLine

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"x-request-id": "client-7", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


class Lines(logging.Handler):
    """What the access log was told."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def fields(self) -> list[dict[str, Any]]:
        """Of the lines so far."""
        found = []
        for record in self.records:
            assert isinstance(record.args, tuple)
            (line,) = record.args
            assert isinstance(line, LogFields)
            found.append(line.log_fields())
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("pdkv.access")
    handler = Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def test_a_line_says_who_how_where_what_and_how_long(lines: Lines) -> None:
    app = make_app(FakeDispatcher(say(ids("abc"))))
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7]}, HEADERS)
    (line,) = lines.fields
    times = {name: line.pop(name) for name in ("queue_s", "ttft_s", "duration_s")}
    assert line == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "client": "test:1",
        "request_id": "client-7",
        "trace_id": TRACE,
        "stream": False,
        "choices": 1,
        "prefill": "prefill-0",
        "decode": "decode-1",
        "attempts": 1,
        "prompt_tokens": 3,
        "computed": 3,
        "recomputed": 0,
        "local_hit": 0,
        "remote": 0,
        "store": 0,
        "completion_tokens": 3,
    }
    assert 0 <= times["queue_s"] <= times["ttft_s"] <= times["duration_s"]


async def test_every_end_has_its_line(lines: Lines) -> None:
    dispatcher = FakeDispatcher(lambda _: [EngineDied("dead", request_id="r")])
    app = make_app(dispatcher)
    body = {"model": MODEL, "prompt": [5]}
    await call(app, "POST", "/v1/completions", {"model": "other", "prompt": "x"})
    await call(app, "POST", "/v1/completions", body)
    dispatcher.answer = lambda _: [tokens(*ids("a")), EngineDied("dead", request_id="r")]
    await call(app, "POST", "/v1/completions", body | {"stream": True})
    dispatcher.answer = None
    for num_writes in (0, 1):
        exchange, task = begin(app, "POST", "/v1/completions", body | {"stream": True})
        generation = await dispatcher.next_generation(2 + num_writes)
        if num_writes:
            generation.put(tokens(*ids("a")))
            await exchange.wait_for_writes(1)
        exchange.disconnect()
        await task
    ends = [(line["status"], line["outcome"]) for line in lines.fields]
    assert ends == [
        (404, "model_not_found"),
        (503, "engine_died"),
        (200, "engine_died"),
        (499, "disconnected"),
        (200, "disconnected"),
    ]
    assert [line.get("completion_tokens") for line in lines.fields] == [None, 0, 1, 0, 1]
    assert "ttft_s" not in lines.fields[1]


async def test_a_refusal_names_its_field_and_not_what_was_in_it(lines: Lines) -> None:
    """A newcomer's trial: requests that were refused left no trace of why."""
    app = make_app(FakeDispatcher())
    good = {"model": MODEL, "prompt": "x"}
    for fields, param in (
        ({"temperature": -7.25}, "temperature"),
        ({"stream_options": {"secret": 1}}, "stream_options.secret"),
        ({"model": "secret"}, "model"),
        ({"no\nline=1": 1}, "no\nline=1"),
    ):
        reply = await call(app, "POST", "/v1/completions", good | fields)
        assert reply.json()["error"]["param"] == param
        assert lines.fields[-1]["param"] == param
        line = str(lines.records[-1].args[0])  # type: ignore[index]
        assert "\n" not in line
        assert "7.25" not in line
    await call(app, "POST", "/v1/completions", good, {"x-pd-timeout-s": "soon"})
    assert lines.fields[-1]["param"] == "x-pd-timeout-s"


async def test_other_endpoints_have_lines_and_monitors_only_where_they_fail(lines: Lines) -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)
    for path in ("/health", "/metrics", "/v1/models"):
        await call(app, "GET", path)
    dispatcher.ready = False
    await call(app, "GET", "/health")
    await call(app, "GET", "/v1/completions")
    await call(app, "GET", "/no\nwhere")
    ends = [(line["path"], line["status"], line["outcome"]) for line in lines.fields]
    assert ends == [
        ("/v1/models", 200, "ok"),
        ("/health", 503, "failed"),
        ("/v1/completions", 405, "refused"),
        ("/no\nwhere", 404, "refused"),
    ]
    assert str(lines.records[-1].args[0]).startswith(r"GET /no\nwhere 404 refused client=test:1 ")  # type: ignore[index]


async def test_an_exception_of_the_application_is_a_500(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = FakeDispatcher()
    monkeypatch.setattr(dispatcher, "topology", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await call(make_app(dispatcher), "GET", "/topology")
    assert [(line["status"], line["outcome"]) for line in lines.fields] == [(500, "failed")]


async def test_nothing_of_prompt_reply_key_or_query_is_in_a_line(lines: Lines) -> None:
    app = make_app(FakeDispatcher(say(ids("hush"))))
    headers = HEADERS | {"authorization": "Bearer hush", "cookie": "hush"}
    body = {"model": MODEL, "prompt": "hush", "user": "hush", "cache_salt": "hush", "stop": ["hush!"]}
    await call(app, "POST", "/v1/completions", body, headers)
    exchange, task = begin(app, "GET", "/v1/models", None, headers)
    exchange.scope["query_string"] = b"api_key=hush"
    await task
    assert len(lines.records) == 2
    for record in lines.records:
        assert "hush" not in record.getMessage()
        assert "hush" not in JsonFormatter("router").format(record)


async def test_a_malformed_trace_is_ignored_and_a_new_one_made(lines: Lines) -> None:
    dispatcher = FakeDispatcher(say(ids("a")))
    app = make_app(dispatcher)
    for given in ("", "00-xyz", f"00-{TRACE}-{'0' * 16}-01", "\x9b\n"):
        await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5]}, {"traceparent": given})
    exchange, task = begin(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5]}, HEADERS)
    exchange.scope["headers"].append((b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"))
    await task
    traces = [line["trace_id"] for line in lines.fields]
    assert len(set(traces)) == 5
    assert TRACE not in traces
    for request, trace_id in zip(dispatcher.requests, traces, strict=True):
        assert request.traceparent[3:35] == trace_id


async def test_names_go_along_to_the_engines() -> None:
    dispatcher = FakeDispatcher(say(ids("a")))
    await call(make_app(dispatcher), "POST", "/v1/completions", {"model": MODEL, "prompt": [5], "n": 2}, HEADERS)
    assert [request.label for request in dispatcher.requests] == ["client-7"] * 2
    assert {request.traceparent[:35] for request in dispatcher.requests} == {f"00-{TRACE}"}


async def test_prompt_tokens_are_the_first_choices_over_all_prompts(lines: Lines) -> None:
    dispatcher = FakeDispatcher(say(ids("a")))
    body = {"model": MODEL, "prompt": [[5, 6], [7, 8, 9]], "n": 2}
    await call(make_app(dispatcher), "POST", "/v1/completions", body)
    (line,) = lines.fields
    assert (line["prompt_tokens"], line["computed"], line["choices"]) == (5, 5, 4)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-1.2/3", "plain-1.2/3"),
        ("two words", '"two words"'),
        ('a"b', r'"a\"b"'),
        ("a=b", '"a=b"'),
        ("", '""'),
        ("\x1b[31m\n", r'"\u001b[31m\n"'),
        ("é", r'"\u00e9"'),
        (True, "true"),
        (0.1234567891, "0.123457"),
    ],
)
def test_values_that_are_no_single_word_are_quoted(value: object, shown: str) -> None:
    scope = {"type": "http", "method": "GET", "path": "/x", "client": None}
    line = AccessLine(scope, status=200, outcome="ok", duration_s=0.5, id=value, none=None)
    assert str(line) == f"GET /x 200 ok id={shown} duration_s=0.5"
    assert json.loads(JsonFormatter("p").format(_record(line)))["status"] == 200


def _record(line: AccessLine) -> logging.LogRecord:
    return logging.LogRecord("pdkv.access", logging.INFO, __file__, 1, "%s", (line,), None)


async def test_nothing_is_made_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pdkv.access"), "disabled", True)
    monkeypatch.setattr(AccessLine, "__init__", lambda *_, **__: 1 // 0)
    app = make_app(FakeDispatcher(say(ids("a"))))
    assert (await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5]})).status == 200


def test_a_line_shows_no_more_of_a_client_than_an_address_has() -> None:
    scope = {"method": "GET", "path": "/", "client": ("a" * 30_000, 1)}
    assert len(str(AccessLine(scope, status=200, outcome="ok", duration_s=1.0))) < 200
    address = ("2001:db8:1234:5678:9abc:def0:1234:5678", 65535)
    line = AccessLine({**scope, "client": address}, status=200, outcome="ok", duration_s=1.0)
    assert line.log_fields()["client"] == "2001:db8:1234:5678:9abc:def0:1234:5678:65535"
