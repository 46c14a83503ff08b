"""Recordings of a load: what is read, what is refused, and the prompts that are made of them."""

from itertools import pairwise
from pathlib import Path

import pytest

from pdkv.bench.trace import Trace, prompts, read_trace
from pdkv.errors import ConfigError

HEAD = '{"pdkv_trace": 1, "block_size": 4, "model": "small"}'
A, B, C = "00000000000000aa", "00000000000000bb", "00000000000000cc"
FIRST = (
    '{"t": 0.5, "session": 0, "key": 0, "prompt_tokens": 10, "output_tokens": 7, "max_tokens": 8, "blocks": '
    f'["{A}", "{B}"], "priority": 0, "stream": true, "outcome": "stop", "ttft_s": 0.1, "e2e_s": 0.4}}'
)
SECOND = FIRST.replace("0.5", "0.25", 1).replace(B, C)


def read(folder: Path, *lines: str, end: str = "\n") -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + end)
    return read_trace(path)


def test_requests_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD, FIRST, SECOND)
    assert (trace.model, trace.block_size) == ("small", 4)
    assert [request.t for request in trace.requests] == [0.25, 0.5]
    assert trace.requests[1].blocks == (A, B)


def test_equal_blocks_have_equal_tokens_and_others_do_not(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD, FIRST, SECOND, FIRST)
    second, first, again = prompts(trace, vocab=500)
    assert [len(prompt) for prompt in (second, first, again)] == [10, 10, 10]
    assert second[:4] == first[:4]
    assert second[4:8] != first[4:8]
    assert first[:8] == again[:8]
    assert first[8:] != again[8:]  # no full block: it may have been anything
    assert all(10 <= token < 500 for token in second + first + again)
    assert list(prompts(trace, vocab=500)) == [second, first, again]


def test_as_many_blocks_as_there_are_differ_in_the_smallest_vocabulary(tmp_path: Path) -> None:
    lines = [FIRST.replace(A, f"{number:016x}") for number in range(2000)]
    trace = read(tmp_path, HEAD.replace("4", "64"), *(line.replace('": 10', '": 128') for line in lines))
    found = sorted(prompt[:64] for prompt in prompts(trace, vocab=12))
    assert all(one != other for one, other in pairwise(found))


def test_a_last_line_that_was_cut_off_is_left_out_and_unknown_fields_are_skipped(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD, FIRST.replace("{", '{"colour": "blue", '), SECOND[:40], end="")
    assert [request.t for request in trace.requests] == [0.5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], "line 1: Object missing required field `pdkv_trace`"),
        (["GIF89a"], "line 1: JSON is malformed"),
        ([HEAD.replace("1", "2", 1)], "line 1: pdkv_trace: version 1 was expected, got 2"),
        ([HEAD, FIRST, FIRST[:50]], "line 3: Input data was truncated"),
        ([HEAD, FIRST.replace("10", "-1")], r"line 2: Expected `int` >= 0 - at `\$.prompt_tokens`"),
        ([HEAD, FIRST.replace("10", "1" + "0" * 400)], r"line 2: .*`\$.prompt_tokens`"),
        ([HEAD, FIRST.replace("0.4", "1e999")], r"line 2: .*"),
        ([HEAD, FIRST.replace("0.5", "NaN")], "line 2: JSON is malformed"),
        ([HEAD, FIRST.replace(A, A + "\\n")], r"line 2: .*`\$.blocks\[0\]`"),
        ([HEAD, FIRST.replace('": 10', '": 7')], "line 2: blocks: at most 1 were expected for 7 prompt tokens, got 2"),
        ([HEAD, FIRST.replace("stop", "done")], r"line 2: .*`\$.outcome`"),
        ([HEAD, FIRST.replace('"session": 0, ', "")], "line 2: Object missing required field `session`"),
        ([HEAD, "", FIRST], "line 2: Input data was truncated"),
        ([HEAD, "x" * (9 << 20)], "line 2 has more than 8388608 bytes"),
    ],
)
def test_a_bad_file_is_refused_by_its_line_and_field(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, *lines)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_BYTES", 300, "at most 300 bytes"),
        ("MAX_REQUESTS", 1, "at most 1 requests"),
        ("MAX_TOKENS", 15, "at most 15 prompt tokens"),
    ],
)
def test_a_recording_has_limits_in_all(
    limit: str, value: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"pdkv.bench.trace.{limit}", value)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, HEAD, FIRST, SECOND)


def test_no_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: No such file or directory"):
        read_trace(tmp_path / "none")
