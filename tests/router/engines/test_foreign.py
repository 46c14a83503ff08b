"""A server of another engine as a backend, over real connections to one that lies, hangs and goes away."""

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import anyio
import h11
import msgspec
import pytest
import uvloop
from coroutines import Turns
from foreign_server import HEAD, MODELS, Server, event
from wire_rig import Listener

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import IncompatiblePeers
from pdkv.router.engines import foreign
from pdkv.router.engines.foreign import ForeignEngine, Terms
from pdkv.router.engines.foreign_answers import Events
from pdkv.router.engines.foreign_kinds import KINDS
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.messages import Abort, AskReport, Failed, Finished, Submit, Tokens
from pdkv.wire.reports import LoadReport

event_loop = uvloop.new_event_loop  # the router's kind


class Heard(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []

    def engine_refused(self, name: str, error: IncompatiblePeers) -> None:
        self.refusals.append(str(error))
        self.changed.set()

    def of(self, kind: type) -> list[object]:
        return [message for frame in self.frames for message in frame if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def rig(
    server: Server, *, up: bool = True, length: int | None = None, kind: str = "vllm"
) -> AsyncIterator[tuple[ForeignEngine, Heard]]:
    port = await server.start()
    terms = dataclasses.replace(TERMS, max_model_len=length)
    engine, heard = ForeignEngine(f"{kind}-0", f"{kind}+http://127.0.0.1:{port}", terms), Heard()
    engine.connect(heard)
    try:
        if up:
            await heard.until(lambda: bool(heard.cards))
        yield engine, heard
    finally:
        engine.close()
        await server.die()


TERMS = Terms(
    tokenizer=Tokenizer.from_dir(DEFAULT_MODEL),
    vocab_size=100,
    num_positions=128,
    max_model_len=None,
    names=("m",),
    max_num_seqs=4,
    key="sk",
)


REQUEST = GenerateRequest(
    prompt_token_ids=[5], params=SamplingParams(max_tokens=5, temperature=0.0, seed=1), timeout_s=30.0
)


@contextlib.asynccontextmanager
async def fleet(*servers: Server, kinds: Sequence[str] = ("vllm", "vllm")) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(policy="round_robin")
    for number, (kind, server) in enumerate(zip(kinds, servers, strict=True)):
        endpoint = f"{kind}+http://127.0.0.1:{await server.start()}"
        dispatcher.add_backend(ForeignEngine(f"{kind}-{number}", endpoint, TERMS), KINDS[kind].role)
    dispatcher.connect()
    try:
        await dispatcher.listener.wait_ready()
        yield dispatcher
    finally:
        dispatcher.close()
        for server in servers:
            await server.die()


def submit(name: str = "r") -> Submit:
    params = SamplingParams(max_tokens=8, seed=1)
    return Submit(request_id=name, transfer_id="t", attempt=0, prompt_token_ids=[5], params=params, cache_salt="salt")


async def test_a_request_becomes_tokens_and_an_end_and_only_the_operator_s_key_leaves() -> None:
    server = Server()
    answer = server.answer

    async def with_cookie(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.removesuffix(b"\r\n") + b"set-cookie: replica=1\r\n\r\n")
        writer.write(event([1, 2]) + event([3], "stop") + b"data: [DONE]\n\n")
        server.answer = answer  # type: ignore[method-assign]

    server.answer = with_cookie  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        assert (heard.cards[0].max_model_len, heard.cards[0].backend) == (64, "vllm")
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Finished)))
        assert heard.of(Tokens) == [Tokens("r", 0, 0, [1, 2]), Tokens("r", 0, 2, [3])]
        engine.send(submit("s"))
        await heard.until(lambda: len(heard.of(Finished)) == 2)
        engine.send(AskReport(5))
        await heard.until(lambda: any(isinstance(m, LoadReport) and m.answers == 5 for m in heard.of(LoadReport)))
    head, body = server.heads[-1], server.bodies[-1]
    names = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:] if line}
    known = {"host", "accept", "accept-encoding", "connection", "user-agent", "authorization", "content-length"}
    assert names == {name.encode() for name in known | {"content-type"}}
    assert b"bearer sk" in head
    assert body["prompt"] == [5]


