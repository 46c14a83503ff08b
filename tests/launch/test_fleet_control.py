"""What is refused before an engine is started or ended, and the shares of engines that are added."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from still_launch import commanded, make_control

from pdkv.errors import ConfigError
from pdkv.launch.config import LaunchConfig
from pdkv.launch.fleet_control import SPIN_VARIABLE, FleetControl
from pdkv.launch.router_admin import Refused, RouterAdmin
from pdkv.launch.run_dir import RunDirectory


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv(SPIN_VARIABLE, "unset")


@pytest.mark.parametrize(
    ("launch", "engine", "counts", "message"),
    [
        (LaunchConfig(), {}, {"decode": 0}, "decode must be at least 1, got 0"),
        (LaunchConfig(prefill=0), {}, {"prefill": 1}, "this launch only has aggregated engines; use --decode"),
        (LaunchConfig(), {"kv_cache_memory": 1 << 50}, {"decode": 3}, r"2 KV pools of 1048576.0 GiB .* need 2097152.0"),
        (LaunchConfig(prefill=2, decode=2), {"cpu_bind": "0|1"}, {"decode": 3}, "for 2 engines and none for decode-2"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_starts(
    run_dir: RunDirectory, launch: LaunchConfig, engine: dict[str, Any], counts: dict[Any, int], message: str
) -> None:
    control = make_control(run_dir, launch, **engine)
    async with commanded(control):
        with pytest.raises(ConfigError, match=message):
            await control.scale(counts, 1.0, print)


def test_new_engines_get_their_share_of_what_there_is_with_them(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    assert [spec.config.threads for spec in control.supervisor.engines.values()] == [2, 2]
    control.choose_spin(list(control.supervisor.engines.values()))
    assert os.environ[SPIN_VARIABLE] == "20000"
    specs = control.plan({"decode": 2, "prefill": -1})
    assert [(spec.name, spec.config.threads, spec.num_engines) for spec in specs] == [
        ("decode-1", 1, 4), ("decode-2", 1, 4),
    ]  # fmt: skip
    assert os.environ[SPIN_VARIABLE] == "20000", "one thread waits for no other: the fork server stays"


def test_threads_that_share_cpus_do_not_spin(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that spun beside others took three times the processor time and twelve times as long."""
    control, renewed = make_control(run_dir, LaunchConfig(), threads=2), list[str]()
    control.choose_spin(list(control.supervisor.engines.values()))
    monkeypatch.setattr(control.supervisor, "renew_environment", lambda: renewed.append(os.environ[SPIN_VARIABLE]))
    for _ in range(3):
        control.plan({"decode": 1})
    assert renewed == ["0"], "there are more threads than CPUs: one new fork server, for all that are added"


async def test_the_only_engine_is_not_restarted(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig(prefill=0))
    async with commanded(control):
        with pytest.raises(ConfigError, match="engine-0 is the only engine: scale up first"):
            await control.restart(1.0, print)


class Router(RouterAdmin):
    """Engines that are all ready; what is asked of it is noted, and the test may refuse it."""

    def __init__(self, roles: dict[str, str]) -> None:
        super().__init__(Path("/nowhere"))
        self.all = {
            name: {"name": name, "role": role, "state": "ready", "serves": True, "draining": False, "drained": True}
            | {"requests": 0, "waiting": 0, "running": 0, "reason": ""}
            for name, role in roles.items()
        }
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.go = asyncio.Event()
        self.go.set()

    async def engines(self) -> list[dict[str, Any]]:
        self.calls.append("engines")
        return list(self.all.values())

    async def _call(
        self, method: str, path: str, body: object = None, *, wait_s: float | None = None
    ) -> dict[str, Any]:
        path = path.partition("?")[0].removeprefix("/admin/engines")
        name, verb = [*path.split("/"), method][1:3]
        self.calls.append(f"{verb} {name}")
        if f"{verb} {name}" in self.refused:
            raise Refused(f"{verb} {name}: no")
        if verb == "drain":
            await self.go.wait()
        return self.all[name]


def make_fleet(run_dir: RunDirectory, router: Router, launch: LaunchConfig) -> FleetControl:
    control = dataclasses.replace(make_control(run_dir, launch), router=router)

    async def remove_engine(name: str) -> None:
        router.calls.append(f"end {name}")

    control.supervisor.remove_engine = remove_engine  # type: ignore[method-assign]
    control.supervisor.hide_engine = lambda name: None  # type: ignore[method-assign]
    return control


