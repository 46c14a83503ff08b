"""What is refused before an engine is started or ended, and the shares of engines that are added."""

import asyncio
import dataclasses
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.errors import ConfigError, StartupError
from pdkv.launch import control as control_module
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.launch.control import ControlServer, Restart, Scale, give_order
from pdkv.launch.fleet_control import SPIN_VARIABLE, FleetControl
from pdkv.launch.plan import plan_fleet
from pdkv.launch.router_admin import Refused, RouterAdmin
from pdkv.launch.run_dir import ADMIN_SOCKET, CONTROL_SOCKET, RunDirectory, running_launches
from pdkv.launch.supervisor import Supervisor


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv(SPIN_VARIABLE, "unset")


@pytest.fixture
def run_dir() -> Iterator[RunDirectory]:
    with RunDirectory() as directory:
        yield directory


class StillSupervisor(Supervisor):
    """Knows the engines that it would run, and starts none: what is tested here must not get that far."""

    async def add_engine(self, *_: Any) -> None:
        raise StartupError("this is as far as it goes")


def make_control(run_dir: RunDirectory, launch: LaunchConfig, **engine: Any) -> FleetControl:
    config = EngineConfig(**engine)
    deployment = Deployment(launch=launch, handoff=HandoffConfig(), prefill=config, decode=config)
    fleet = plan_fleet(deployment, run_dir)
    supervisor = StillSupervisor(fleet, listen_fd=-1, lifeline_fd=-1, on_ready=lambda name, seconds: None)
    return FleetControl(
        deployment=deployment, run_dir=run_dir, supervisor=supervisor, router=RouterAdmin(run_dir.path),
        chooses_spin=True,
    )  # fmt: skip