async def test_a_connection_that_is_not_made_in_time_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    async with rig(server) as (engine, heard):
        connect, late = anyio.connect_tcp, [TimeoutError()]

        async def connect_late(*args: Any, **more: Any) -> Any:
            if late:
                raise late.pop()
            return await connect(*args, **more)

        monkeypatch.setattr(anyio, "connect_tcp", connect_late)
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Finished) + heard.of(Failed)))
        assert (late, heard.of(Failed)) == ([], [])


@pytest.mark.parametrize(
    ("page", "length", "error"),
    [
        (MODELS, 32, "vllm-0 has max_model_len 64, --max-model-len is 32"),
        (b'{"data": [{"id": "m", "max_model_len": 256}]}', None, "max_model_len 256, and the model of --model 128"),
        (b'{"data": [{"id": "x"}, {"id": "y"}]}', None, "has the models x, y, and none is named m"),
    ],
)
async def test_another_model_is_refused_with_both_values(page: bytes, length: int | None, error: str) -> None:
    server = Server()
    server.pages[b"/v1/models"] = page
    async with rig(server, up=False, length=length) as (_, heard):
        await heard.until(lambda: bool(heard.refusals))
        assert error in heard.refusals[0]


@pytest.mark.parametrize(
    ("data", "error", "retryable"),
    [
        (HEAD + b"data: {\n\n", "cannot be read", True),
        (HEAD + event([1]) + b"data: " + b"x" * (1 << 19), "bytes without a token", True),
        (HEAD + event([1]), "it ended without a finish_reason", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + event([1]), "the stream broke", True),
        (b"nonsense\r\n\r\n", "the stream broke", True),
        (b"HTTP/1.1 500 No\r\n\r\nwhy", "HTTP 500: why", True),
        (b"HTTP/1.1 400 No\r\n\r\nwhy", "HTTP 400: why", False),
        (b"HTTP/1.1 401 No\r\n\r\nsk is no key", "HTTP 401: the key", True),
        (b"HTTP/1.1 302 No\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "HTTP 302", False),
    ],
)
async def test_an_answer_that_is_none_costs_its_own_request(data: bytes, error: str, retryable: bool) -> None:
    server = Server()

    async def lie(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    server.answer = lie  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Failed)))
        (failed,) = heard.of(Failed)
        assert isinstance(failed, Failed)
        assert error in failed.message
        assert TERMS.key not in failed.message
        assert failed.retryable == retryable
        assert heard.downs == []


async def test_the_death_of_a_server_is_one_event_and_it_is_found_again() -> None:
    server = Server()

    async def hang(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([1]))
        await writer.drain()
        await asyncio.Event().wait()

    server.answer = hang  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        for name in "abc":
            engine.send(submit(name))
        await heard.until(lambda: len(heard.of(Tokens)) == 3)
        port = int(engine.url.rpartition(":")[2])
        await server.die()
        await heard.until(lambda: bool(heard.downs))
        assert heard.of(Failed) == []
        await server.start(port)
        await heard.until(lambda: len(heard.cards) == 2)
        assert heard.cards[0].epoch != heard.cards[1].epoch
        assert len(heard.downs) == 1


async def test_a_server_that_began_again_unseen_has_its_length_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "HEALTH_S", 0.02)
    server = Server()
    async with rig(server) as (_, heard):
        server.pages[b"/v1/models"] = MODELS.replace(b"64", b"32")
        await heard.until(lambda: len(heard.cards) == 2)
        assert (heard.cards[1].max_model_len, len(heard.downs)) == (32, 1)
        server.pages[b"/v1/models"] = MODELS.replace(b"64", b"256")
        await heard.until(lambda: bool(heard.refusals))
        assert len(heard.downs) == 2


