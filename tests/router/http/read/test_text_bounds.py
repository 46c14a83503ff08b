"""Work that a body may cause: bounded before it is done, off the event loop, and dropped when nobody waits for it."""

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from asgi_client import begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, ids, make_app, model_config, tokenizer

from pdkv.base.limits import MAX_MESSAGES
from pdkv.config import HttpApi
from pdkv.errors import InvalidRequest, RequestAborted
from pdkv.router.http import app as app_module
from pdkv.router.http.read import job as openai
from pdkv.router.http.read import text_pool
from pdkv.router.http.read.decoding import CHAT as CHAT_DECODER
from pdkv.router.http.read.decoding import COMPLETION as COMPLETION_DECODER
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.read.text_pool import INLINE_BYTES, TextPool
from pdkv.text import StopAutomaton, Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FOUR_MIB = 4 << 20


def completion(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model": "%s", "prompt": %s%s}' % (MODEL.encode(), prompt, more)


def many(unit: bytes) -> bytes:
    """A list of about 4 MiB."""
    return b"[" + b",".join([unit] * (FOUR_MIB // (len(unit) + 1) - 100)) + b"]"


def refuse(path: str, body: bytes) -> dict[str, Any]:
    """The error of a request that must not reach an engine."""
    dispatcher = FakeDispatcher()
    reply = run(call(make_app(dispatcher), "POST", path, body))
    assert reply.status in (400, 404), reply.body[:300]
    assert dispatcher.generations == []
    assert len(reply.body) < 2000
    return reply.json()["error"]


@pytest.fixture
def no_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tokenized or rendered fails the test."""
    model_config()  # the application's own use of the tokenizer

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("worked on before its bounds were checked")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    monkeypatch.setattr(Tokenizer, "render_chat", fail)


def chat(messages: bytes) -> bytes:
    return b'{"model": "small", "messages": %s}' % messages


def shown(field: bytes) -> bytes:
    """Eight prompts of 127 tokens, all of which the reply would show."""
    prompts = b"[" + b",".join([b"[5" + b",5" * 126 + b"]"] * 8) + b"]"
    return completion(prompts, b', "n": 128, "%s": true' % field)


TOO_MUCH: Sequence[tuple[str, Callable[[], bytes], str]] = [
    (COMPLETIONS, lambda: completion(many(b"[5]")), "lists and objects"),
    (COMPLETIONS, lambda: completion(b'"["', b', "prompt": ' + many(b"[5]")), "lists and objects"),
    (COMPLETIONS, lambda: completion(many(b'"a"')), "strings and field names"),
    (COMPLETIONS, lambda: completion(many(b'"\\\\"')), "strings and field names"),
    (COMPLETIONS, lambda: completion(b"[" + b",".join([b'"a"'] * 1025) + b"]"), "1024, got 1025 * 1"),
    (COMPLETIONS, lambda: completion(b"[" + b",".join([b"[5]"] * 9) + b"]", b', "n": 128'), "1024, got 9 * 128"),
    (COMPLETIONS, lambda: completion(many(b"5")), "1048576 values"),
    (COMPLETIONS, lambda: completion(many(b"12345")), "tokens, but the model's length is 128"),
    (
        COMPLETIONS,
        lambda: completion(b'["x", "' + b"x" * (3 << 20) + b'"]'),
        "characters, but the model's length is 128",
    ),
    (
        COMPLETIONS,
        lambda: completion(
            b"[" + b",".join([b"[5" + b",5" * 99 + b"]"] * 8) + b"]", b', "n": 128, "echo": true, "logprobs": 20'
        ),
        "800 tokens, 20 + 1 of each, 128 times",
    ),
    (
        COMPLETIONS,
        lambda: shown(b"return_token_ids"),
        "return_token_ids: the reply would show more than 100000 prompt tokens: 1016 * 128",
    ),
    (COMPLETIONS, lambda: shown(b"echo"), "echo: the reply would show more than 100000 prompt tokens: 1016 * 128"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "stop": ' + many(b'"a"')), "strings and field names"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "stop": ["' + b"a" * (3 << 20) + b'"]'), "at most 4096 bytes"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "stop_token_ids": ' + many(b"12345")), "65536 values beside"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "stop_token_ids": [' + b"5," * 9999 + b"5]"), "at most 256 entries"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "cache_salt": "%s"' % (b"s" * (3 << 20))), "at most 256 bytes"),
    (COMPLETIONS, lambda: completion(b'"x"', b', "%s": 1' % (b"f" * (3 << 20))), "is not a known field"),
    (
        COMPLETIONS,
        lambda: b'{"model": "%s", "prompt": "x"}' % (b"m" * (3 << 20)),
        "does not exist; this server has 'small'",
    ),
    (CHAT, lambda: chat(many(b'{"role":"user","content":"x"}')), "strings and field names"),
    (
        CHAT,
        lambda: chat(b'[{"role": "user", "content": ' + many(b'{"type":"text","text":""}') + b"}]"),
        "strings and field names",
    ),
    (CHAT, lambda: chat(b"[" + b",".join([b'{"role":"user","content":""}'] * 8193) + b"]"), "8192 turns"),
    (
        CHAT,
        lambda: chat(b'[{"role": "user", "content": "' + b"x" * (3 << 20) + b'"}]'),
        "characters, but the model's length is 128",
    ),
]
"""Path, body (made when its test runs: they are of megabytes), and what the error says."""


@pytest.mark.usefixtures("no_tokenizing")
@pytest.mark.parametrize("number", range(len(TOO_MUCH)))
def test_too_much_is_refused_before_it_is_worked_on(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """F29."""
    monkeypatch.setattr(openai, "MAX_SHOWN_PROMPT_TOKENS", 100_000)
    path, body, words = TOO_MUCH[number]
    assert words in refuse(path, body())["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("shape", ["agent", "turns", "parts", "calls"])
def test_the_longest_histories_that_the_page_allows_are_served(path: str, shape: str) -> None:
    """1,500 rounds of an agent with 300 tools, and as many turns, parts and calls as may be."""
    messages, items = histories(shape)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "d"} for i in range(8)}}
    functions = [{"name": f"t{i}", "description": "d", "parameters": schema} for i in range(300)]
    body: dict[str, Any] = {"model": MODEL}
    if path == CHAT:
        body |= {"messages": messages, "tools": [{"type": "function", "function": f} for f in functions]}
    else:
        body |= {"input": items, "tools": [{"type": "function", **f} for f in functions]}
    api = HttpApi(tool_parser="hermes")
    reply = run(call(make_app(FakeDispatcher(say(ids("x"))), max_model_len=500_000, api=api), "POST", path, body))
    assert reply.status == 200, reply.body[:500]


def histories(shape: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As messages, and as items."""
    if shape == "turns":
        turns = [{"role": "user", "content": "x"}] * MAX_MESSAGES
        return turns, turns
    if shape == "parts":
        turn: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "x"}] * 8}
        item: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 8}
        return [turn] * (MAX_MESSAGES // 8), [item] * (MAX_MESSAGES // 8)
    num_rounds, size = (1500, 1) if shape == "agent" else (MAX_MESSAGES // 18, 8)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for _ in range(num_rounds):
        function = {"name": "t1", "arguments": '{"p0": ["a", "b"]}'}
        calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(size)]
        messages.append({"role": "assistant", "content": "I look", "tool_calls": calls})
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]})
        items += [{"type": "function_call", "call_id": f"c{i}", **function} for i in range(size)]
        messages += [{"role": "tool", "tool_call_id": f"c{i}", "content": "ok"} for i in range(size)]
        items += [{"type": "function_call_output", "call_id": f"c{i}", "output": "ok"} for i in range(size)]
    return messages, items