async def test_a_refused_removal_does_not_leave_the_others_to_themselves(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode", "decode-2": "decode"})
    router.refused, router.go = {"drain decode-2"}, asyncio.Event()
    control = make_fleet(run_dir, router, LaunchConfig(decode=3))
    order = asyncio.create_task(control.scale({"decode": 1}, 1.0, lambda _: None))
    while "drain decode-1" not in router.calls:
        await asyncio.sleep(0)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not order.done(), "decode-1 is being removed"
    router.go.set()
    with pytest.raises(Refused, match="drain decode-2: no"):
        await order
    assert router.calls[-1] == "end decode-1"


async def test_who_would_be_the_last_of_a_role_is_known_before_anybody_is_drained(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"})
    router.all["decode-0"]["serves"] = False  # it is starting, a suspect or drained
    control = make_fleet(run_dir, router, LaunchConfig(prefill=2, decode=2))
    with pytest.raises(ConfigError, match="without prefill-1, decode-1 there would be no engine that can decode"):
        await control.scale({"prefill": 1, "decode": 1}, 1.0, lambda _: None)
    assert router.calls == ["engines"]


async def test_a_stand_in_gets_its_role_back_though_the_router_refuses_to_resume(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "decode-0": "decode"})
    router.refused = {"drain prefill-0", "resume prefill-0"}
    control = make_fleet(run_dir, router, LaunchConfig())
    with pytest.raises(Refused, match="resume prefill-0: no"):
        await control.restart(1.0, lambda _: None)
    orders = [call for call in router.calls if call != "engines"]
    assert orders == ["role decode-0", "drain prefill-0", "resume prefill-0", "role decode-0"]


async def test_a_suspect_is_no_stand_in_and_whom_only_suspects_stand_beside_has_one(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode", "prefill-1": "prefill"})
    router.all["decode-0"] |= {"serves": False, "suspect": True}
    router.all["prefill-1"] |= {"serves": False, "suspect": True}
    router.all["decode-1"]["running"] = 9  # the idlest of those that serve all the same
    router.refused = {"drain prefill-0"}
    control = make_fleet(run_dir, router, LaunchConfig(prefill=2, decode=2))
    with pytest.raises(Refused, match="drain prefill-0: no"):
        await control.restart(1.0, lambda _: None)
    assert [call for call in router.calls if call.startswith("role")] == ["role decode-1", "role decode-1"]


async def test_an_engine_that_alone_does_both_has_a_stand_in(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "any", "decode-0": "decode", "decode-1": "decode"})
    router.refused = {"drain prefill-0"}
    with pytest.raises(Refused, match="drain prefill-0: no"):
        await make_fleet(run_dir, router, LaunchConfig(decode=2)).restart(1.0, lambda _: None)
    assert [call for call in router.calls if call.startswith("role")] == ["role decode-0", "role decode-0"]


async def test_servers_of_other_engines_are_not_restarted(run_dir: RunDirectory) -> None:
    launch = LaunchConfig(prefill=0, decode=0, backend=("vllm=http://a",))
    with pytest.raises(ConfigError, match="only servers of other engines"):
        await make_fleet(run_dir, Router({"vllm-0": "any"}), launch).restart(1.0, lambda _: None)


def test_an_engine_that_dies_before_the_router_has_seen_it_is_not_waited_for(run_dir: RunDirectory) -> None:
    """A rolling restart stood still for --start-timeout-s. Found by a soak."""

    async def main() -> None:
        router = Router({"prefill-0": "prefill", "decode-0": "decode"})
        control = make_fleet(run_dir, router, LaunchConfig())
        pids = iter([7, None, 8])
        control.supervisor.pid_of = lambda name: next(pids)  # type: ignore[method-assign]
        asked: list[int | None] = []

        async def wait_ready(name: str, pid: int | None, wait_s: float) -> dict[str, Any]:
            asked.append(pid)
            return router.all[name] | {"pid": 8 if pid == 8 else 6, "state": "ready"}

        router.wait_ready = wait_ready  # type: ignore[method-assign]
        await control._await_ready("decode-0")
        assert asked == [7, 0, 8]

    asyncio.run(main())


async def test_an_engine_ends_though_the_router_cannot_be_told(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"})
    router.refused = {"DELETE decode-1"}
    control = make_fleet(run_dir, router, LaunchConfig(decode=2))
    with pytest.raises(Refused, match="DELETE decode-1: no"):
        await control.scale({"decode": 1}, 1.0, lambda _: None)
    assert router.calls[-1] == "end decode-1"


async def test_a_scale_asks_once_for_the_engines_before_and_once_for_those_after(run_dir: RunDirectory) -> None:
    router = Router({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"})
    control = make_fleet(run_dir, router, LaunchConfig(decode=2))
    await control.scale({"decode": 1}, 1.0, lambda _: None)
    assert router.calls == ["engines", "drain decode-1", "DELETE decode-1", "end decode-1", "engines"]
