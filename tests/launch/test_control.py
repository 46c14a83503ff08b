"""Orders to a running launch: one at a time, and whatever happens, who gave one hears how it ended."""

import asyncio
import logging
from typing import Any

import pytest
from coroutines import clock
from still_launch import commanded, make_control

from pdkv.errors import ConfigError, StartupError
from pdkv.launch.config import LaunchConfig
from pdkv.launch.control import ControlServer, Restart, Scale, give_order
from pdkv.launch.run_dir import CONTROL_SOCKET, RunDirectory
from pdkv.testing import VirtualLoop

event_loop = VirtualLoop


async def test_orders_come_one_at_a_time_and_say_how_they_end(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    said: list[str] = []
    async with commanded(control):
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


async def test_who_connects_and_says_nothing_is_sent_away(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    async with commanded(control), ControlServer(control, 1.0).serving(run_dir.path):
        reader, writer = await asyncio.open_unix_connection(str(run_dir.path / CONTROL_SOCKET))
        assert await clock().passing(reader.read()) == b""
        writer.close()


async def test_a_second_order_does_not_begin_before_the_first_one_ends(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    async with commanded(control):
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


@pytest.mark.parametrize("error", [OSError("no descriptors"), ValueError("odd"), KeyError("decode"), TimeoutError()])
async def test_a_defect_in_an_order_is_logged_and_told(
    run_dir: RunDirectory, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    control = make_control(run_dir, LaunchConfig())
    async with commanded(control):

        async def add_engine(*_: Any) -> None:
            raise error

        control.supervisor.add_engine = add_engine  # type: ignore[method-assign]
        async with ControlServer(control, 1.0).serving(run_dir.path):
            with pytest.raises(StartupError) as caught:
                await give_order(run_dir.path, Scale(decode=2), lambda _: None)
            assert "2 decode failed in the launcher" in str(caught.value)
            assert repr(error) in str(caught.value)
            assert "nothing was to be done" in await give_order(run_dir.path, Scale(decode=1), print)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize(
    "line",
    [
        b"x" * (1 << 20) + b"\n",
        b'{"type":"Scale","drain_s":-1}\n',
        b'{"type":"Scale","drain_s":86401}\n',
        b'{"type":"Restart","drain_s":NaN}\n',
        b"\xff\n",
    ],
)
async def test_what_is_no_order_is_said_to_be_none(run_dir: RunDirectory, line: bytes) -> None:
    control = make_control(run_dir, LaunchConfig())
    async with commanded(control), ControlServer(control, 1.0).serving(run_dir.path):
        reader, writer = await asyncio.open_unix_connection(str(run_dir.path / CONTROL_SOCKET))
        writer.write(line)
        assert b"this is no order" in await reader.readline()
        writer.close()


@pytest.mark.parametrize("launch", [LaunchConfig(), LaunchConfig(prefill=0)])
async def test_an_order_for_no_number_of_engines_changes_nothing(run_dir: RunDirectory, launch: LaunchConfig) -> None:
    control = make_control(run_dir, launch)
    async with commanded(control), ControlServer(control, 1.0).serving(run_dir.path):
        assert "nothing was to be done" in await give_order(run_dir.path, Scale(), print)


@pytest.mark.parametrize("answer", [b"x" * (1 << 20) + b"\n", b"hello\n"])
def test_a_launcher_that_talks_nonsense_is_a_failure_with_a_name(run_dir: RunDirectory, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_unix_server(serve, str(run_dir.path / CONTROL_SOCKET)):
            with pytest.raises(StartupError, match=r"the launcher of .* sent an invalid answer"):
                await give_order(run_dir.path, Restart(), print)

    asyncio.run(main())