def test_a_text_full_of_brackets_and_quotes_is_a_text() -> None:
    """What looks like a million lists is one string: it is refused for its length, as any text is."""
    text = '[{"\\' * 200_000
    for prompt in (text, "\\" * 1_000_001, '"' * 1_000_000):
        body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
        assert COMPLETION_DECODER.decode(body).prompt == prompt
    assert CHAT_DECODER.decode(json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode())


def served_model(max_model_len: int) -> ServedModel:
    return ServedModel(
        names=(MODEL,),
        tokenizer=tokenizer(),
        vocab_size=tokenizer().vocab_size,
        eos_token_ids=(1,),
        max_model_len=max_model_len,
    )


def test_of_a_text_that_will_not_fit_only_the_beginning_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long token in the vocabulary makes the bound on characters useless; then the first ones tell."""
    monkeypatch.setitem(tokenizer().__dict__, "max_token_chars", 128)
    encode = Tokenizer.encode
    lengths = []

    def count(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", count)
    body = COMPLETION_DECODER.decode(completion(b'"' + b"z" * 12_800 + b'"'))
    with pytest.raises(InvalidRequest, match=r"the first 1600 of which have 1600 tokens") as raised:
        openai.prepare_completion(body, served_model(100))
    assert raised.value.code == "context_length_exceeded"
    assert lengths == [1600]


def test_prompt_tokens_times_n_are_bounded() -> None:
    model = served_model(200_000)
    body = COMPLETION_DECODER.decode(
        completion(b"[" + b",".join([b"5"] * 150_000) + b"]", b', "n": 128, "max_tokens": 1')
    )
    with pytest.raises(InvalidRequest, match=r"prompt tokens times n must be at most 16777216, got 150000 \* 128"):
        openai.prepare_completion(body, model)


def test_one_automaton_serves_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 stop strings of 64 characters, n = 128: one table, and none crosses the wire to an engine."""
    built = []
    init = StopAutomaton.__init__

    def count(self: StopAutomaton, stops: Any) -> None:
        built.append(len(stops))
        init(self, stops)

    monkeypatch.setattr(StopAutomaton, "__init__", count)
    dispatcher = FakeDispatcher(say(ids("ab")))
    body = {"model": MODEL, "prompt": "x", "n": 128, "stop": [f"{i:02}" + "x" * 62 for i in range(64)]}
    reply = run(call(make_app(dispatcher), "POST", COMPLETIONS, body))
    assert reply.status == 200
    assert built == [64]
    assert len(dispatcher.requests) == 128
    assert {request.params.stop for request in dispatcher.requests} == {()}


