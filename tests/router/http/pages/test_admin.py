"""Operators beside the API: only where clients need keys, only with an admin's, and not what is the launcher's."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admin_keys import admin_keys, never
from asgi_client import Exchange, call
from coroutines import clock
from coroutines import run as run_on_loop
from dispatch_rig import System, live
from fake_dispatcher import FakeDispatcher
from small_app import make_app

from pdkv.config import AccessConfig
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages.admin import LauncherPages
from pdkv.router.http.pages.cache_pages import CachePages
from pdkv.router.http.pages.page import BODY_S
from pdkv.testing import VirtualLoop
from pdkv.wire.reports import ConnectorStats, TierHeld


async def test_an_admins_key_opens_all_but_what_is_the_launchers(tmp_path: Path) -> None:
    file, root, other = admin_keys(tmp_path)
    async with live(System(1, 2)) as system:
        operations = Operations(system.dispatcher, never)
        options: dict[str, Any] = {"operations": operations, "access": AccessConfig(api_key_file=file)}
        app = make_app(system.dispatcher, keys=KeyRing(file), **options)

        async def ask(method: str, path: str, json: object = None, headers: dict[str, str] = root) -> Any:
            return await call(app, method, "/admin/engines" + path, json, headers)

        assert [e["name"] for e in (await ask("GET", "")).json()["engines"]] == ["prefill-0", "decode-0", "decode-1"]
        assert (await ask("POST", "/decode-1/drain")).json()["drained"] is True
        assert (await ask("POST", "/decode-0/drain")).status == 409
        assert (await ask("POST", "/decode-1/resume")).json()["draining"] is False
        assert (await ask("POST", "/decode-1/role", {"role": "prefill"})).json()["role"] == "prefill"
        assert (await ask("POST", "/decode-1/role", {"role": "x" * (64 << 10)})).status == 413
        assert (await ask("POST", "/decode-1/role", {}, root | {"content-encoding": "br"})).status == 415
        for method in ("PUT", "DELETE"):
            assert (await ask(method, "/decode-1", {"role": "any", "endpoint": "tcp://192.0.2.1:1"})).status == 405
        assert (await ask("POST", "/decode-1/drain", headers=other)).status == 403
        for headers, status in ((root, 400), (other, 403), ({}, 401)):
            assert (await call(app, "POST", "/admin/cache/lookup", {}, headers)).status == status
        assert (await ask("POST", "/decode-1/drain", headers={})).status == 401
        assert operations.describe("decode-1")["draining"] is False
        open_app = make_app(system.dispatcher, operations=operations)
        assert (await call(open_app, "GET", "/admin/engines", None, root)).status == 404
        await asyncio.sleep(0)


def test_what_pools_and_tiers_hold() -> None:
    dispatcher: Any = FakeDispatcher()
    app = LauncherPages(dispatcher, Operations(dispatcher, never), make_app(dispatcher).state.caches).app()
    (engine,) = run_on_loop(call(app, "GET", "/admin/cache")).json()["engines"]
    assert (engine["name"], engine["role"]) == ("decode-1", "decode")
    assert (engine["blocks"]["total"], engine["blocks"]["free"], engine["blocks"]["cached"]) == (10, 4, 3)
    assert (engine["prompt_tokens"]["computed"], engine["prompt_tokens"]["local_hit"]) == (5, 7)
    assert engine["tiers"] == [
        {
            "tier": "multi/1-store/0-host", "hits": 22, "failures": 0,
            "values": 18, "bytes": 19 << 20, "capacity": 20 << 20, "evictions": 21,
        },
        {"tier": "multi/1-store/0-redis", "hits": 16, "failures": 17},
    ]  # fmt: skip
    assert engine["stores"] == [{"connector": "multi/1-store", "load_seconds": 8.0, "hidden_load_share": 0.75}]


def test_what_keys_with_terms_hold_is_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(make_key("a")[1] + 'kv_quota = "1GiB"\n' + make_key("b")[1])
    file.chmod(0o600)
    ring = KeyRing(file)
    terms = ring.tenants[0].grant.kv_terms
    assert terms is not None
    held = TierHeld(2, 3 << 20, 1 << 30, owned={terms.owner: 2 << 20, 5: 1 << 20})  # 5: of a key that is gone

    class Holding(FakeDispatcher):
        def engines(self) -> list[EngineState]:
            [engine, *_] = super().engines()
            assert engine.load is not None
            connectors = {"0-host": ConnectorStats(held=held)}
            engine.load = msgspec.structs.replace(engine.load, connectors=connectors)
            return [engine]

    dispatcher: Any = Holding()
    caches: CachePages = make_app(dispatcher, keys=ring).state.caches
    app = LauncherPages(dispatcher, Operations(dispatcher, never), caches).app()
    (engine,) = run_on_loop(call(app, "GET", "/admin/cache")).json()["engines"]
    [tier] = engine["tiers"]
    assert (tier["bytes"], tier["keys"]) == (3 << 20, {"a": 2 << 20})


def ask_launchers(exchange: Exchange) -> None:
    """One request to the application on the unix socket."""

    async def body(system: System) -> None:
        caches = make_app(system.dispatcher).state.caches
        app = LauncherPages(system.dispatcher, Operations(system.dispatcher, never), caches).app()
        await clock().passing(app(exchange.scope, exchange.receive, exchange.send))  # type: ignore[arg-type]

    async def main() -> None:
        async with live(System(1, 1)) as system:
            await body(system)

    run_on_loop(main(), VirtualLoop)


@pytest.mark.parametrize("data", [b'{"role": "\xff"}', b"\xff", b'{"role": "\xed\xa0\x80"}'])
def test_a_body_that_is_no_utf_8_is_400(data: bytes) -> None:
    exchange = Exchange("POST", "/admin/engines/decode-0/role", data, {})
    ask_launchers(exchange)
    assert exchange.status == 400
    assert set(exchange.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("pid", ["1" * 5000, "1" * 11, "-1", "x" * 5000])
def test_a_pid_is_a_number_of_a_few_digits(pid: str) -> None:
    exchange = Exchange("GET", "/admin/engines/decode-0", b"", {})
    exchange.scope["query_string"] = f"until=ready&pid={pid}".encode()
    ask_launchers(exchange)
    assert (exchange.status, exchange.json()["error"]["param"]) == (400, "pid")
    assert len(exchange.body) < 500


def test_a_body_that_does_not_come_is_408_and_a_client_that_leaves_no_defect() -> None:
    silent = Exchange("POST", "/admin/engines/decode-0/role", b"", {})
    silent._to_send.clear()
    ask_launchers(silent)
    message = f"the body did not arrive within {BODY_S:g} s"
    assert (silent.status, silent.json()["error"]["message"]) == (408, message)
    leaver = Exchange("POST", "/admin/engines/decode-0/role", b"", {})
    leaver._to_send.clear()
    leaver.disconnect()
    ask_launchers(leaver)
    assert leaver.status == 499
