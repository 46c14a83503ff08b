"""Bodies with many values are counted and decoded in pieces: what comes of them is what it would be in one go."""

import itertools
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from small_app import tokenizer

from pdkv.errors import InvalidRequest
from pdkv.router.http.read import body_complexity, decoding, long_bodies
from pdkv.router.http.read.bodies import ChatBody, CompletionBody, Message, ToolCall, ToolFunction
from pdkv.router.http.read.body_complexity import MAX_VALUES_AT_ONCE, Characters, _outside_strings, check_complexity
from pdkv.router.http.read.chat import read_conversation
from pdkv.router.http.read.decoding import CHAT, COMPLETION, DETOKENIZE, BodyDecoder
from pdkv.router.http.read.served_model import ServedModel

SIZE = 2 << 20

LISTS = [
    "[]", "[1]", "[ 1 , 22,333 ,4444]", "[1,2,3]\n", "[[1,2],[3]]", "[ [1 , 2] ,\n[] , [3]]", "[[]]",
    "[-1, 0, 99999999]", "[1, null]", "[1.5]", "[true]", "[1, [2]]", "[[1], 2]", "[[1],[[2]]]", "[[1], {}]", "[{}]",
    '"text, with commas,"',
    '["a","b, c"]', '[1, "a"]', "null", "3", "{}", '{"a": [1]}', "[1e3]", "[9223372036854775808]",
]  # fmt: skip


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few bytes each; and every body with a comma is long."""
    monkeypatch.setattr(body_complexity, "PIECE_BYTES", 5)
    monkeypatch.setattr(long_bodies, "PIECE_BYTES", 5)
    monkeypatch.setattr(decoding, "MAX_VALUES_AT_ONCE", 0)


def outcome(decoder: BodyDecoder[Any], body: bytes, **options: bool) -> Any:
    """The decoded body, or the field that is wrong."""
    try:
        return decoder.decode(body, **options)
    except InvalidRequest as error:
        return error.param


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("ignore_unknown", [False, True])
@pytest.mark.parametrize("ids", LISTS)
def test_pieces_make_the_same_request(ids: str, ignore_unknown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        f'{{"x": 1, "n": 2, "prompt": {ids}, "stop": ["a, b"]}}' if ignore_unknown else f'{{"prompt": {ids}, "n": 2}}'
    )
    in_pieces = outcome(COMPLETION, body.encode(), ignore_unknown=ignore_unknown)
    monkeypatch.setattr(decoding, "MAX_VALUES_AT_ONCE", MAX_VALUES_AT_ONCE)
    at_once = outcome(COMPLETION, body.encode(), ignore_unknown=ignore_unknown)
    if isinstance(at_once, CompletionBody) and isinstance(in_pieces, CompletionBody):
        assert msgspec.to_builtins(in_pieces) == msgspec.to_builtins(at_once)
    elif isinstance(at_once, CompletionBody):  # kinds that a prompt may not mix: refused later
        assert in_pieces == "prompt"
        assert len({type(part) for part in at_once.prompt}) > 1
    else:
        assert isinstance(in_pieces, str)
        assert in_pieces.startswith("prompt")


@pytest.mark.usefixtures("tiny_pieces")
def test_other_fields_of_a_long_body_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(COMPLETION, b'{"prompt": [1, 2], "n": "x"}') == "n"
    assert outcome(COMPLETION, b'{"prompt": [1, 2], "kv_transfer_params": {}}') == "kv_transfer_params"
    assert outcome(COMPLETION, b'{"prompts": [1, 2], "n": 1}') == "prompts"
    assert outcome(COMPLETION, b'{"n": 1, "seed": 2}') == "prompt"
    assert outcome(COMPLETION, b'[{"prompt": [1, 2]}, 2]') is None
    assert outcome(COMPLETION, b'{"prompt": [1, 2], "n": ') is None
    assert outcome(DETOKENIZE, b'{"tokens": [[1], [2]]}').startswith("tokens")


def long_list(count: int = MAX_VALUES_AT_ONCE + 2, unit: str = "300") -> str:
    """So many numbers."""
    return "[" + ",".join(itertools.repeat(unit, count)) + "]"


@pytest.mark.parametrize("field", ["metadata", "logit_bias"])
def test_values_elsewhere_are_bounded(field: str) -> None:
    """They would be decoded in one go."""
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES_AT_ONCE} values beside the token ids of prompt"):
        COMPLETION.decode(f'{{"prompt": {long_list()}, "{field}": {{"1": {long_list()}}}}}'.encode())
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES_AT_ONCE} values"):
        CHAT.decode(f'{{"messages": [], "chat_template_kwargs": {{"x": {long_list()}}}}}'.encode())


def test_no_piece_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them, the event loop gets the interpreter."""
    pieces = long_bodies._pieces
    sizes = []

    def watched(raw: bytes, begin: int, end: int) -> Iterator[bytes]:
        for piece in pieces(raw, begin, end):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(long_bodies, "_pieces", watched)
    count = 2**20
    decoded = COMPLETION.decode(f'{{"prompt": {long_list(count, "5")}}}'.encode())
    assert decoded.prompt == [5] * count
    assert len(sizes) == 2 * count // body_complexity.PIECE_BYTES
    assert max(sizes) <= body_complexity.PIECE_BYTES + 1
    nested = COMPLETION.decode(f'{{"prompt": [{long_list()}, {long_list(3)}]}}'.encode())
    assert list(map(len, nested.prompt)) == [MAX_VALUES_AT_ONCE + 2, 3]