class Gate:
    """Work that stands still until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.cancelled = False

    def work(self, cancelled: Callable[[], bool]) -> str:
        self.entered.set()
        assert self.open.wait(30)
        self.cancelled = cancelled()
        return "done"


async def test_what_nobody_waits_for_leaves_the_queue() -> None:
    pool = TextPool()
    gate = Gate()
    running = asyncio.create_task(pool.run(3000, gate.work))
    await asyncio.to_thread(gate.entered.wait)
    ran: list[int] = []
    queued = asyncio.create_task(pool.run(4000, lambda cancelled: ran.append(1)))
    await asyncio.sleep(0)
    assert pool.held == 7000
    for task in (queued, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert pool.held == 0
    gate.open.set()
    assert await pool.run(4000, lambda cancelled: "next") == "next"
    assert gate.cancelled
    assert ran == []
    pool.close()


def spin(seconds: float) -> None:
    """Use a processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_turns_go_by_key_and_what_was_used_of_a_processor_counts() -> None:
    """F31. One key's work is longer than its texts explain; the other's, sent behind it, has its turns first."""
    pool = TextPool()
    gate, order = Gate(), list[str]()

    def work(name: str, seconds: float) -> Callable[[Callable[[], bool]], None]:
        return lambda cancelled: (spin(seconds), order.append(name))[1]

    tasks = [asyncio.create_task(pool.run(3000, gate.work, "another"))]
    await asyncio.to_thread(gate.entered.wait)
    tasks += [asyncio.create_task(pool.run(3000, work("a", 0.1), "a")) for _ in range(3)]
    tasks += [asyncio.create_task(pool.run(3000, work("b", 0.0), "b")) for _ in range(3)]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "b", "b", "a", "a"]
    pool.close()


