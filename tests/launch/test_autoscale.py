"""What a launch does with its autoscaler's orders: engines that start, fail to, leave, and are kept after all."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from coroutines import clock
from still_launch import StillSupervisor, make_control

from pdkv.errors import ConfigError, StartupError
from pdkv.launch.autoscale import LaunchScaler
from pdkv.launch.config import LaunchConfig
from pdkv.launch.control import ControlServer, Restart, Scale, give_order
from pdkv.launch.router_admin import RouterAdmin
from pdkv.launch.run_dir import RunDirectory
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Orders
from pdkv.testing import VirtualLoop

event_loop = VirtualLoop


class Router(RouterAdmin):
    """Gives these orders, one a review, and notes what it is told and asked for. Drains last until `drained` is set."""

    def __init__(self, run_dir: RunDirectory, *orders: Orders) -> None:
        super().__init__(run_dir.path)
        self.orders = [*orders]
        self.told: list[Told] = []
        self.calls: list[str] = []
        self.drained = asyncio.Event()
        self.fails = False

    async def autoscale(self, told: Told) -> Orders:
        self.told.append(told)
        if self.fails:
            raise StartupError("the router does not answer")
        return self.orders.pop(0) if self.orders else Orders()

    async def engines(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        return []

    async def _call(self, method: str, path: str, body: object = None, **_: Any) -> dict[str, Any]:
        self.calls.append(f"{method} {path.partition('?')[0].removeprefix('/admin/engines/')}")
        if "/drain" in path:
            await self.drained.wait()
        return {"drained": True, "state": "ready", "pid": 7, "reason": ""}


class Supervisor(StillSupervisor):
    """Starts wait for `go`, which ends them with an error if there is one."""

    go: "asyncio.Future[None]"

    async def add_engine(self, spec: Any, address: Any) -> None:
        self.engines[spec.name] = spec
        try:
            await asyncio.shield(self.go)
        except BaseException:
            del self.engines[spec.name]
            raise

    async def remove_engine(self, name: str) -> None:
        del self.engines[name]

    def hide_engine(self, name: str) -> None:
        pass

    def pid_of(self, name: str) -> int:
        return 7


@contextlib.asynccontextmanager
async def scaled(run_dir: RunDirectory, router: Router, launch: LaunchConfig) -> AsyncIterator[LaunchScaler]:
    fleet = dataclasses.replace(make_control(run_dir, launch), router=router)
    fleet.supervisor.__class__ = Supervisor
    fleet.supervisor.go = asyncio.get_running_loop().create_future()  # type: ignore[attr-defined]
    scaler = LaunchScaler(fleet, 1.0, clock())
    async with ControlServer(fleet, 1.0, scaler).serving(run_dir.path), scaler.running(lambda: False):
        yield scaler
    assert not scaler.is_busy, "all is over with the launch"


async def reviews(router: Router, number: int) -> Told:
    """What was said when orders were asked for so many times more."""
    wanted = len(router.told) + number
    while len(router.told) < wanted:
        clock().advance(1.0)
        for _ in range(20):
            await asyncio.sleep(0)
    return router.told[-1]


async def test_engines_start_side_by_side_and_failures_are_told(run_dir: RunDirectory) -> None:
    router = Router(run_dir, Orders({"prefill": 1, "decode": 2}))
    async with scaled(run_dir, router, LaunchConfig()) as scaler:
        told = await reviews(router, 2)
        assert told.starting == {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode"}
        scaler._fleet.supervisor.go.set_exception(StartupError("out of memory"))  # type: ignore[attr-defined]
        told = await reviews(router, 2)
        assert (told.starting, told.num_started, told.num_failed) == ({}, 0, 3)
        assert told.failure == "decode-2: out of memory"


async def test_an_engine_that_does_not_fit_is_a_failed_start(run_dir: RunDirectory) -> None:
    router = Router(run_dir, Orders({"decode": 1}))
    async with scaled(run_dir, router, LaunchConfig()) as scaler:
        object.__setattr__(scaler._fleet.deployment.decode, "kv_cache_memory", 1 << 50)
        told = await reviews(router, 2)
        assert told.num_failed == 1
        assert "KV pool" in told.failure


async def test_an_engine_is_kept_while_it_is_drained_and_ends_otherwise(run_dir: RunDirectory) -> None:
    stop = Orders(stop=["decode-1"])
    router = Router(run_dir, stop, Orders(keep=["decode-1"]), Orders(), stop)
    async with scaled(run_dir, router, LaunchConfig(decode=2)) as scaler:
        assert (await reviews(router, 2)).leaving == ["decode-1"]
        assert (await reviews(router, 1)).leaving == []
        assert router.calls == ["POST decode-1/drain", "POST decode-1/resume"]
        assert (await reviews(router, 2)).leaving == ["decode-1"]
        router.drained.set()
        assert (await reviews(router, 2)).leaving == []
        assert router.calls[2:] == ["POST decode-1/drain", "DELETE decode-1"]
        assert list(scaler._fleet.supervisor.engines) == ["prefill-0", "decode-0"]


async def test_operators_and_the_autoscaler_do_not_change_engines_at_once(run_dir: RunDirectory) -> None:
    router = Router(run_dir, Orders({"decode": 1}))
    async with scaled(run_dir, router, LaunchConfig()):
        with pytest.raises(ConfigError, match="chooses the number of its engines by itself"):
            await give_order(run_dir.path, Scale(decode=2), print)
        await reviews(router, 2)
        with pytest.raises(StartupError, match="the autoscaler is starting or ending engines"):
            await give_order(run_dir.path, Restart(), print)


async def test_a_router_that_does_not_answer_is_asked_again(run_dir: RunDirectory) -> None:
    router = Router(run_dir, Orders({"decode": 1}))
    router.fails = True
    async with scaled(run_dir, router, LaunchConfig()):
        await reviews(router, 2)
        router.fails = False
        assert (await reviews(router, 2)).starting == {"decode-1": "decode"}
