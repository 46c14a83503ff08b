"""Bodies that no client should send: requests mutated by structure and by byte, and the reviews' attacks by name."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

MODEL = "served"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_MIB = 1 << 20
MAX_CHARS = 5 * _MIB
"""Of one body: a little more than the router takes."""


class Body(NamedTuple):
    """One body, and where it goes."""

    path: str
    data: bytes
    name: str  # of the mutation


def _completion(rng: random.Random) -> dict[str, Any]:
    prompts: list[Any] = ["The quick brown fox", ["one", "two"], [5, 6, 7, 8], [[5, 6], [7]], "é 😀 \u0000 x"]
    return {
        "model": MODEL,
        "prompt": rng.choice(prompts),
        "max_tokens": rng.randint(1, 3),
        "temperature": rng.choice([0, 0.7, 1.5]),
        **dict(rng.sample(_optional(rng), rng.randint(0, 5))),
        **dict(rng.sample([("echo", True), ("logprobs", 2), ("best_of", None), ("suffix", None)], rng.randint(0, 2))),
    }


def _chat(rng: random.Random) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Hi!", "tool_calls": None},
        {"role": "user", "content": "So?", "name": "x"},
    ]
    return {
        "model": MODEL,
        "messages": turns[: rng.randint(1, 4)],
        "max_completion_tokens": rng.randint(1, 3),
        **dict(rng.sample(_optional(rng), rng.randint(0, 5))),
        **dict(rng.sample([("logprobs", True), ("response_format", {"type": "text"}), ("tools", None)], 1)),
    }


def _response(rng: random.Random) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi!"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    own: list[tuple[str, Any]] = [
        ("instructions", "Be brief."),
        ("reasoning", {"effort": "low"}),
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["x", {"a": [1]}]}}}),
        ("tools", [{"type": "function", "name": "f", "parameters": {"type": "object"}}]),
        ("tool_choice", rng.choice(["none", {"type": "function", "name": "f"}])),
        ("include", ["message.output_text.logprobs"]),
        ("previous_response_id", None),
    ]
    shared = [(name, value) for name, value in _optional(rng) if name not in _NOT_OF_RESPONSES]
    return {
        "model": MODEL,
        "input": rng.choice(["Hello", items[: rng.randint(1, 5)]]),
        "max_output_tokens": rng.randint(1, 3),
        **dict(rng.sample(own, rng.randint(0, 3))),
        **dict(rng.sample(shared, rng.randint(0, 3))),
    }


_NOT_OF_RESPONSES = {"n", "prompt_logprobs", "return_token_ids"}


def _optional(rng: random.Random) -> list[tuple[str, Any]]:
    return [
        ("n", rng.randint(1, 3)),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1.5, "7": -100}),
        ("seed", rng.randint(-5, 5)),
        ("stop", rng.choice(["x", ["a", "bc"], ["\u0000"]])),
        ("stop_token_ids", [1, 2]),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("cache_salt", "salt"),
        ("priority", 1),
        ("user", "u"),
        ("min_tokens", 1),
        ("allowed_token_ids", [5, 6, 7, 8]),
        ("bad_words", ["the", " x", "ab cd"]),
        ("truncate_prompt_tokens", rng.choice([-1, 2])),
        ("prompt_cache_key", "key"),
        ("metadata", {"a": {"b": [1]}}),
        ("store", False),
        ("stream", True),
    ]


_NUMBERS = ["NaN", "Infinity", "-Infinity", "-0", "1e999", "-1e999", "1e-999", "9" * 400, "-" + "9" * 25, "0.5", "01",
            str(2**31), str(2**53), str(2**63), str(-(2**63) - 1), str(2**64), "1e2", "0x10", "1_000",
            "+1", ".5", "5."]  # fmt: skip


class _Raw(str):
    """JSON text that is written as it is."""


def _value(rng: random.Random) -> Any:
    """A value of some other kind."""
    depth = rng.choice([1, 3, 50, 1500, 100_000])
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice([-1, 0, 1, 2, 127, 128, 129, 1000, 2**31, -(2**40)]),
        lambda: _Raw(rng.choice(_NUMBERS)),
        lambda: rng.choice(["", "x", "\u0000", "\ud800", "\U0010ffff", "5", "null", "a" * 5000, "\\", "😀" * 300]),
        lambda: "".join(map(chr, rng.sample(range(0xD7FF), 40))),
        list,
        dict,
        lambda: [5] * rng.choice([1, 100, 2000, 50_000]),
        lambda: [[5]] * rng.choice([1, 100, 2000, 50_000]),
        lambda: ["a"] * rng.choice([1, 100, 2000, 50_000]),
        lambda: [{"role": "user", "content": "x"}] * rng.choice([1, 50, 2000, 10_000]),
        lambda: {str(i): i for i in range(rng.choice([1, 300, 5000]))},
        lambda: [1, "a", None, [2], {"b": 3}],
        lambda: _Raw("[" * depth + "]" * depth),
        lambda: _Raw('{"a":' * depth + "1" + "}" * depth),
        lambda: {"type": "text", "text": "x", "more": [{}]},
    ]
    return rng.choice(choices)()


def _random_place(rng: random.Random, tree: Any) -> tuple[Any, Any] | None:
    """A container inside and one of its keys, by a random walk: values may be shared, so paths are without number."""
    place = None
    while isinstance(tree, dict | list) and tree and (place is None or rng.random() < 0.6):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        place = (tree, key)
        tree = tree[key]
    return place


def _dump(value: Any, rng: random.Random | None = None) -> str:
    """JSON, in which `_Raw` is verbatim; with `rng` keys are doubled and spaces strewn now and then."""
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        items = [f"{json.dumps(str(key))}:{_dump(inner, rng)}" for key, inner in value.items()]
        if rng is not None and items and rng.random() < 0.3:
            items.append(rng.choice(items))
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        if len(value) > 64:
            unit = _dump(value[0])
            return "[" + ",".join([unit] * min(len(value), _MIB // len(unit) + 1)) + "]"
        return "[" + ",".join(_dump(inner, rng) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=rng is None or rng.random() < 0.5)


def _encode(text: str) -> bytes:
    return text[:MAX_CHARS].encode("utf-8", "surrogatepass")


def mutated(rng: random.Random) -> Body:
    """A request with some of its values, keys or bytes changed; one in ten is left whole."""
    path, tree = rng.choice([(COMPLETIONS, _completion(rng)), (CHAT, _chat(rng)), (RESPONSES, _response(rng))])
    kind = rng.random()
    if kind < 0.1:
        return Body(path, _encode(_dump(tree)), "whole")
    if kind < 0.7:
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            _mutate_tree(rng, tree)
        return Body(path, _encode(_dump(tree, rng)), "structure")
    return Body(path, _mutate_bytes(rng, bytearray(_encode(_dump(tree)))), "bytes")


def _mutate_tree(rng: random.Random, tree: dict[str, Any]) -> None:
    place = _random_place(rng, tree)
    if place is None or rng.random() < 0.1:
        names = ["zzz", "kv_transfer_params", "model", "prompt", "messages", "input", "stop", "n"]
        tree[rng.choice(names)] = _value(rng)
        return
    container, key = place
    if rng.random() < 0.15:
        del container[key]
    else:
        container[key] = _value(rng)


def _mutate_bytes(rng: random.Random, data: bytearray) -> bytes:
    for _ in range(rng.choice([1, 2, 8])):
        at = rng.randrange(len(data) or 1)
        end = at + rng.choice([0, 1, 1, 3, 10])
        pieces = [b"", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"NaN", b'"', b"\\", b"\\u", b"[", b"{", b",",
                  b"1e9", rng.randbytes(4), bytes(data[at : at + 20]), b"\xef\xbb\xbf"]  # fmt: skip
        data[at:end] = rng.choice(pieces)
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data)


def _list_of(unit: str, size: int) -> _Raw:
    return _Raw("[" + ",".join([unit] * (size // (len(unit) + 1))) + "]")


def attacks(size: int = 4 * _MIB - 4096) -> list[Body]:
    """The attacks 3, 4, 5 and 10 of the reviews whose bodies may come in, each of at most `size` bytes."""
    text = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    chat = {"model": MODEL, "max_tokens": 1}
    big = "s" * (size - 200)
    trees: list[tuple[str, str, dict[str, Any]]] = [
        ("salt", COMPLETIONS, {**text, "n": 28, "cache_salt": big}),
        ("stop token ids", COMPLETIONS, {**text, "n": 28, "stop_token_ids": _list_of("5", size - 200)}),
        ("long text", COMPLETIONS, {**text, "prompt": "word " * ((size - 200) // 5)}),
        ("long word", COMPLETIONS, {**text, "prompt": big}),
        ("spaces", COMPLETIONS, {**text, "prompt": " " * (size - 200)}),
        ("texts", COMPLETIONS, {**text, "prompt": _list_of('"a"', size - 200)}),
        ("escaped texts", COMPLETIONS, {**text, "prompt": _list_of('"\\\\"', size - 200)}),
        ("lists", COMPLETIONS, {**text, "prompt": _list_of("[5]", size - 200)}),
        ("token ids", COMPLETIONS, {**text, "prompt": _list_of("5", size - 200)}),
        ("long lists", COMPLETIONS, {**text, "prompt": _list_of(_list_of("5", 4000), size - 200)}),
        ("one stop", COMPLETIONS, {**text, "stop": [big]}),
        ("many stops", COMPLETIONS, {**text, "stop": _list_of('"ab"', size - 200)}),
        ("stops and choices", COMPLETIONS, {**text, "n": 128, "stop": [f"{i:02}" + "a" * 7000 for i in range(64)]}),
        (
            "allowed stops and choices",
            COMPLETIONS,
            {**text, "n": 128, "stop": ["a" * 62 + f"{i:02}" for i in range(64)]},
        ),
        ("logit bias", COMPLETIONS, {**text, "logit_bias": {str(i): 1 for i in range(size // 20)}}),
        ("model name", COMPLETIONS, {**text, "model": big}),
        ("field name", COMPLETIONS, {**text, big: 1}),
        ("turns", CHAT, {**chat, "messages": _list_of('{"role":"user","content":"x"}', size - 200)}),
        ("allowed turns", CHAT, {**chat, "messages": [{"role": "user", "content": ""}] * 8192}),
        (
            "parts",
            CHAT,
            {**chat, "messages": [{"role": "user", "content": _list_of('{"type":"text","text":""}', size - 300)}]},
        ),
        (
            "calls",
            CHAT,
            {
                **chat,
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": _list_of('{"function":{"name":"f","arguments":"{}"}}', size - 300),
                    }
                ],
            },
        ),
        (
            "lists in arguments",
            CHAT,
            {
                **chat,
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"function": {"name": "f", "arguments": "[" + "[5]," * (size // 4 - 200) + "5]"}}
                        ],
                    }
                ],
            },
        ),
        (
            "template variables",
            CHAT,
            {**chat, "messages": [], "chat_template_kwargs": {"x": _list_of("[5]", size - 300)}},
        ),
        ("items", RESPONSES, {"input": _list_of('{"role":"user","content":"x"}', size - 200)}),
        (
            "items' parts",
            RESPONSES,
            {"input": [{"role": "user", "content": _list_of('{"type":"input_text","text":""}', size - 300)}]},
        ),
        ("repeated tools", RESPONSES, {"input": "x", "tool_choice": "none", "tools": _list_of("{}", size - 300)}),
        ("instructions", RESPONSES, {"input": "x", "instructions": big}),
        ("allowed ids", COMPLETIONS, {**text, "n": 128, "allowed_token_ids": _list_of("5", size - 200)}),
        ("bad words", COMPLETIONS, {**text, "n": 128, "bad_words": _list_of('"ab"', size - 200)}),
        ("one bad word", COMPLETIONS, {**text, "bad_words": [big]}),
        ("text that is cut", COMPLETIONS, {**text, "prompt": big, "truncate_prompt_tokens": 1}),
        ("cache key", COMPLETIONS, {**text, "prompt_cache_key": big}),
        ("long turn", CHAT, {**chat, "messages": [{"role": "user", "content": big}]}),
        ("deep", COMPLETIONS, {**text, "prompt": _Raw("[" * (size // 2 - 200) + "]" * (size // 2 - 200))}),
        ("digits", COMPLETIONS, {**text, "max_tokens": _Raw("9" * (size - 200))}),
    ]
    return [Body(path, _encode(_dump(tree)), name) for name, path, tree in trees]