async def test_what_takes_longer_than_its_text_explains_is_done_apart_from_texts() -> None:
    pool = TextPool()
    gate, threads = Gate(), list[str]()

    def schema(cancelled: Callable[[], bool]) -> str:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        if threads[-1] == "text-schemas":
            return gate.work(cancelled)
        while not cancelled():
            pass
        raise RequestAborted("it is over", request_id="")

    task = asyncio.create_task(pool.run(3000, schema, "a"))
    await asyncio.to_thread(gate.entered.wait)
    assert await pool.run(3000, lambda cancelled: "text", "a") == "text"
    gate.open.set()
    assert await task == "done"
    assert threads == ["text-short", "text-schemas"]
    pool.close()


async def test_a_schema_leaves_the_event_loop_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """F31. It pauses after each slice; when its client leaves, a pause is over."""
    for name, seconds in (("_SLICE_S", 0.0), ("_PAUSE_S", 600.0)):
        monkeypatch.setattr(text_pool, name, seconds)
    pool, paused, asked = TextPool(), threading.Event(), list[bool]()

    def schema(cancelled: Callable[[], bool]) -> None:
        if threading.current_thread().name.startswith("text-short"):
            raise RequestAborted("it takes longer than its text explains", request_id="")
        spin(0.001)
        paused.set()
        asked.append(cancelled())

    task = asyncio.create_task(pool.run(3000, schema, "a"))
    await asyncio.to_thread(paused.wait, 60)
    await asyncio.sleep(0.05)
    assert asked == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pool.close()
    await asyncio.to_thread(pool._schemas._thread.shutdown)
    assert asked == [True]


async def test_a_pool_that_is_closed_drops_what_waits() -> None:
    pool, gate = TextPool(), Gate()
    running = asyncio.create_task(pool.run(3000, gate.work))
    await asyncio.to_thread(gate.entered.wait)
    queued = asyncio.create_task(pool.run(3000, lambda cancelled: "never"))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.open.set()
    assert await running == "done"


async def test_large_bodies_do_not_hold_up_small_ones() -> None:
    pool = TextPool()
    gate = Gate()
    large = asyncio.create_task(pool.run(1 << 20, gate.work))
    await asyncio.to_thread(gate.entered.wait)
    assert await pool.run(3000, lambda cancelled: "small") == "small"
    gate.open.set()
    assert await large == "done"
    pool.close()


