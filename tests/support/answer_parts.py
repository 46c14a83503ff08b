"""Answers read by the parsers, and what is in them."""

from collections.abc import Iterable

from pdkv.parsers.answer import AnswerFormat, AnswerStream
from pdkv.parsers.json_value import is_object
from pdkv.parsers.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning


def read(format: AnswerFormat, pieces: Iterable[str]) -> list[Part]:
    stream = AnswerStream(format)
    return [part for piece in pieces for part in stream.push(piece)] + stream.finish()


def gather(parts: Iterable[Part]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """(thoughts, text, calls); checks that the parts are in order."""
    reasoning, content = "", ""
    calls: list[list[str]] = []
    ended: set[int] = set()
    ids = set()
    for part in parts:
        match part:
            case Content():
                assert part.text
                content += part.text
            case Reasoning():
                assert part.text
                assert not content
                assert not calls
                reasoning += part.text
            case CallBegin():
                assert part.call == len(calls)
                calls.append([part.name, ""])
                ids.add(part.call_id)
            case CallArguments():
                assert part.call == len(calls) - 1
                assert part.text
                assert part.call not in ended
                calls[-1][1] += part.text
            case CallEnd():
                assert part.call == len(calls) - 1
                ended.add(part.call)
    assert len(ids) == len(calls)
    for index, (_, arguments) in enumerate(calls):
        assert index in ended or not is_object(arguments)
    return reasoning, content, tuple((name, arguments) for name, arguments in calls)
