"""Keys over the real application: who gets in, whose cache it is, and what a tenant may have."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest
from asgi_client import Exchange, begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, FakeGeneration, say, tokens
from small_app import MODEL, ids, make_app

from pdkv.config import AccessConfig, AdmissionConfig
from pdkv.errors import ConfigError, Unauthorized
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing, make_key, read_keys
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.request import GenerateRequest
from pdkv.router.routing.decision import Candidate, Choice
from pdkv.text import Tokenizer

BODY = {"model": MODEL, "prompt": "what was said before", "max_tokens": 2}


class Rig:
    """An application with the keys "a", "b" and, of an admin, "root"."""

    def __init__(self, tmp_path: Path, answer: Any = None, *, limits: str = "", **access: Any) -> None:
        self.dispatcher = FakeDispatcher(answer)
        made = {name: make_key(name, admin=name == "root") for name in ("a", "b", "root")}
        self.keys = {name: key for name, (key, _) in made.items()}
        self.file = tmp_path / "keys"
        self.file.write_text("\n".join(lines + limits for _, lines in made.values()))
        self.file.chmod(0o600)
        self.ring = KeyRing(self.file)
        config = AdmissionConfig(**access.pop("admission", {}))
        self.admission = Admission(cast(Dispatcher, self.dispatcher), config)
        self.app = make_app(
            self.dispatcher,
            keys=self.ring,
            admission=self.admission,
            access=AccessConfig(api_key_file=self.file, **access),
        )

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    async def post(self, name: str, **fields: Any) -> Exchange:
        return await call(self.app, "POST", "/v1/completions", BODY | fields, self.headers(name))

    def begin(self, name: str, **fields: Any) -> tuple[Exchange, "asyncio.Task[None]"]:
        return begin(self.app, "POST", "/v1/completions", BODY | fields, self.headers(name))


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer pdk_wrong"}, {"authorization": "Basic YTpi"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize", "/load", "/admin/engines", "/nowhere"])
def test_without_a_key_nothing_is_served_but_what_is_open(headers: dict[str, str], path: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reply = run(call(rig.app, "GET" if "v1/m" in path else "POST", path, BODY, headers))
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert rig.dispatcher.generations == []
    assert run(call(rig.app, "GET", "/health")).status == 200


def test_admin_paths_need_an_admins_key(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reply = run(call(rig.app, "POST", "/admin/engines", None, rig.headers("a")))
    assert (reply.status, reply.json()["error"]["type"]) == (403, "permission_error")
    assert run(call(rig.app, "POST", "/admin/nothing-here", None, rig.headers("root"))).status == 404


def test_metrics_and_topology_are_open_or_an_admins(tmp_path: Path) -> None:
    open_rig, rig = Rig(tmp_path), Rig(tmp_path, protect_metrics=True)
    for path in ("/metrics", "/topology"):
        assert run(call(open_rig.app, "GET", path)).status == 200
        assert run(call(rig.app, "GET", path)).status == 401
        assert run(call(rig.app, "GET", path, None, rig.headers("a"))).status == 403
        assert run(call(rig.app, "GET", path, None, rig.headers("root"))).status == 200


PROTECTED = ("/metrics", "/topology", "/load", "/admin/engines", "/admin/requests/x", "/v1/models", "/v1/completions")


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize("end", ["%0A", "%0a?x=1", "%00", "%0D", "%C2%85", "%7F"])
def test_a_path_with_a_control_character_is_none(path: str, end: str, tmp_path: Path) -> None:
    """A route's regular expression takes /metrics%0A for /metrics, and the list of what needs an admin does not."""
    raw_path, _, query = (path + end).partition("?")
    rig = Rig(tmp_path, protect_metrics=True)
    for app in (rig.app, make_app(FakeDispatcher())):
        for headers in ({}, rig.headers("a"), rig.headers("root")):
            exchange = Exchange("POST" if "completions" in path else "GET", unquote(raw_path), b"", headers)
            exchange.scope["query_string"] = query.encode()
            run(app(exchange.scope, exchange.receive, exchange.send))  # type: ignore[arg-type]
            assert (exchange.status, exchange.json()["error"]["type"]) == (404, "invalid_request_error")
            assert "no control characters" in exchange.json()["error"]["message"]