def hold_the_first(monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, list[str]]:
    """The gate at which the tokenizer waits with a text that begins with 1, and the first characters of its texts."""
    gate = Gate()
    encoded: list[str] = []
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text[0])
        if text[0] == "1":
            gate.work(lambda: False)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    return gate, encoded


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_that_leaves_is_not_tokenized_for(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Its work is in the queue behind another's; health is answered all the while."""
    app = make_app(FakeDispatcher(say(ids("ab"))))  # which tokenizes, too
    gate, encoded = hold_the_first(monkeypatch)
    monkeypatch.setattr(Tokenizer, "render_chat", lambda self, messages, **_: messages[0]["content"])

    def body(text: str) -> bytes:
        prompt: dict[str, Any] = {"prompt": text}
        if path == CHAT:
            prompt = {"messages": [{"role": "user", "content": text}]}
        return json.dumps({"model": MODEL, "max_tokens": 1, **prompt}).encode().ljust(INLINE_BYTES + 1)

    _, first = begin(app, "POST", path, body("1"))
    await asyncio.to_thread(gate.entered.wait)
    leaver, second = begin(app, "POST", path, body("2"))
    third_reply, third = begin(app, "POST", path, body("3"))
    assert (await call(app, "GET", "/health")).status == 200
    leaver.disconnect()
    await second
    assert leaver.status == 0
    gate.open.set()
    await first
    await third
    assert third_reply.status == 200
    assert encoded == ["1", "3"]


async def test_of_a_client_that_leaves_no_further_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer cannot be interrupted, but a request may have hundreds of prompts."""
    app = make_app(FakeDispatcher(say(ids("ab"))))  # which tokenizes, too
    gate, encoded = hold_the_first(monkeypatch)

    def body(prompt: list[str]) -> bytes:
        return json.dumps({"model": MODEL, "max_tokens": 1, "prompt": prompt}).encode().ljust(INLINE_BYTES + 1)

    leaver, first = begin(app, "POST", COMPLETIONS, body(["1", "2", "3"]))
    await asyncio.to_thread(gate.entered.wait)
    leaver.disconnect()
    await first
    gate.open.set()
    assert (await call(app, "POST", COMPLETIONS, body(["4"]))).status == 200  # the same thread's next work
    assert encoded == ["1", "4"]


async def test_a_deadline_ends_the_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(FakeDispatcher())  # which tokenizes, too
    gate = Gate()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        gate.work(lambda: False)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode().ljust(INLINE_BYTES + 1)
    reply = await call(app, "POST", COMPLETIONS, body, {"x-pd-timeout-s": "0.05"})
    assert (reply.status, reply.json()["error"]["code"]) == (504, "timeout")
    gate.open.set()


class Marker:
    """Something that a frame holds."""


def test_a_refused_body_is_freed_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bodies of refused requests pile up until it runs."""
    markers = []
    freed = threading.Event()

    def refuse_it(body: Any, model: Any, cancelled: Any) -> Any:
        marker = Marker()
        markers.append(weakref.ref(marker, lambda _: freed.set()))
        raise InvalidRequest("no")

    monkeypatch.setattr(app_module, "prepare_completion", refuse_it)
    for size in (100, INLINE_BYTES + 1, 1 << 20):
        gc.collect()
        gc.disable()
        try:
            reply = run(call(make_app(FakeDispatcher()), "POST", COMPLETIONS, completion(b'"x"').ljust(size)))
            assert reply.status == 400
            assert freed.wait(30)  # the thread that refused it may still be on its way out
            assert markers.pop()() is None
            freed.clear()
        finally:
            gc.enable()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_200_long_prompts_at_once_take_two_threads_and_no_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Template and tokenizer run beside the event loop, a prompt at a time on each of two threads; /health is asked
    and answered between any two of them.
    """
    app = make_app(FakeDispatcher(say(ids("ab"))))
    encode, busy = Tokenizer.encode, threading.Lock()
    threads: dict[str, int] = {}
    now = most = 0

    def counting(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        nonlocal now, most
        with busy:
            now, most = now + 1, max(most, now + 1)
            name = threading.current_thread().name
            threads[name] = threads.get(name, 0) + 1
        try:
            return encode(self, text, add_special_tokens=add_special_tokens)
        finally:
            with busy:
                now -= 1

    monkeypatch.setattr(Tokenizer, "encode", counting)
    sizes = [5_000 + 100 * i if i % 2 else 70_000 for i in range(200)]
    texts = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    tasks = []
    for size in sizes:
        body = json.dumps({"model": MODEL, "max_tokens": 1, "truncate_prompt_tokens": 20, **texts})
        body = body.replace('"x"', '"' + "long " * (size // 5) + '"')
        tasks.append(asyncio.create_task(call(app, "POST", path, body.encode())))
    num_health = 0
    while not all(task.done() for task in tasks):
        assert (await call(app, "GET", "/health")).status == 200
        num_health += 1
    assert {task.result().status for task in tasks} == {200}
    assert num_health > 10
    assert sum(threads.values()) >= 200
    assert len(threads) == 2
    assert most <= 2
    assert all(name.startswith("text-") for name in threads)
