"""Answers of each family, whole and split at every place: always the same calls, text and thoughts."""

import dataclasses
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from answer_parts import gather, read
from recorded_answers import ANSWERS, THOUGHTS, TOOLS, Recorded, Thought

from pdkv.parsers.answer import AnswerFormat, AnswerStream
from pdkv.parsers.parts import Part
from pdkv.parsers.registry import REASONING_PARSERS, TOOL_PARSERS


def splits(text: str) -> Iterator[list[str]]:
    """Whole, in two at every place, character by character, and at random places."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield list(text)
    draw = random.Random(len(text))
    for _ in range(20):
        places = sorted(draw.sample(range(len(text) + 1), min(6, len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda r: f"{r.parser}: {r.name}")
def test_calls_and_text(recorded: Recorded) -> None:
    format = AnswerFormat(tool_parser=TOOL_PARSERS.load(recorded.parser), tools=dict.fromkeys(TOOLS))
    for pieces in splits(recorded.text):
        assert gather(read(format, pieces)) == ("", recorded.content, recorded.calls), pieces


@pytest.mark.parametrize("thought", THOUGHTS, ids=lambda t: t.name)
def test_thoughts_and_text(thought: Thought) -> None:
    parser = REASONING_PARSERS.load(thought.parser)
    format = AnswerFormat(reasoning_parser=parser, prompt=parser.thinking_of(thought.prompt))
    silent = dataclasses.replace(format, shows_reasoning=False)
    for pieces in splits(thought.text):
        assert gather(read(format, pieces)) == (thought.reasoning, thought.content, ()), pieces
        assert gather(read(silent, pieces)) == ("", thought.content, ())


@pytest.mark.parametrize("recorded", [r for r in ANSWERS if r.parser == "hermes"], ids=lambda r: r.name)
def test_calls_behind_thoughts(recorded: Recorded) -> None:
    """Calls that are only thought of are none."""
    text = '<think>\nI might <tool_call>{"name": "search", "arguments": {}}</tool_call>\n</think>\n\n' + recorded.text
    format = AnswerFormat(
        reasoning_parser=REASONING_PARSERS.load("qwen3"),
        tool_parser=TOOL_PARSERS.load("hermes"),
        tools=dict.fromkeys(TOOLS),
    )
    thoughts = 'I might <tool_call>{"name": "search", "arguments": {}}</tool_call>'
    for pieces in splits(text):
        assert gather(read(format, pieces)) == (thoughts, recorded.content, recorded.calls), pieces


@pytest.mark.parametrize("recorded", [r for r in ANSWERS if len(r.calls) > 1], ids=lambda r: f"{r.parser}: {r.name}")
def test_the_answer_ends_behind_its_first_call_where_only_one_is_wanted(recorded: Recorded) -> None:
    format = AnswerFormat(
        tool_parser=TOOL_PARSERS.load(recorded.parser), tools=dict.fromkeys(TOOLS), several_calls=False
    )
    for pieces in splits(recorded.text):
        stream = AnswerStream(format)
        parts: list[Part] = []
        for piece in pieces:
            parts += stream.push(piece)
        assert stream.ended
        assert stream.finish() == stream.push("x") == []
        assert gather(parts)[2] == recorded.calls[:1]


SCRAPS = [
    *("<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]"),
    *('{"name": "get_time", "arguments": {}}', '{"name": "search", "parameters": {"query": 1}}', '{"name": '),
    *('<tool_call>{"name": "search", "arguments": ', '[TOOL_CALLS] [{"name": "search", "arguments": '),
    *('"search"', '"arguments": ', '{"a": [1, {}]}', '"x"', "{", "}", ",", ";", ":", "\n", "  ", "get_time", "-1.5e"),
    *(
        "<function=",
        "<function=search>",
        "<parameter=q>",
        "</parameter>",
        "</function>",
        ">",
        "<tool_call>search\n<arg_key>",
    ),
    *(
        "<arg_key>",
        "q</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|python_start|>",
        "<|python_end|>",
        "[search(",
        "q=",
    ),
    *("'a", "')", ")]", "(", "\n[search(q='x', ", "True", "<tool_call>\n<function=search>\n<parameter=q>\n1"),
    *("nul", "l", "é", "<think>", "</think>", "<", "</", "\\", '\\"', '"', "text", "[TOOL_CALLS]get_time[ARGS]"),
]


@pytest.mark.parametrize("name", TOOL_PARSERS.shipped)
def test_any_text_means_the_same_in_any_pieces(name: str) -> None:
    parsers: dict[str, Any] = {"tool_parser": TOOL_PARSERS.load(name), "tools": dict.fromkeys(TOOLS)}
    draw = random.Random(7)
    num_with_calls = 0
    for _ in range(1200):
        text = "".join(draw.choices(SCRAPS, k=draw.randrange(1, 14)))
        thinks = {"reasoning_parser": REASONING_PARSERS.load("qwen3")} if draw.random() < 0.3 else {}
        format = AnswerFormat(**parsers, **thinks)
        whole = gather(read(format, [text]))
        num_with_calls += bool(whole[2])
        if not whole[2] and not thinks:
            assert whole[1] == text
        assert gather(read(format, text)) == whole, text
        for _ in range(4):
            places = sorted(draw.choices(range(len(text) + 1), k=3))
            pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            assert gather(read(format, pieces)) == whole, pieces
    assert num_with_calls > 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" + " " * 200_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}' + "\n" * 200_000),
        ("hermes", "<tool_call>" * 20_000),
        ("hermes", '<tool_call>{"arguments": ' + '{"a":' * 40_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": "' + "a" * 200_000),
        ("llama3_json", "{\n" * 60_000),
        ("llama3_json", '{"parameters":\n' * 15_000),
        ("llama3_json", '{"name": "search", "parameters": {}}' + " " * 200_000 + ";" + " " * 100_000),
        ("mistral", "[TOOL_CALLS]" + "n" * 200_000),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}' + " " * 200_000),
        ("mistral", "[TOOL_CALLS]f[ARGS]" * 15_000),
        ("qwen3_coder", "<tool_call>" + " " * 200_000),
        ("qwen3_coder", "<tool_call><function=" + "f" * 200_000),
        ("qwen3_coder", "<function=" * 20_000),
        ("qwen3_coder", "<function=f>" + "<parameter=a>1</parameter>" * 8_000),
        ("qwen3_coder", "<function=f><parameter=" + " " * 200_000),
        ("qwen3_coder", "<function=f><parameter=a>" + "<" * 200_000),
        ("glm45", "<tool_call>" + "n" * 200_000),
        ("glm45", "<tool_call>n<arg_key>a</arg_key>" + " " * 200_000),
        ("glm45", "<tool_call>n<arg_key>a</arg_key><arg_value>" + "</arg_" * 30_000),
        ("pythonic", "[\n" * 60_000),
        ("pythonic", "[search(q=" + "[" * 200_000),
        ("pythonic", "[search(q='" + "\\" * 200_000),
        ("pythonic", "[search(" + "a=1, " * 30_000),
        ("pythonic", "[search()" + " " * 200_000),
        ("pythonic", "[search()]" + " " * 200_000),
    ],
)
def test_the_work_grows_with_the_text_and_no_faster(name: str, text: str) -> None:
    """Counted in characters that are looked at: twice the text may not be four times the work."""

    def work(text: str) -> int:
        parser = TOOL_PARSERS.load(name)(dict.fromkeys(TOOLS))
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            for at in range(0, len(text), 50):
                parser.push(text[at : at + 50])
            parser.finish()
        finally:
            sys.settrace(None)
        return count

    short, long = text[: len(text) // 64], text[: len(text) // 32]
    assert work(long) < 2.5 * work(short) + 1000