def test_a_request_has_its_keys_terms_whatever_its_client_says(tmp_path: Path) -> None:
    rig = Rig(tmp_path, say(ids("ok")), limits='kv_ttl_s = 60\nkv_quota = "1MiB"\n')
    assert run(rig.post("a", n=2)).status == 200
    terms = {tenant.name: tenant.grant.kv_terms for tenant in rig.ring.tenants}
    assert [generation.request.kv_terms for generation in rig.dispatcher.generations] == [terms["a"]] * 2
    assert terms["a"] != terms["b"]
    reply = run(rig.post("a", kv_terms={"owner": 1}))
    assert reply.status == 400
    assert "kv_terms" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_texts_without_a_generation_are_requests_of_their_key_too(path: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits="max_requests = 1\n")
    body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [5]}
    waiting = Exchange("POST", path, b"", rig.headers("a"))
    reading, came = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        if came.is_set():
            return await asyncio.Event().wait()  # the client stays
        reading.set()
        await came.wait()
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    task = asyncio.create_task(rig.app(waiting.scope, slow, waiting.send))  # type: ignore[arg-type]
    await reading.wait()
    refused = await call(rig.app, "POST", path, body, rig.headers("a"))
    assert (refused.status, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert (await rig.post("a")).status == 429
    assert (await call(rig.app, "POST", path, body, rig.headers("b"))).status == 200
    came.set()
    await task
    assert waiting.status == 200
    assert (await call(rig.app, "POST", path, body, rig.headers("a"))).status == 200
    rig.admission.drain()
    stopping = await call(rig.app, "POST", path, body, rig.headers("b"))
    assert (stopping.status, stopping.json()["error"]["code"]) == (503, "draining")
    assert {tenant.num_requests for tenant in rig.ring.tenants} == {0}


def test_no_page_and_no_error_shows_a_key_a_hash_or_a_salt(tmp_path: Path) -> None:
    rig = Rig(tmp_path, say(ids("ok")))
    pages = [run(rig.post("a")), run(rig.post("a", priority=-1))]
    pages += [run(call(rig.app, "GET", path, None, rig.headers("root"))) for path in ("/metrics", "/topology")]
    pages.append(run(call(rig.app, "GET", "/v1/models", None, {"authorization": f"Bearer {rig.keys['a']}x"})))
    text = "".join(page.body.decode() + str(page.headers) for page in pages)
    secrets = [line.split('"')[1] for line in rig.file.read_text().splitlines() if line.startswith(("hash", "salt"))]
    for secret in (*rig.keys.values(), *secrets):
        assert secret.removeprefix("sha256:") not in text


def cache(request: GenerateRequest, seen: set[tuple[str, tuple[int, ...]]]) -> int:
    """Cached tokens, as an engine's prefix cache would have them: of the same salt and prompt."""
    key = (request.cache_salt, tuple(request.prompt_token_ids))
    return len(request.prompt_token_ids) if key in seen else seen.add(key) or 0


async def test_cached_tokens_say_nothing_about_another_keys_prompts(tmp_path: Path) -> None:
    """Attack 16: `cached_tokens` told what others had asked. With and without a salt of the client's own."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    rig = Rig(tmp_path)

    def answer(request: GenerateRequest) -> list[Any]:
        rig.dispatcher.num_cached_tokens = cache(request, seen)
        return [tokens(*ids("ok"), end="length")]

    class Caching(FakeDispatcher):
        def start(self, request: GenerateRequest) -> FakeGeneration:
            generation = super().start(request)
            generation.num_cached_tokens = self.num_cached_tokens
            return generation

    rig.dispatcher.__class__ = Caching
    rig.dispatcher.answer = answer

    async def cached(name: str, **fields: Any) -> int:
        reply = await rig.post(name, **fields)
        assert reply.status == 200, reply.body
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for salt in ({}, {"cache_salt": "shared"}):
        assert await cached("a", **salt) == 0
        assert await cached("a", **salt) > 0
        assert await cached("b", **salt) == 0
    for salt in {request.cache_salt for request in rig.dispatcher.requests}:  # nor can a client claim another's
        assert await cached("b", cache_salt=salt) == 0


def test_a_cache_salt_can_be_required() -> None:
    dispatcher = FakeDispatcher(say(ids("ok")))
    admission = Admission(cast(Dispatcher, dispatcher), AdmissionConfig(require_cache_salt=True))
    app = make_app(dispatcher, admission=admission)
    for fields, status in (({}, 400), ({"cache_salt": ""}, 400), ({"cache_salt": "mine"}, 200)):
        reply = run(call(app, "POST", "/v1/completions", BODY | fields))
        assert reply.status == status
        if status == 400:
            assert reply.json()["error"]["param"] == "cache_salt"
            assert "--require-cache-salt" in reply.json()["error"]["message"]
    assert admission.num_pending == 0


def test_any_client_may_not_put_itself_before_all_others(tmp_path: Path) -> None:
    """40 streams of priority -2**31 held all others for 20 s."""
    app = make_app(dispatcher := FakeDispatcher(say(ids("ok"))))
    reply = run(call(app, "POST", "/v1/completions", BODY | {"priority": -(2**31)}))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "priority")
    assert reply.json()["error"]["message"] == "priority must be at least 0 (lower is more urgent), got -2147483648"
    assert dispatcher.generations == []
    rig = Rig(tmp_path, say(ids("ok")), limits="priority = -2\n")
    assert [run(rig.post("a", priority=priority)).status for priority in (-3, -2, 5)] == [400, 200, 200]


async def test_a_key_has_its_streams_and_requests_and_others_have_theirs(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits="max_streams = 1\nmax_requests = 2\n")
    stream, task = rig.begin("a", stream=True)
    await rig.dispatcher.next_generation(0)
    refused = await rig.post("a", stream=True)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"] == {
        "message": "the key 'a' may have at most 1 stream at a time: try again in 1 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    whole, whole_task = rig.begin("a")
    await rig.dispatcher.next_generation(1)
    assert (await rig.post("a")).status == 429
    other, other_task = rig.begin("b", stream=True)
    for number in range(3):
        (await rig.dispatcher.next_generation(number)).put(tokens(*ids("ok"), end="stop"))
    await asyncio.gather(task, whole_task, other_task)
    assert stream.status == whole.status == other.status == 200
    assert {t.name: (t.num_requests, t.num_streams) for t in rig.ring.tenants} == dict.fromkeys("ab", (0, 0)) | {
        "root": (0, 0)
    }


def test_a_key_has_its_tokens_a_minute(tmp_path: Path) -> None:
    rig = Rig(tmp_path, say(ids("ok")), limits="tokens_per_minute = 30\n")  # a request has 20
    assert [run(rig.post(name)).status for name in ("a", "a", "b")] == [200, 429, 200]
    reply = run(rig.post("a"))
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    lines = run(call(rig.app, "GET", "/metrics")).body.decode().splitlines()
    for line in ('tokens_total{key="a"} 20.0', 'refused_total{key="a"} 2.0', 'requests_in_flight{key="root"} 0.0'):
        assert f"pdkv_key_{line}" in lines


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_has_its_requests_a_minute_and_is_told_what_is_left(stream: bool, tmp_path: Path) -> None:
    rig = Rig(tmp_path, say(ids("ok")), limits="requests_per_minute = 2\ntokens_per_minute = 600000\n")
    replies = [run(rig.post("a", stream=stream)) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert "2 requests a minute" in replies[2].json()["error"]["message"]
    assert run(rig.post("b")).status == 200
    told = [{k: v for k, v in reply.headers.items() if k.startswith("x-ratelimit-")} for reply in replies]
    assert [each["x-ratelimit-remaining-requests"] for each in told] == ["1", "0", "0"]
    assert all(each["x-ratelimit-limit-requests"] == "2" for each in told)
    assert all(each["x-ratelimit-limit-tokens"] == "600000" for each in told)
    assert int(told[0]["x-ratelimit-remaining-tokens"]) <= 600_000
    for each in told:
        assert re.fullmatch(r"([01]m)?[0-9.]+s", each["x-ratelimit-reset-requests"])
        assert re.fullmatch(r"[0-9.]+s", each["x-ratelimit-reset-tokens"])


async def test_a_key_in_debt_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    """What comes beyond the 256 tokens that a request without max_tokens is taken to have is charged as it comes."""
    rig = Rig(tmp_path, limits="tokens_per_minute = 300\n")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    reply, task = begin(rig.app, "POST", "/v1/chat/completions", body, rig.headers("a"))
    generation = await rig.dispatcher.next_generation(0)
    for _ in range(400):
        generation.put(tokens(*ids("a")))
    while generation.num_unread:
        await asyncio.sleep(0)
    unread = Exchange("POST", "/v1/completions", b"", rig.headers("a"))
    await rig.app(unread.scope, lambda: pytest.fail("the body is read"), unread.send)
    assert (unread.status, unread.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    generation.put(tokens(*ids("a"), end="stop"))
    await task
    assert reply.status == 200


def test_engines_are_told_tenants_apart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, say(ids("ok")))
    for name in ("a", "b", "a"):
        run(rig.post(name))
    first, second, third = [request.tenant for request in rig.dispatcher.requests]
    assert first == third != second
    assert "" not in (first, second)
    keyless = FakeDispatcher(say(ids("ok")))
    run(call(make_app(keyless), "POST", "/v1/completions", BODY))
    assert keyless.requests[0].tenant == ""


async def test_a_prompt_that_never_ran_costs_its_key_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits="tokens_per_minute = 30\n")  # a request has 20
    rig.dispatcher.num_slots = 0
    hurried = rig.headers("a") | {"x-pd-timeout-s": "0.01"}
    assert (await call(rig.app, "POST", "/v1/completions", BODY, hurried)).status == 504
    leaver, task = rig.begin("a")
    while not rig.admission.num_waiting:
        await asyncio.sleep(0)
    leaver.disconnect()
    await task
    rig.dispatcher.give_room(1)
    rig.dispatcher.available = False
    assert (await rig.post("a")).status == 503
    rig.dispatcher.available = True
    served, task = rig.begin("a")
    (await rig.dispatcher.next_generation(0)).put(tokens(*ids("ok"), end="stop"))
    await task
    assert served.status == 200
    lines = (await call(rig.app, "GET", "/metrics")).body.decode().splitlines()
    assert 'pdkv_key_tokens_total{key="a"} 20.0' in lines


# --- the queue --------------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_429_before_the_body_is_read_and_a_draining_router_503(tmp_path: Path) -> None:
    rig = Rig(tmp_path, admission={"max_queued_requests": 1})
    rig.dispatcher.num_slots = 0
    waiting, task = rig.begin("a")
    while not rig.admission.num_waiting:
        await asyncio.sleep(0)

    async def never() -> Any:
        raise AssertionError("the body is read")

    for status, code in ((429, "rate_limit_exceeded"), (503, "draining")):
        if status == 503:
            rig.admission.drain()
        refused = Exchange("POST", "/v1/completions", b"", rig.headers("b"))
        await rig.app(refused.scope, never, refused.send)
        assert (refused.status, refused.json()["error"]["code"]) == (status, code)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
    rig.dispatcher.give_room(1)
    (await rig.dispatcher.next_generation(0)).put(tokens(*ids("ok"), end="stop"))
    await task
    assert waiting.status == 200


async def test_a_key_that_has_its_part_of_the_queue_is_429_before_its_body_is_read_and_others_are_not(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, admission={"max_queued_requests": 4})
    rig.dispatcher.num_slots = 0
    tasks = [rig.begin("a")[1] for _ in range(2)]
    while rig.admission.num_waiting < 2:
        await asyncio.sleep(0)

    async def never() -> Any:
        raise AssertionError("the body is read")

    refused = Exchange("POST", "/v1/completions", b"", rig.headers("a"))
    await rig.app(refused.scope, never, refused.send)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    tasks.append(rig.begin("b")[1])
    while rig.admission.num_waiting < 3:
        await asyncio.sleep(0)
    rig.dispatcher.give_room(3)
    for number in range(3):
        (await rig.dispatcher.next_generation(number)).put(tokens(*ids("ok"), end="stop"))
    await asyncio.gather(*tasks)


async def test_a_queue_that_fills_while_a_body_arrives_is_429_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, admission={"max_queued_requests": 1})
    rig.dispatcher.num_slots = 0
    arrived, read = asyncio.Event(), asyncio.Event()
    late = Exchange("POST", "/v1/completions", json.dumps(BODY).encode(), rig.headers("b"))

    async def receive() -> Any:
        arrived.set()
        await read.wait()
        return await late.receive()

    late_task = asyncio.ensure_future(rig.app(late.scope, receive, late.send))
    await arrived.wait()
    _, task = rig.begin("a")
    while not rig.admission.num_waiting:
        await asyncio.sleep(0)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it is tokenized"))
    read.set()
    await late_task
    assert (late.status, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "connection" not in late.headers, "its body is read: the connection goes on"
    rig.dispatcher.give_room(1)
    (await rig.dispatcher.next_generation(0)).put(tokens(*ids("ok"), end="stop"))
    await task


async def test_a_client_that_leaves_while_it_waits_leaves_no_trace() -> None:
    dispatcher = FakeDispatcher()
    dispatcher.num_slots = 0
    admission = Admission(cast(Dispatcher, dispatcher))
    app = make_app(dispatcher, admission=admission)
    exchange, task = begin(app, "POST", "/v1/completions", BODY | {"n": 3})
    while not admission.num_waiting:
        await asyncio.sleep(0)
    exchange.disconnect()
    await task
    assert (admission.num_waiting, admission.num_pending, admission.pending_tokens) == (0, 0, 0)
    dispatcher.give_room(9)
    await asyncio.sleep(0)
    assert dispatcher.generations == []


def test_a_deadline_that_passes_in_the_queue_is_504() -> None:
    dispatcher = FakeDispatcher()
    dispatcher.num_slots = 0
    reply = run(call(make_app(dispatcher), "POST", "/v1/completions", BODY, {"x-pd-timeout-s": "0.01"}))
    assert (reply.status, reply.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("stream", [True, False])
def test_choices_and_prompts_of_one_request_begin_one_by_one_as_there_is_room(stream: bool) -> None:
    """1,000 choices in one place: each begins when the one before has ended, and all are answered."""
    dispatcher = FakeDispatcher(say(ids("ok")))
    dispatcher.num_slots = 1
    admission = Admission(cast(Dispatcher, dispatcher))
    most = 0
    start = dispatcher.start

    def counted(request: GenerateRequest) -> Any:
        nonlocal most
        most = max(most, dispatcher.num_running + 1)
        return start(request)

    dispatcher.start = counted  # type: ignore[method-assign]
    body = {"model": MODEL, "prompt": ["a"] * 8, "n": 125, "max_tokens": 2, "stream": stream}
    reply = run(call(make_app(dispatcher, admission=admission), "POST", "/v1/completions", body))
    assert reply.status == 200
    assert len(dispatcher.generations) == 1000
    assert most == 1
    assert (admission.num_pending, admission.pending_tokens, admission.num_waiting) == (0, 0, 0)


def test_pages_of_other_origins_may_not_use_the_api_unless_they_are_named(tmp_path: Path) -> None:
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    rig = Rig(tmp_path, say(ids("ok")))
    assert "access-control-allow-origin" not in run(call(rig.app, "OPTIONS", "/v1/completions", None, ask)).headers
    rig = Rig(tmp_path, say(ids("ok")), cors_origin=("https://chat.example", "https://other.example"))
    allowed = run(call(rig.app, "OPTIONS", "/v1/completions", None, ask))
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    foreign = run(call(rig.app, "OPTIONS", "/v1/completions", None, ask | {"origin": "https://evil.example"}))
    assert "access-control-allow-origin" not in foreign.headers


def test_one_key_of_the_environment_is_an_admins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKV_API_KEY", "for-a-quick-try")
    ring = KeyRing(None)
    [tenant] = ring.tenants
    assert (tenant.name, tenant.grant.admin) == ("environment", True)
    assert ring.authenticate("Bearer for-a-quick-try") is tenant
    with pytest.raises(Unauthorized):
        ring.authenticate("Bearer another")
    with pytest.raises(ConfigError, match="use only one of them"):
        read_keys(tmp_path / "keys")
    for wrong in ("short", "with a space", "ünprintable"):
        monkeypatch.setenv("PDKV_API_KEY", wrong)
        with pytest.raises(ConfigError, match="PDKV_API_KEY must have at least 8") as raised:
            read_keys(None)
        assert wrong not in str(raised.value)
    monkeypatch.setenv("PDKV_API_KEY", "")
    assert read_keys(None) is None


def test_only_an_admin_may_reset_the_prefix_cache(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reply = run(call(rig.app, "POST", "/reset_prefix_cache", None, rig.headers("a")))
    assert reply.status == 403


class DecisionRig(Rig):
    """Answers whose choices of engines are recorded."""

    def start(self, request: GenerateRequest) -> FakeGeneration:
        generation = FakeDispatcher.start(self.dispatcher, request)
        best = Candidate("prefill-0", 0, 1.0, 16, 2032)
        generation.choices = [Choice("prefill", "prefix_aware", "prefill-0", "policy", 2048, [best])]
        return generation


@pytest.mark.parametrize("stream", [False, True])
def test_why_engines_were_chosen_is_told_to_an_admin_that_asks_and_to_nobody_else(tmp_path: Path, stream: bool) -> None:
    """What others have cached would be an oracle for strangers."""
    rig = DecisionRig(tmp_path, say(ids("ok")))
    rig.dispatcher.start = rig.start  # type: ignore[method-assign]

    def ask(app: Any, headers: dict[str, str]) -> Exchange:
        return run(call(app, "POST", "/v1/completions", BODY | {"stream": stream}, headers))

    asked = {"x-pd-explain": "true"}
    reply = ask(rig.app, rig.headers("root") | asked)
    (choice,) = json.loads(reply.headers["x-pd-decision"])
    assert (choice["chosen"], choice["candidates"][0]["match"]) == ("prefill-0", 2032)
    for headers in (rig.headers("root"), rig.headers("a"), rig.headers("root") | {"x-pd-explain": "false"}):
        reply = ask(rig.app, headers)
        assert (reply.status, "x-pd-decision" in reply.headers) == (200, False)
    num_started = len(rig.dispatcher.generations)
    keyless = make_app(rig.dispatcher)
    for app, headers, status in ((rig.app, rig.headers("a"), 403), (rig.app, {}, 401), (keyless, {}, 403)):
        reply = ask(app, headers | asked)
        assert (reply.status, "x-pd-decision" in reply.headers) == (status, False)
        assert b"prefix_aware" not in reply.body
    assert ask(rig.app, rig.headers("root") | {"x-pd-explain": "1"}).status == 400
    assert len(rig.dispatcher.generations) == num_started