async def test_a_stream_goes_on_at_another_server_after_the_tokens_that_it_has() -> None:
    """By the real dispatcher."""
    first, second, told = Server(), Server(), asyncio.Event()

    async def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([1, 2]))
        await writer.drain()
        told.set()
        await asyncio.Event().wait()

    first.answer = begin  # type: ignore[method-assign]
    async with fleet(first, second) as dispatcher:
        generation = dispatcher.start_on("vllm-0", REQUEST)
        await told.wait()
        await first.die()
        tokens = [token async for delta in generation for token in delta.token_ids]
        assert tokens == [1, 2, 1, 2, 3]
        (body,) = second.bodies
        assert (body["prompt"], body["max_tokens"]) == ([5, 1, 2], 3)
        assert dispatcher.counters.migrated == 1


def prefilled(params: object) -> bytes:
    usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    return HEAD + json.dumps({"choices": [], "usage": usage, "kv_transfer_params": params}).encode()


WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.2", "remote_port": 5600}


@pytest.mark.parametrize("params", [WHERE, None])
async def test_a_prompt_s_kv_goes_from_a_prefill_server_to_a_decode_server_as_its_params_say(params: object) -> None:
    prefill, decode = Server(), Server()

    async def hand_over(writer: asyncio.StreamWriter) -> None:
        writer.write(prefilled(params))

    prefill.answer = hand_over  # type: ignore[method-assign]
    async with fleet(prefill, decode, kinds=("vllm-prefill", "vllm-decode")) as dispatcher:
        generation = dispatcher.start(REQUEST)
        assert [token async for delta in generation for token in delta.token_ids] == [1, 2, 3]
    (asked,), (given,) = prefill.bodies, decode.bodies
    assert (asked["max_tokens"], asked["stream"], asked["prompt"]) == (1, False, [5])
    assert asked["kv_transfer_params"]["do_remote_decode"] is True  # type: ignore[index]
    assert (given["kv_transfer_params"], given["max_tokens"], given["stream"]) == (params, 5, True)


async def test_a_decode_server_s_successor_computes_what_it_may_not_find_any_more() -> None:
    prefill, first, second, told = Server(), Server(), Server(), asyncio.Event()

    async def hand_over(writer: asyncio.StreamWriter) -> None:
        writer.write(prefilled(WHERE))

    async def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([1, 2]))
        await writer.drain()
        told.set()
        await asyncio.Event().wait()

    right = second.answer
    prefill.answer, first.answer, second.answer = hand_over, begin, begin  # type: ignore[method-assign]
    kinds = ("vllm-prefill", "vllm-decode", "vllm-decode")
    async with fleet(prefill, first, second, kinds=kinds) as dispatcher:
        generation = dispatcher.start(REQUEST)
        await told.wait()
        (dead, heir) = (first, second) if first.bodies else (second, first)
        heir.answer = right  # type: ignore[method-assign]
        await dead.die()
        assert [token async for delta in generation for token in delta.token_ids] == [1, 2, 1, 2, 3]
        assert ("kv_transfer_params" in dead.bodies[0], "kv_transfer_params" in heir.bodies[0]) == (True, False)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (prefilled({"remote_block_ids": list(range(50_000))}), "kv_transfer_params of"),
        (prefilled("x"), "kv_transfer_params of 3 bytes"),
        (prefilled({"x": "y" * (1 << 21)}), "an answer that cannot be read"),
        (HEAD + b'{"kv_transfer_params": ' + b'{"a":' * 100_000, "an answer that cannot be read"),
        (b"HTTP/1.1 500 No\r\n\r\nwhy", "HTTP 500: why"),
    ],
)
async def test_params_that_are_none_cost_their_own_request(answer: bytes, error: str) -> None:
    server = Server()

    async def lie(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    server.answer = lie  # type: ignore[method-assign]
    async with rig(server, kind="vllm-prefill") as (engine, heard):
        engine.send(msgspec.structs.replace(submit(), kv="handoff", until="first_token"))
        await heard.until(lambda: bool(heard.of(Failed)))
        (failed,) = heard.of(Failed)
        assert isinstance(failed, Failed)
        assert (error in failed.message, failed.retryable, heard.downs) == (True, True, [])


async def test_a_server_that_lies_is_ejected_and_its_requests_succeed_elsewhere() -> None:
    liar, honest = Server(), Server()

    async def lie(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([10**6]))

    liar.answer = lie  # type: ignore[method-assign]
    async with fleet(liar, honest) as dispatcher:
        for _ in range(12):
            generation = dispatcher.start(REQUEST)
            assert [token async for delta in generation for token in delta.token_ids] == [1, 2, 3]
        assert dispatcher.fleet.engines["vllm-0"].score.is_ejected
        assert len(liar.bodies) < 8


async def comment(writer: asyncio.StreamWriter, speaks: asyncio.Event | None = None, reason: str | None = None) -> None:
    """Send a token, then comments, while it `speaks`, until the client is gone."""
    writer.write(HEAD + event([1], reason))
    with contextlib.suppress(OSError):
        while not writer.transport.is_closing():
            if speaks is not None:
                await speaks.wait()
            writer.write(b": still here\n")
            await writer.drain()
            await asyncio.sleep(0.01)


async def test_an_abort_closes_the_connection_and_leaves_nothing() -> None:
    server, closed = Server(), asyncio.Event()

    async def until_gone(writer: asyncio.StreamWriter) -> None:
        await comment(writer)
        closed.set()

    server.answer = until_gone  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        engine.send(submit("s"))
        engine.send(Abort("s", 0))  # before it began
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Tokens)))
        engine.send(Abort("r", 0))
        await closed.wait()
        engine.send(AskReport(5))
        await heard.until(lambda: any(isinstance(m, LoadReport) and m.answers == 5 for m in heard.of(LoadReport)))
        assert (heard.of(LoadReport)[-1].running, heard.of(Failed)) == (0, [])  # type: ignore[attr-defined]


