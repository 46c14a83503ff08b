"""`traceparent` is taken exactly as the standard has it, and nothing else is."""

import pytest

from pdkv.base.trace_context import MAX_TRACEPARENT_CHARS, TraceContext, new_trace, parse_traceparent, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_what_the_standard_allows_is_taken(text: str, sampled: bool) -> None:
    context = parse_traceparent(text)
    assert context == TraceContext(TRACE, SPAN, sampled)
    assert context.traceparent == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}é-{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_new_trace_is_one_that_others_take() -> None:
    traces = [new_trace(sampled=True) for _ in range(100)]
    assert len({trace.trace_id for trace in traces}) == len({trace.parent_id for trace in traces}) == 100
    for trace in traces:
        assert parse_traceparent(trace.traceparent) == trace
        assert trace_id_of(trace.traceparent) == trace.trace_id
        assert len(trace.traceparent) == MAX_TRACEPARENT_CHARS
    assert trace_id_of("") == ""
