"""Fronts and their dispatcher over a real unix socket in one event loop, in front of a dispatcher without engines."""

import array
import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import small_tokenizers
import uvloop
from asgi_client import Exchange, begin, call
from coroutines import Turns
from dispatch_rig import System, live
from fake_dispatcher import FakeDispatcher, logprob, say, tokens
from small_app import MODEL, make_app, served, tokenizer

from pdkv.bench.trace import read_trace
from pdkv.config import RouterConfig
from pdkv.errors import EngineUnavailable, RequestAborted, RequestTimeout
from pdkv.launch.listening import listen_for_fronts
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.fronts import remote, session, wire
from pdkv.router.fronts.front_app import FrontApp
from pdkv.router.fronts.hall import Hall
from pdkv.router.fronts.remote import RemoteDesk
from pdkv.router.fronts.wire import encode
from pdkv.router.http.app import body_budget, create_app
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.server.paused_body import PAUSE_BODY
from pdkv.router.metrics.recorder import Recorder
from pdkv.router.request import Delta, GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer

event_loop = uvloop.new_event_loop  # the router's kind

COMPLETIONS = "/v1/completions"


class Rig:
    """A hall, and as many fronts as asked for."""

    def __init__(
        self, path: Path, dispatcher: FakeDispatcher, keys: KeyRing | None = None, kept: int = 1 << 20,
        recorder: Recorder | None = None, model: ServedModel | None = None,
    ) -> None:  # fmt: skip
        self._model = model or served()
        self.dispatcher, self._keys, self._kept, self._recorder = dispatcher, keys, kept, recorder
        self._path = path / "fronts.sock"
        self._listener = listen_for_fronts(self._path)
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self.open_hall()

    def open_hall(self) -> None:
        """The dispatcher, or its successor."""
        self.app = create_app(cast(Any, self.dispatcher), self._model, keys=self._keys)
        state = self.app.state
        self.hall = Hall(
            cast(Any, self.dispatcher), state.admission, state.metrics, state.drain, self._keys, self.app, self._kept,
            self._recorder,
        )  # fmt: skip
        self._tasks[self.hall] = asyncio.create_task(self.hall.serve_on(self._listener.dup()))

    async def end_hall(self) -> None:
        """As when it dies: connections end."""
        self.hall.stop()
        await self._tasks.pop(self.hall)

    async def front(self) -> FrontApp:
        """One more front."""
        config, desk = RouterConfig(), RemoteDesk({})
        app = FrontApp(desk, self._model, config, body_budget(config.http))
        self._tasks[app] = asyncio.create_task(desk.stay_connected(self._path))
        await desk.welcomed.wait()
        return app

    async def kill(self, app: FrontApp) -> None:
        """The front is gone; the hall has noticed."""
        num = len(self.hall._fronts)
        self._tasks.pop(app).cancel()
        while len(self.hall._fronts) == num:
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End all of it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._listener.close()


@contextlib.asynccontextmanager
async def rig(path: Path, dispatcher: FakeDispatcher | None = None, **options: Any) -> AsyncIterator[Rig]:
    rig = Rig(path, dispatcher or FakeDispatcher(), **options)
    try:
        yield rig
    finally:
        await rig.close()


IDS = {"x-pd-event-ids": "1"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 9, "stream": True, "seed": 1, **fields}


def events(exchange: Exchange) -> list[tuple[str, str]]:
    """(id, data) of each whole event."""
    found = []
    for event in exchange.body.decode().split("\n\n")[:-1]:
        data, _, name = event.partition("\nid: ")
        found.append((name, data))
    return found