async def test_a_stream_that_says_nothing_more_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments that keep it open are no tokens."""
    monkeypatch.setattr(foreign, "TOKEN_S", 0.1)
    server = Server()

    server.answer = comment  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Failed)))
        assert "no token came in time" in str(heard.of(Failed))


async def test_a_server_that_talks_on_behind_its_answer_holds_it_up_no_longer_than_its_counts_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign, "END_S", 0.1)
    server = Server()
    server.answer = functools.partial(comment, reason="stop")  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Finished)))


async def test_others_have_their_turn_between_tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = 0, Counter[int]()
    feed = Events.feed

    def counted(events: Events, data: bytes) -> Iterator[bytes]:
        turns[turn] += 1
        return feed(events, data)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\n\n\r\n" * 2000)

    monkeypatch.setattr(Events, "feed", counted)
    server = Server()
    server.answer = trickle  # type: ignore[method-assign]
    async with rig(server) as (engine, _):
        engine.send(submit())
        while turns.total() < 2000:
            turn += 1
            await asyncio.sleep(0)
    assert max(turns.values()) <= foreign.PIECES_IN_A_ROW


async def test_others_have_their_turn_between_answers_that_are_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server held the event loop for 0.4 s, again and again."""
    turns, read, next_event = Turns(), Counter[int](), h11.Connection.next_event
    nothing_yet = b"HTTP/1.1 100 \r\n\r\n"

    def counted(connection: h11.Connection) -> Any:
        read[turns.number] += 1
        return next_event(connection)

    async def flood(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(nothing_yet * 4000)
        await Server.answer(server, writer)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    server = Server()
    server.answer = functools.partial(flood, server)  # type: ignore[method-assign]
    async with rig(server) as (engine, heard), turns:
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Finished)))
    assert read.total() > 4000
    assert max(read.values()) <= 512


async def test_a_server_that_hangs_is_down_unless_its_streams_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "HEALTH_S", 0.05)
    monkeypatch.setattr(foreign, "ANSWER_S", 0.5)  # the machine may stand still for a part of it
    server, speaks = Server(), asyncio.Event()
    speaks.set()

    server.answer = functools.partial(comment, speaks=speaks)  # type: ignore[method-assign]
    async with rig(server) as (engine, heard):
        engine.send(submit())
        await heard.until(lambda: bool(heard.of(Tokens)))
        server.is_mute, num_open = True, len(server.open)
        while len(server.open) < num_open + 3:  # two questions that nobody answered, and a third one
            await asyncio.sleep(0.01)
        assert heard.downs == []
        speaks.clear()
        await heard.until(lambda: bool(heard.downs))
        assert "not answered within" in heard.downs[0]
