"""The autoscaler between the router's books and its launcher: the page, the orders, the metrics, engines that lie."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
from admin_keys import admin_keys, never
from asgi_client import call
from dispatch_rig import System, live
from small_app import make_app

from pdkv.config import AccessConfig, AutoscaleConfig
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages.admin import LauncherPages
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Scaler
from pdkv.wire.reports import LoadReport

SCALED = AutoscaleConfig(autoscale=("prefill=1..4", "decode=1..4"), scale_down_after_s=3.0)


async def test_the_page_is_an_admins_and_the_orders_are_the_launchers(tmp_path: Path) -> None:
    file, root, other = admin_keys(tmp_path)
    async with live(System(1, 2)) as system:
        operations = Operations(system.dispatcher, never)
        options: dict[str, Any] = {"operations": operations, "access": AccessConfig(api_key_file=file)}
        app = make_app(system.dispatcher, keys=KeyRing(file), autoscaling=SCALED, **options)
        launchers = LauncherPages(system.dispatcher, operations, app.state.caches, app.state.scaler).app()
        told = msgspec.to_builtins(Told())
        for headers, status in ((root, 405), (other, 403), ({}, 401)):
            assert (await call(app, "POST", "/admin/autoscaler", told, headers)).status == status
        assert (await call(launchers, "POST", "/admin/autoscaler", told | {"x": 1})).status == 400
        answer = await call(launchers, "POST", "/admin/autoscaler", told)
        assert answer.json() == {"start": {}, "stop": [], "keep": [], "pause_s": 1.0}
        page = (await call(app, "GET", "/admin/autoscaler", None, root)).json()
        assert (page["desired"], page["bounds"]["decode"]) == ({"prefill": 1, "decode": 2}, {"least": 1, "most": 4})
        metrics = (await call(app, "GET", "/metrics")).body.decode()
        assert 'pdkv_autoscaler_desired_engines{role="decode"} 2.0' in metrics
        plain = make_app(system.dispatcher, keys=KeyRing(file), **options)
        assert (await call(plain, "GET", "/admin/autoscaler", None, root)).status == 404


async def test_an_engine_that_claims_a_queue_changes_nothing() -> None:
    async with live(System(1, 2)) as system:
        dispatcher = system.dispatcher
        app = make_app(dispatcher)
        seconds = itertools.count(1.0)
        operations = Operations(dispatcher, never)
        scaler = Scaler(SCALED, dispatcher, app.state.admission, operations, clock=lambda: next(seconds))
        for engine in dispatcher.engines():
            report = LoadReport(waiting=10**9, running=10**9, blocks=engine.blocks)
            dispatcher.fleet.reported(engine.name, report)
        for _ in range(3):
            assert scaler.review(Told()).start == {}