def write_keys(path: Path, *names: str, limits: str = "") -> tuple[KeyRing, dict[str, dict[str, str]]]:
    """A ring of new keys, and the header of each by name."""
    made = {name: make_key(name) for name in names}
    file = path / "keys.toml"
    file.write_text("\n".join(lines + limits for _, lines in made.values()))
    file.chmod(0o600)
    return KeyRing(file), {name: {"authorization": f"Bearer {key}"} for name, (key, _) in made.items()}


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3, "logprobs": 2}, {"stop": ["zz"], "echo": True}, {"messages": [{"role": "user", "content": "a"}]}],
    ids=["one", "n", "echo", "chat"],
)
async def test_a_stream_taken_up_at_another_front_has_each_event_once(
    tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TOLD_IN_A_ROW", 2)

    def part(*token_ids: int, end: str | None = None) -> Delta:
        of_each = [logprob(i, 9) for i in token_ids] if "logprobs" in fields else None
        return tokens(*token_ids, end=end, logprobs=of_each)

    async with rig(tmp_path) as hall:
        first, second = await hall.front(), await hall.front()
        num_choices, path = fields.get("n", 1), COMPLETIONS
        asked = body(**fields)
        if "messages" in fields:
            path = "/v1/chat/completions"
            del asked["prompt"]
        whole, task = begin(first, "POST", path, asked, IDS)
        for beginning in (part(10, 11), part(12)):
            for index in range(num_choices):
                (await hall.dispatcher.next_generation(index)).put(beginning)
            await whole.wait_for_writes(len(whole.writes) + 1)
        resume_id = whole.headers["x-pd-resume-id"]
        await hall.kill(first)
        await asyncio.gather(task, return_exceptions=True)
        seen = [event for event in events(whole) if "error" not in event[1]]
        for generation in hall.dispatcher.generations:
            generation.put(part(13, 14))
            generation.put(part(30, end="length"))
        rest = await call(second, "POST", path, headers={"last-event-id": seen[-1][0]})
        again = await call(second, "POST", path, headers={"x-pd-resume-id": resume_id})
        without_ids = await call(second, "POST", path, headers={"x-pd-resume-id": seen[-1][0]})
        assert (rest.status, rest.headers["x-request-id"]) == (200, whole.headers["x-request-id"])
        assert sorted(data for _, data in seen + events(rest)) == sorted(data for _, data in events(again))
        assert [data for _, data in events(rest)] == [data for _, data in events(without_ids)]
        assert {name for name, _ in events(again)} == {""}
        assert len(hall.dispatcher.generations) == num_choices


async def test_others_have_their_turn_while_a_front_is_told_a_long_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it up again and again costs little each time."""
    monkeypatch.setattr(session, "TOLD_IN_A_ROW", 2)
    turns, told, send = Turns(), Counter[int](), wire.Link.send

    def counted(link: wire.Link, to: int, name: str, *arguments: object) -> None:
        told[turns.number] += name == "delta"
        send(link, to, name, *arguments)

    async with rig(tmp_path) as hall, turns:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body(max_tokens=30))
        for number in range(20):
            (await hall.dispatcher.next_generation(0)).put(tokens(10, end="length" if number == 19 else None))
            await whole.wait_for_writes(number + 1)
        await task
        monkeypatch.setattr(wire.Link, "send", counted)
        again = await call(front, "POST", COMPLETIONS, headers={"x-pd-resume-id": whole.headers["x-pd-resume-id"]})
        assert [data for _, data in events(again)] == [data for _, data in events(whole)]
    assert (told.total(), max(told.values())) == (20, 2)


async def test_an_answer_is_taken_up_with_its_own_key_and_path_alone(tmp_path: Path) -> None:
    keys, headers = write_keys(tmp_path, "a", "b")
    async with rig(tmp_path, keys=keys) as hall:
        first, second = await hall.front(), await hall.front()
        whole, task = begin(first, "POST", COMPLETIONS, body(), headers["a"])
        (await hall.dispatcher.next_generation(0)).put(tokens(10))
        await whole.wait_for_writes(1)
        resume = {"x-pd-resume-id": whole.headers["x-pd-resume-id"]}
        assert (await call(second, "POST", COMPLETIONS, headers=headers["b"] | resume)).status == 404
        assert (await call(second, "POST", "/v1/chat/completions", headers=headers["a"] | resume)).status == 404
        assert (await call(second, "POST", COMPLETIONS, headers=resume)).status == 401
        for wrong, status in (("unknown:1", 404), (f"{resume['x-pd-resume-id']}:x", 400)):
            answer = await call(second, "POST", COMPLETIONS, headers=headers["a"] | {"x-pd-resume-id": wrong})
            assert answer.status == status
        taken, second_task = begin(second, "POST", COMPLETIONS, headers=headers["a"] | resume | IDS)
        await task  # the front that had it gives it up
        hall.dispatcher.generations[0].put(tokens(11, end="length"))
        await second_task
        assert "its client goes on elsewhere" in events(whole)[-1][1]
        assert [name.partition(":")[2] for name, _ in events(taken)] == ["1", "2", "3"]
        while keys.tenants[0].num_requests:
            await asyncio.sleep(0)
        assert keys.tenants[0].num_tokens == 3 + 2


def beside_a_pool(**shares: float) -> tuple[FakeDispatcher, FakeDispatcher, ServedModel]:
    """Dispatchers of the launch and of the pool "next", whose tokenizer is another; and both models."""
    own, pool, theirs = FakeDispatcher(say([10])), FakeDispatcher(), Tokenizer(small_tokenizers.metaspace_backend())
    own.pools.add("next", ["next"], cast(Any, pool))
    own.pools.split(shares)
    others = [dataclasses.replace(served(), names=["next"], pool="next", tokenizer=theirs)]
    return own, pool, dataclasses.replace(served(), others=others)


@pytest.mark.parametrize("down", [False, True], ids=["no split any more", "no engine"])
async def test_an_answer_of_a_pool_is_taken_up_with_the_pools_model(tmp_path: Path, down: bool) -> None:
    own, pool, model = beside_a_pool(next=100)
    async with rig(tmp_path, own, model=model) as hall:
        first, second = await hall.front(), await hall.front()
        whole, task = begin(first, "POST", COMPLETIONS, body(prompt="the cat"))
        (await pool.next_generation(0)).put(tokens(3, 4))
        await whole.wait_for_writes(1)
        await hall.kill(first)
        await asyncio.gather(task, return_exceptions=True)
        own.pools.split({"next": 100 * down})
        pool.is_down = lambda: down  # type: ignore[method-assign]
        pool.generations[0].put(tokens(6, end="length"))
        resume = {"x-pd-resume-id": whole.headers["x-pd-resume-id"]}
        again = await call(second, "POST", COMPLETIONS, headers=resume)
        text = "".join(event["choices"][0]["text"] for event in again.events()[:-1])
        assert text == model.others[0].tokenizer.decode([3, 4, 6])


async def test_a_front_gives_a_key_only_its_models(tmp_path: Path) -> None:
    own, pool, model = beside_a_pool(next=100)
    keys, headers = write_keys(tmp_path, "a", limits=f'models = ["{MODEL}"]\n')
    async with rig(tmp_path, own, model=model, keys=keys) as hall:
        front = await hall.front()
        answer = await call(front, "POST", COMPLETIONS, body(max_tokens=1), headers["a"])
        assert answer.status == 200, "not by a split, either"
        for path, asked in ((COMPLETIONS, body(model="next")), ("/tokenize", {"model": "next", "prompt": "a"})):
            assert (await call(front, "POST", path, asked, headers["a"])).status == 404
        assert not pool.generations


async def test_a_stop_string_ends_the_generation_and_takes_back_what_came_behind_it(tmp_path: Path) -> None:
    keys, headers = write_keys(tmp_path, "a")
    async with rig(tmp_path, keys=keys) as hall:
        front = await hall.front()
        text = tokenizer().decode([11], skip_special_tokens=True)
        _, task = begin(front, "POST", COMPLETIONS, body(stop=[text], max_tokens=50), headers["a"])
        generation = await hall.dispatcher.next_generation(0)
        generation.put(tokens(10, 11, *range(20, 40)))
        await task
        await generation.over.wait()
        assert generation.finished
        while keys.tenants[0].num_requests:
            await asyncio.sleep(0)
        assert keys.tenants[0].num_tokens == 3 + 2


async def test_answers_without_a_front_end_when_their_memory_is_full(tmp_path: Path) -> None:
    async with rig(tmp_path, kept=10_000) as hall:
        first, second = await hall.front(), await hall.front()
        exchanges = [begin(first, "POST", COMPLETIONS, body(), IDS) for _ in range(3)]
        for number, (exchange, _) in enumerate(exchanges):
            (await hall.dispatcher.next_generation(number)).put(tokens(10))
            await exchange.wait_for_writes(1)
        await hall.kill(first)
        await asyncio.gather(*(task for _, task in exchanges), return_exceptions=True)
        assert sum(generation.aborted for generation in hall.dispatcher.generations) == 1
        last_id = {"last-event-id": events(exchanges[-1][0])[0][0]}
        hall.dispatcher.generations[-1].put(tokens(11, end="length"))
        assert (await call(second, "POST", COMPLETIONS, headers=last_id)).status == 200


async def test_bodies_that_are_kept_are_bounded_and_one_key_leaves_room_for_others(tmp_path: Path) -> None:
    keys, headers = write_keys(tmp_path, "a", "b")
    async with rig(tmp_path, kept=100_000, keys=keys) as hall:
        front, tasks = await hall.front(), []
        for number, key in enumerate("aaab"):
            asked = begin(front, "POST", COMPLETIONS, body(user="u" * 20_000), headers[key])
            (await hall.dispatcher.next_generation(number)).put(tokens(10))
            await asked[0].wait_for_writes(1)
            tasks.append(asked[1])
        owners = [session.visit.tenant.name for session in hall.hall._kept.values()]
        assert owners == ["a", "a", "b"], "of the third one, nothing but the stream"
        first, held = next(iter(hall.hall._kept.values())), hall.hall._bodies.held
        hall.hall.take_up(first.id, first.path, first.visit.tenant)
        assert hall.hall._bodies.held == held, "it is counted once"
        for generation in hall.dispatcher.generations:
            generation.put(tokens(11, end="length"))
        await asyncio.gather(*tasks)
        assert hall.hall._bodies.held == 0, "what has ended is counted among what may be taken up"
        hall.hall.take_up(first.id, first.path, first.visit.tenant)
        assert hall.hall._bodies.held > 20_000
        for session in list(hall.hall._kept.values()):
            hall.hall.drop(session)
        assert hall.hall._bodies.held == 0


async def test_other_paths_and_refusals_are_the_dispatchers(tmp_path: Path) -> None:
    keys, headers = write_keys(tmp_path, "a")
    async with rig(tmp_path, keys=keys) as hall:
        front = await hall.front()
        for method, path, key, status in (
            ("GET", "/health", {}, 200),
            ("HEAD", "/v1/models", headers["a"], 200),
            ("GET", "/v1/models", {}, 401),
            ("GET", "/v1/completions", headers["a"], 405),
            ("GET", "/nowhere", headers["a"], 404),
            ("POST", COMPLETIONS, {}, 401),
            ("POST", "/tokenize", {}, 401),
        ):
            got = await call(front, method, path, body() if method == "POST" else None, key)
            same = await call(hall.app, method, path, body() if method == "POST" else None, key)
            assert (got.status, got.body) == (status, same.body), path
        assert (await call(front, "POST", "/tokenize", {"prompt": "ab"}, headers["a"])).status == 200
        hall.dispatcher.available = False
        assert (await call(front, "POST", COMPLETIONS, body(), headers["a"])).status == 503
        figures = (await call(front, "GET", "/metrics")).body.decode()
        assert 'pdkv_requests_total{endpoint="completions",outcome="engine_unavailable"} 1.0' in figures
        assert "pdkv_requests_in_flight 0.0" in figures


SCOPE = {"type": "http", "path": COMPLETIONS, "headers": []}
START = GenerateRequest(prompt_token_ids=[1], params=SamplingParams(), timeout_s=1.0)
LIES = {
    "not admitted": lambda stay: encode(("start", stay, 0, START)),
    "arrives twice": lambda stay: encode(("arrive", stay, COMPLETIONS, None, "")),
    "the front's own number": lambda stay: encode(("page", 0, 0, {})),
    "a number of another kind": lambda stay: encode(("sent", stay)),
    "no such call": lambda stay: encode(("kill", stay)),
    "wrong types": lambda stay: encode(("stop", stay, "0", -1)),
    "too few arguments": lambda stay: encode(("stop", stay)),
    "a number of 65 bits": lambda stay: b"\xcf" + b"\xff" * 8,
    "garbage": lambda stay: b"\xc1",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_front_that_lies_loses_its_connection_and_no_other(tmp_path: Path, lie: Callable[[int], bytes]) -> None:
    async with rig(tmp_path) as hall:
        liar, honest = await hall.front(), await hall.front()
        whole, task = begin(honest, "POST", COMPLETIONS, body())
        generation = await hall.dispatcher.next_generation(0)
        link = liar._desk._link
        stay = await liar._desk.receive(dict(SCOPE))
        link.send(1 << 40, "stop", 0, 1)  # a request that is not there: it may have been taken up elsewhere
        link.put(lie(stay._number))
        while liar._desk._link is link or not liar._desk.welcomed.is_set():
            await asyncio.sleep(0.01)
        generation.put(tokens(10, end="length"))
        await task
        assert whole.status == 200
        assert len(hall.dispatcher.generations) == 1
        while hall.app.state.drain.num_requests:
            await asyncio.sleep(0)


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\0\0\0\5\xdd\xff\xff\xff\xff"], ids=["4 GiB", "4 G calls"])
async def test_a_frame_of_a_huge_size_ends_its_connection(tmp_path: Path, frame: bytes) -> None:
    async with rig(tmp_path) as hall:
        desk = (await hall.front())._desk
        link = desk._link
        link._transport.write(frame)
        while desk._link is link or not desk.welcomed.is_set():
            await asyncio.sleep(0.01)


async def test_a_generation_that_fails_ends_its_own_request_alone(tmp_path: Path) -> None:
    async with rig(tmp_path) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body())
        generation = await hall.dispatcher.next_generation(0)
        late, late_task = begin(front, "POST", COMPLETIONS, body(stream=False))
        (await hall.dispatcher.next_generation(1)).put(RequestTimeout("too late", request_id="r", retryable=True))
        await late_task
        assert (late.status, late.json()["error"]["code"]) == (504, "timeout")
        generation.put(tokens(10, end="length"))
        await task
        assert events(whole)[-1][1] == "data: [DONE]"


async def test_what_fits_no_frame_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 4096)
    async with rig(tmp_path) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body())
        generation = await hall.dispatcher.next_generation(0)
        assert (await call(front, "POST", COMPLETIONS, body(user="x" * 5000))).status == 500
        generation.put(tokens(10, end="length"))
        await task
        assert events(whole)[-1][1] == "data: [DONE]"


@pytest.mark.parametrize("when", ["it arrives", "it is not watched yet", "it is admitted"])
async def test_a_client_that_leaves_a_dispatcher_that_is_stopped_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(remote, "WATCH_S", 0.02)
    async with rig(tmp_path) as hall:
        front = await hall.front()
        [door] = hall.hall._fronts
        if when != "it is admitted":
            door.link._transport.pause_reading()
        exchange, task = begin(front, "POST", COMPLETIONS, body())
        left: list[Callable[[], None]] = []
        exchange.scope[PAUSE_BODY] = lambda on_left: left.append(on_left) or SimpleNamespace(end=left.clear)
        while when == "it is admitted" and len(door.link.objects) == 1:
            await asyncio.sleep(0)
        door.link._transport.pause_reading()
        if when == "it is not watched yet":
            await asyncio.sleep(0)
            del exchange.scope[PAUSE_BODY]  # as when its connection ends
        await asyncio.sleep(0.05)
        exchange.disconnect()
        for on_left in left:
            on_left()
        await task
        assert not exchange.status
        door.link._transport.resume_reading()
        while hall.app.state.drain.num_requests or len(door.link.objects) > 1:
            await asyncio.sleep(0)
        assert hall.dispatcher.generations == []


async def test_while_a_front_does_not_read_its_tokens_stay_with_the_generations(tmp_path: Path) -> None:
    async with rig(tmp_path) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body(logprobs=2))
        generation = await hall.dispatcher.next_generation(0)
        transport = front._desk._link._transport
        transport.pause_reading()
        wide = [logprob(10, *range(20, 120)) for _ in range(100)]
        for _ in range(14):
            generation.put(tokens(*[10] * 100, logprobs=wide))
        for _ in range(50):
            await asyncio.sleep(0)
        num_unread = generation.num_unread
        transport.resume_reading()
        generation.put(tokens(11, end="length", logprobs=[logprob(11)]))
        await task
        assert num_unread > 0
        assert events(whole)[-1][1] == "data: [DONE]"


async def test_a_silent_dispatcher_is_left_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.01)
    async with rig(tmp_path) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body())
        await hall.dispatcher.next_generation(0)
        front._desk._link._transport.pause_reading()  # nothing comes from it, as while it is stopped
        await task
        assert whole.json()["error"]["code"] == "engine_unavailable"
        await asyncio.sleep(0)
        await front._desk.welcomed.wait()
        assert (await call(front, "GET", "/health")).status == 200


async def test_streams_end_with_their_dispatcher_and_its_successor_is_found(tmp_path: Path) -> None:
    async with rig(tmp_path) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body())
        (await hall.dispatcher.next_generation(0)).put(tokens(10))
        await whole.wait_for_writes(1)
        await hall.end_hall()
        await task
        assert "engine_unavailable" in events(whole)[-1][1]
        assert (await call(front, "GET", "/health")).status == 503
        hall.open_hall()
        await front._desk.welcomed.wait()
        assert (await call(front, "GET", "/health")).status == 200


async def test_spans_that_a_dispatcher_counted_are_not_counted_by_its_successor(tmp_path: Path) -> None:
    async with rig(tmp_path) as hall:
        front = await hall.front()
        for sent in (7, 9):
            front._desk.held = lambda sent=sent: (0, 0, 0, sent, 2)  # type: ignore[misc]
            for _ in range(2):  # the report behind the first is in before the second is answered
                await call(front, "GET", "/health")
            assert hall.hall._spans == ({"sent": 7, "lost": 2} if sent == 7 else {"sent": 2, "lost": 0})
            if sent == 7:
                await hall.end_hall()
                while front._desk.welcomed.is_set():
                    await asyncio.sleep(0)
                hall.open_hall()
                await front._desk.welcomed.wait()


async def test_a_dispatcher_that_dies_at_any_question_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AGAIN_S", 0.01)
    async with rig(tmp_path) as hall:
        front = await hall.front()
        for num_turns in range(0, 40, 2):
            exchanges = [begin(front, "POST", COMPLETIONS, body()), begin(front, "GET", "/metrics")]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await hall.end_hall()
            await asyncio.gather(*(task for _, task in exchanges), return_exceptions=True)
            assert [exchange.status for exchange, _ in exchanges] in ([503, 503], [503, 200], [200, 200])
            hall.open_hall()
            await front._desk.welcomed.wait()


async def test_a_keys_limits_are_told_with_each_answer_and_keep_its_bodies_unread(tmp_path: Path) -> None:
    keys, headers = write_keys(tmp_path, "poor", limits="tokens_per_minute = 20\nrequests_per_minute = 3\n")
    async with rig(tmp_path, keys=keys) as hall:
        front = await hall.front()
        whole, task = begin(front, "POST", COMPLETIONS, body(max_tokens=17, stream=False), headers["poor"])
        (await hall.dispatcher.next_generation(0)).put(tokens(*[10] * 17, end="length"))
        await task
        assert whole.headers["x-ratelimit-remaining-tokens"] == "0"  # its own 20 are charged
        broken = await call(front, "POST", COMPLETIONS, b"{", headers["poor"])
        assert broken.status == 429  # and not 400
        for _ in range(2):
            refused = await call(front, "POST", COMPLETIONS, body(), headers["poor"])
            assert (refused.status, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")


@pytest.mark.parametrize("is_taken", [False, True], ids=["dispatcher gone", "taken elsewhere"])
async def test_what_ends_a_request_between_two_questions_answers_the_next_one(tmp_path: Path, is_taken: bool) -> None:
    async with rig(tmp_path) as hall:
        desk = (await hall.front())._desk
        with await desk.receive({"type": "http", "path": COMPLETIONS, "headers": []}) as stay:
            if is_taken:
                stay.on_taken()
            else:
                await hall.end_hall()
                while desk.welcomed.is_set():
                    await asyncio.sleep(0)
            request = GenerateRequest(prompt_token_ids=[5], params=SamplingParams(), timeout_s=60.0)
            generation = await asyncio.wait_for(stay.start(request, lambda _: None, 0), timeout=60)
            with pytest.raises(RequestAborted if is_taken else EngineUnavailable):
                generation.take()


async def test_the_dispatcher_records_what_came_through_fronts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, MODEL)
    system = System(1, 1)
    async with live(system), rig(tmp_path, cast(Any, system.dispatcher), recorder=recorder) as hall:
        front, app = await hall.front(), make_app(cast(Any, system.dispatcher), recorder=recorder)
        for way in (front, app):
            asked = {"prompt": [5] * 70, "n": 2, "max_tokens": 4, "ignore_eos": True}
            assert (await call(way, "POST", COMPLETIONS, asked, {"x-slo-ttft-ms": "250"})).status == 200
            assert (await call(way, "POST", COMPLETIONS, b"{")).status == 400
            while hall.app.state.drain.num_requests:
                await asyncio.sleep(0)
    recorder.close()
    lines = read_trace(recorder.path).requests
    figures = [
        (line.prompt_tokens, line.output_tokens, line.max_tokens, line.slo_ttft_ms, line.outcome, line.blocks)
        for line in lines
    ]
    assert figures[:3] == figures[3:]
    assert figures[0][:5] == (70, 4, 4, 250.0, "length")
    assert all(line.ttft_s is not None for line in lines[:2])


async def test_embeddings_come_through_a_front_in_their_order(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[Delta]:
        numbers = [1.0, float(len(request.prompt_token_ids))]
        return [tokens(7, pooled=array.array("f", numbers).tobytes()), tokens(end="length")]

    async with rig(tmp_path, FakeDispatcher(answer)) as system:
        asked = {"input": [[5] * n for n in (3, 1, 2)], "normalize": False}
        got = await call(await system.front(), "POST", "/v1/embeddings", asked)
        assert [entry["embedding"] for entry in got.json()["data"]] == [[1.0, 3.0], [1.0, 1.0], [1.0, 2.0]]
        assert got.json()["usage"]["total_tokens"] == 6


def test_the_socket_is_its_users_alone(tmp_path: Path) -> None:
    listener = listen_for_fronts(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    listener.close()