def counts_by_parser(text: str) -> tuple[int, int]:
    """Lists and objects, and commas, of valid JSON."""
    containers = commas = 0
    stack = [json.loads(text)]
    while stack:
        value = stack.pop()
        if isinstance(value, dict | list):
            containers += 1
            commas += max(len(value) - 1, 0)
            stack += value.values() if isinstance(value, dict) else value
    return containers, commas


def random_value(rng: random.Random, depth: int) -> Any:
    texts = ["", '"', "\\", '\\"', "\\\\", "[,]", '","', "é\\u0000", "a" * 9]
    if depth == 0 or rng.random() < 0.4:
        return rng.choice([*texts, 1, None, -2.5])
    if rng.random() < 0.5:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(texts) + str(i): random_value(rng, depth - 1) for i in range(rng.randint(0, 4))}


@pytest.mark.parametrize("piece_bytes", [2, 3, 7, 64])
def test_what_stands_outside_of_strings_is_counted_whatever_the_pieces(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_complexity, "PIECE_BYTES", piece_bytes)
    rng = random.Random(piece_bytes)
    for _ in range(200):
        text = json.dumps(random_value(rng, 4), ensure_ascii=rng.random() < 0.5)
        containers, commas = counts_by_parser(text)
        with monkeypatch.context() as limits:
            limits.setattr(body_complexity, "_MAX_CONTAINERS", containers)
            limits.setattr(body_complexity, "MAX_VALUES_AT_ONCE", -1)  # nothing is few enough to be counted roughly
            limits.setattr(body_complexity, "_MAX_VALUES", commas)
            assert check_complexity(text.encode()) == commas
            limits.setattr(body_complexity, "_MAX_CONTAINERS", containers - 1)
            with pytest.raises(InvalidRequest, match="lists and objects"):
                check_complexity(text.encode())


def test_lenient_bodies_become_what_strict_ones_are() -> None:
    decoder = BodyDecoder(CompletionBody, tokens="prompt")
    decoded = decoder.decode(
        f'{{"prompt": {long_list()}, "x": 1, "stream_options": {{"x": 2, "include_usage": true}}}}'.encode(),
        ignore_unknown=True,
    )
    assert type(decoded) is CompletionBody
    assert decoded.stream_options is not None
    assert decoded.stream_options.include_usage


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that were allocated at once while a body was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_error_about_a_long_name_makes_no_copies_of_it() -> None:
    """It is in msgspec's message, which has to be made of it: two copies for a moment, and no third."""
    name = b"s" * SIZE
    body = b'{"model": "m", "prompt": "x", "stream_options": {"%b": 1}}' % name
    assert peak_of(lambda: COMPLETION.decode(body)) < 2.5 * SIZE


def test_the_arguments_of_a_call_are_counted_without_a_copy() -> None:
    call = ToolCall(function=ToolFunction(name="f", arguments="[" + "[5]," * (SIZE // 4) + "5]"))
    body = ChatBody(model="m", messages=[Message(role="assistant", tool_calls=[call])])
    model = ServedModel(
        names=("m",), tokenizer=tokenizer(), vocab_size=256, eos_token_ids=(), max_model_len=SIZE, sampling_defaults={}
    )
    assert peak_of(lambda: read_conversation(body, model, lambda: False)) < 0.75 * SIZE


@pytest.mark.parametrize("text", ["é" * 300_000 + '"[', "\\" * 262_145 + '"' + "[", '"' + "\\\\" * 131_072 + '"[,'])
def test_characters_are_counted_as_their_bytes(text: str) -> None:
    parts = [b"".join(_outside_strings(data)) for data in (text.encode(), Characters(text))]
    assert parts[0] == parts[1]