def run(control: FleetControl, scenario: Callable[[], Awaitable[None]], *, answer: bytes | None = None) -> None:
    """With a router that says which engines it has, or always the same."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        engines = ",".join(
            f'{{"name":"{spec.name}","role":"{spec.role}"}}' for spec in control.supervisor.engines.values()
        )
        body = f'{{"engines":[{engines}]}}'.encode()
        writer.write(answer or b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def main() -> None:
        async with asyncio.timeout(30):
            server = await asyncio.start_unix_server(serve, str(control.run_dir.path / ADMIN_SOCKET))
            async with server:
                await scenario()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("launch", "engine", "counts", "message"),
    [
        (LaunchConfig(), {}, {"decode": 0}, "decode must be at least 1, got 0"),
        (LaunchConfig(prefill=0), {}, {"prefill": 1}, "this launch has aggregated engines only; --decode says how"),
        (LaunchConfig(), {"kv_cache_memory": 1 << 50}, {"decode": 3}, r"2 KV pools of 1048576.0 GiB .* need 2097152.0"),
        (LaunchConfig(prefill=2, decode=2), {"cpu_bind": "0|1"}, {"decode": 3}, "for 2 engines and none for decode-2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    run_dir: RunDirectory, launch: LaunchConfig, engine: dict[str, Any], counts: dict[Any, int], message: str
) -> None:
    control = make_control(run_dir, launch, **engine)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match=message):
            await control.scale(counts, 1.0, print)

    run(control, scenario)


def test_new_engines_get_their_share_of_what_there_is_with_them(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    assert [spec.config.threads for spec in control.supervisor.engines.values()] == [2, 2]
    control.choose_spin(list(control.supervisor.engines.values()))
    assert os.environ[SPIN_VARIABLE] == "20000"
    specs = control.plan({"decode": 2, "prefill": -1})
    assert [(spec.name, spec.config.threads, spec.num_engines) for spec in specs] == [
        ("decode-1", 1, 4), ("decode-2", 1, 4),
    ]  # fmt: skip
    assert os.environ[SPIN_VARIABLE] == "0", "the old engines keep their threads: there are more than CPUs"


def test_the_only_engine_is_not_restarted(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig(prefill=0))

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="engine-0 is the only engine: scale up first"):
            await control.restart(1.0, print)

    run(control, scenario)


def test_orders_come_one_at_a_time_and_say_how_they_end(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    said: list[str] = []

    async def scenario() -> None:
        async with ControlServer(control, 1.0).serving(run_dir.path):
            assert await give_order(run_dir.path, Scale(decode=1), said.append) == (
                "there are 1 prefill, 1 decode: nothing was to be done"
            )
            with pytest.raises(ConfigError, match="decode must be at least 1, got -1"):
                await give_order(run_dir.path, Scale(decode=-1), said.append)
            with pytest.raises(StartupError, match="this is as far as it goes"):
                await give_order(run_dir.path, Scale(decode=2), said.append)
            assert said == ["decode-1 is started"]
            reader, writer = await asyncio.open_unix_connection(str(run_dir.path / CONTROL_SOCKET))
            writer.write(b'{"type":"Explode"}\n')
            assert b"this is no order" in await reader.readline()
            writer.close()
        with pytest.raises(StartupError, match=r"the launcher of .* has ended"):
            await give_order(run_dir.path, Restart(), said.append)

    run(control, scenario)


def test_who_connects_and_says_nothing_is_sent_away(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_ASK_S", 0.05)
    control = make_control(run_dir, LaunchConfig())

    async def scenario() -> None:
        async with ControlServer(control, 1.0).serving(run_dir.path):
            reader, writer = await asyncio.open_unix_connection(str(run_dir.path / CONTROL_SOCKET))
            assert await reader.read() == b""
            writer.close()

    run(control, scenario)


def test_a_second_order_does_not_begin_before_the_first_one_ends(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())

    async def scenario() -> None:
        began, go = asyncio.Event(), asyncio.Event()

        async def add_engine(*_: Any) -> None:
            began.set()
            await go.wait()
            raise StartupError("this is as far as it goes")

        control.supervisor.add_engine = add_engine  # type: ignore[method-assign]
        async with ControlServer(control, 1.0).serving(run_dir.path):
            first = asyncio.create_task(give_order(run_dir.path, Scale(decode=2), print))
            await began.wait()
            with pytest.raises(StartupError, match=r"another order is being carried out \(2 decode\): try again later"):
                await give_order(run_dir.path, Restart(), print)
            go.set()
            with pytest.raises(StartupError, match="this is as far as it goes"):
                await first
            assert "nothing was to be done" in await give_order(run_dir.path, Scale(decode=1), print)

    run(control, scenario)


def test_a_router_that_says_no_is_not_asked_again_and_one_that_says_nothing_is(
    run_dir: RunDirectory,
) -> None:
    control = make_control(run_dir, LaunchConfig())
    no = b'{"error":{"message":"never"}}'

    async def refused() -> None:
        with pytest.raises(ConfigError, match="never"):
            await control.router.resume("decode-0")

    run(control, refused, answer=b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\n\r\n%b" % (len(no), no))

    async def silent() -> None:
        with pytest.raises(StartupError, match="the router does not answer"):
            await RouterAdmin(run_dir.path, patience_s=0.05).resume("decode-0")

    run(control, silent, answer=b"HTTP/1.1 200")


@pytest.mark.parametrize("verb", ["drain", "wait_ready"])
def test_a_router_that_is_asked_again_is_to_wait_for_what_is_left(run_dir: RunDirectory, verb: str) -> None:
    """One that has taken more time than there is in all is not one that does not answer."""
    asked: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(target).query)
        asked.append(float(query["wait_s"][0]))
        if len(asked) == 2:  # the first one died
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def main() -> None:
        router = RouterAdmin(run_dir.path)
        async with asyncio.timeout(30), await asyncio.start_unix_server(serve, str(run_dir.path / ADMIN_SOCKET)):
            await (router.drain("decode-0", 20.0) if verb == "drain" else router.wait_ready("decode-0", 1, 20.0))

    asyncio.run(main())
    first, second = asked
    assert second < first <= 20.0


class Router(RouterAdmin):
    """Engines that are all ready; what is asked of it is noted, and the test may refuse it."""

    def __init__(self, roles: dict[str, str]) -> None:
        super().__init__(Path("/nowhere"))
        self.all = {
            name: {"name": name, "role": role, "state": "ready", "draining": False, "drained": True}
            | {"requests": 0, "waiting": 0, "running": 0, "reason": ""}
            for name, role in roles.items()
        }
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.go = asyncio.Event()
        self.go.set()

    async def engines(self) -> list[dict[str, Any]]:
        return list(self.all.values())

    async def _call(
        self, method: str, path: str, body: object = None, *, wait_s: float | None = None
    ) -> dict[str, Any]:
        name, verb = [*path.partition("?")[0].split("/"), method][1:3]
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


def test_a_refused_removal_does_not_leave_the_others_to_themselves(run_dir: RunDirectory) -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_who_would_be_the_last_of_a_role_is_known_before_anybody_is_drained(run_dir: RunDirectory) -> None:
    async def main() -> None:
        router = Router({"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"})
        router.all["decode-0"]["state"] = "starting"
        control = make_fleet(run_dir, router, LaunchConfig(prefill=2, decode=2))
        with pytest.raises(ConfigError, match="without prefill-1, decode-1 there would be no engine that can decode"):
            await control.scale({"prefill": 1, "decode": 1}, 1.0, lambda _: None)
        assert router.calls == []

    asyncio.run(main())


def test_a_stand_in_gets_its_role_back_though_the_router_refuses_to_resume(run_dir: RunDirectory) -> None:
    async def main() -> None:
        router = Router({"prefill-0": "prefill", "decode-0": "decode"})
        router.refused = {"drain prefill-0", "resume prefill-0"}
        control = make_fleet(run_dir, router, LaunchConfig())
        with pytest.raises(Refused, match="resume prefill-0: no"):
            await control.restart(1.0, lambda _: None)
        assert router.calls == ["role decode-0", "drain prefill-0", "resume prefill-0", "role decode-0"]

    asyncio.run(main())


def test_a_launch_is_found_by_its_port_pid_and_directory(run_dir: RunDirectory) -> None:
    assert run_dir.path not in [Path(launch.path) for launch in running_launches()], "it is not ready yet"
    run_dir.introduce("http://127.0.0.1:8123", "1 prefill, 1 decode")
    (launch,) = [launch for launch in running_launches() if launch.path == str(run_dir.path)]
    names = ("8123", str(os.getpid()), "http://127.0.0.1:8123", str(run_dir.path), run_dir.path.name)
    assert all(launch.is_called(name) for name in names)
    assert not launch.is_called("812")
