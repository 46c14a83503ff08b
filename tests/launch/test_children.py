"""Children: their death is seen, their acknowledgements are read, and a bad start has a reason."""

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from coroutines import clock, run
from traffic import wait_until_true

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ConfigError, StartupError
from pdkv.host.linux import become_subreaper
from pdkv.launch import children
from pdkv.launch.acks import Acknowledger, StartGivenUp
from pdkv.launch.children import AckSocket, Child, ForkServer, LocalChild, OomWatch, describe_exit
from pdkv.launch.specs import EngineSpec
from pdkv.testing import VirtualLoop

PR_SET_CHILD_SUBREAPER = 36
FakeChild = Callable[[str, int, str], Child]

SPEC = EngineSpec(
    name="decode-0", role="decode", epoch="1", config=EngineConfig(), handoff=HandoffConfig(), connector=NO_PLAN,
    endpoint="ipc://decode-0", num_engines=1,
)  # fmt: skip


event_loop = VirtualLoop


_IMPORTS_FOR_LONG = "import signal; print(flush=True); signal.pause()"
_LAUNCHER = "from pdkv.launch import children; print(children._spawn('imports_for_long', [], []).wait())"


def test_a_process_has_a_group_of_its_own_in_the_launchers_session_and_dies_with_it_while_it_imports(
    tmp_path: Path,
) -> None:
    """Ctrl-C is for the launcher alone, and niceness counts between processes of one session. F82. A launcher that was
    killed in its first seconds left its port taken for as many.
    """
    (tmp_path / "imports_for_long.py").write_text(_IMPORTS_FOR_LONG)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", _LAUNCHER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stderr is not None
        assert launcher.stderr.read(1) == b"\n"  # what it starts writes there
        (child,) = psutil.Process(launcher.pid).children()
        assert (os.getpgid(child.pid), os.getsid(child.pid)) == (child.pid, os.getsid(0))
        launcher.kill()
        assert psutil.wait_procs([child], timeout=30)[0]


_READS_WHAT_IS_GONE = """
import mmap, tempfile
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    memory[0]
"""


def test_exit_statuses_are_seen() -> None:
    async def main() -> list[int]:
        statuses = []
        for code in ("raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", _READS_WHAT_IS_GONE):
            popen = subprocess.Popen([sys.executable, "-c", code])
            child = LocalChild("x", popen.pid, popen)
            assert child.alive
            statuses.append(await child.wait())
            assert not child.alive
            child.send_signal(signal.SIGTERM)  # to nobody, and without an error
        return statuses

    statuses = run(main(), event_loop)
    assert statuses == [3, -9, -7]
    *told, cut = map(describe_exit, statuses)
    assert told == ["exited with 3", "killed by SIGKILL"]
    assert "such as the weights, became shorter" in cut


def test_a_kill_that_the_kernel_counts_is_named_as_its_own() -> None:
    kills = 3
    watch = OomWatch(lambda: kills)
    assert not watch.explains(-signal.SIGKILL)
    kills = 4
    assert not watch.explains(-signal.SIGTERM)
    assert watch.explains(-signal.SIGKILL)
    assert not watch.explains(-signal.SIGKILL), "one kill explains one death"
    assert describe_exit(-9, out_of_memory=True).startswith("was killed by the kernel because memory ran out")
    assert not OomWatch(lambda: None).explains(-signal.SIGKILL)


def read_acks(write: Callable[[Acknowledger], None]) -> list[str]:
    """What a child that acts as `write` does makes of the launcher's wait."""

    async def main() -> list[str]:
        with closing(AckSocket()) as ack_socket:
            write(Acknowledger(os.dup(ack_socket.child_fd)))
            ack_socket.handed_over()
            texts: list[str] = []
            await ack_socket.wait_ready("decode-1", 60.0, texts.append)
            return texts

    return run(main(), event_loop)


def test_progress_then_ready() -> None:
    def write(ack: Acknowledger) -> None:
        ack.progress("loading")
        ack.progress("warming up\nin two lines")
        ack.ready()

    assert read_acks(write) == ["loading", "warming up\nin two lines"]


def test_a_configuration_error_passes_as_one() -> None:
    with pytest.raises(ConfigError, match=r"^dtype is wrong$"):
        read_acks(lambda ack: ack.failed(ConfigError("dtype is wrong")))


def test_another_error_is_a_startup_error_with_its_type() -> None:
    with pytest.raises(StartupError, match=r"^decode-1: MemoryError: too much$"):
        read_acks(lambda ack: ack.failed(MemoryError("too much")))


@pytest.mark.parametrize(
    ("error", "is_a_defect"),
    [(OSError(errno.EMFILE, "Too many open files"), False), (OSError(errno.EIO, "broken"), True), (KeyError(1), True)],
)
def test_what_the_system_lacks_is_no_defect(
    error: Exception, is_a_defect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose traceback would tell nobody anything."""
    with pytest.raises(StartupError):
        read_acks(lambda ack: ack.failed(error))
    assert any(record.exc_info for record in caplog.records) == is_a_defect


def test_death_before_ready_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="decode-1 died before it was ready"):
        read_acks(lambda ack: os.close(ack._fd))


def test_nonsense_is_a_startup_error() -> None:
    def write(ack: Acknowledger) -> None:
        os.write(ack._fd, b"hello\n")

    with pytest.raises(StartupError, match="no valid acknowledgement"):
        read_acks(write)


async def test_silence_has_a_bound(fake_child: FakeChild) -> None:
    ack_socket = AckSocket()
    child = fake_child("decode-1", ack_socket.child_fd, "stubborn")
    try:
        # The stand-in acknowledges on a socket of its own; on this one nobody ever does.
        silent = AckSocket()
        with pytest.raises(StartupError, match="decode-1 was not ready after 60 s"):
            await clock().passing(silent.wait_ready("decode-1", 60.0, str))
        silent.close()
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
        ack_socket.close()


async def test_a_child_that_is_stopped_before_it_is_ready_is_late(fake_child: FakeChild) -> None:
    ack_socket = AckSocket()
    child = fake_child("decode-1", ack_socket.child_fd, "stop")
    ack_socket.handed_over()
    try:
        with pytest.raises(StartupError, match="decode-1 was not ready after 60 s"):
            await clock().passing(ack_socket.wait_ready("decode-1", 60.0, str))
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
        ack_socket.close()


def test_a_child_goes_on_when_it_is_known_and_ends_when_its_start_was_given_up() -> None:
    ack_socket = AckSocket()
    known = Acknowledger(os.dup(ack_socket.child_fd))
    ack_socket.handed_over()
    known.wait_known()
    ack_socket.close()
    for sent in (False, True):
        ack_socket = AckSocket()
        unknown = Acknowledger(os.dup(ack_socket.child_fd))
        if sent:  # something is still unread when the launcher leaves
            unknown.progress("imported")
        ack_socket.close()
        with pytest.raises(StartGivenUp):
            unknown.wait_known()
        with pytest.raises(StartGivenUp):
            unknown.progress("loading")


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Forked engines become children of this process, as they do with the launcher."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("subreaper")
async def test_an_engine_that_nobody_knows_of_ends_and_is_reaped(lifeline: int) -> None:
    """F24: whoever asked for it is cancelled, or its fork server dies owing the answer. It was a zombie as long as the
    launch lived, which a soak found.
    """
    strangers = {child.pid for child in psutil.Process().children()}  # servers of other tests
    server = ForkServer("pdkv.connectors.memory.connector:MemoryConnector", lifeline)

    def others() -> set[int]:
        """Children of this process, zombies included."""
        return {child.pid for child in psutil.Process().children()} - {server.child.pid} - strangers

    first, second, third = AckSocket(), AckSocket(), AckSocket()
    known = await server.fork_engine(SPEC, first.child_fd, timeout_s=20)
    forking = asyncio.create_task(server.fork_engine(SPEC, second.child_fd, timeout_s=20))
    await asyncio.sleep(0)
    assert not forking.done()  # it has asked
    forking.cancel()
    await until(lambda: not server._answers)
    second.close()
    await until(lambda: others() == {known.pid})

    asyncio.get_running_loop().remove_reader(server._control)  # its answer is not read
    forking = asyncio.create_task(server.fork_engine(SPEC, third.child_fd, timeout_s=20))
    await until(lambda: len(others()) == 2)
    server.child.send_signal(signal.SIGKILL)
    await server.child.wait()
    server.close()
    await asyncio.gather(forking, return_exceptions=True)
    third.close()
    await until(lambda: others() == {known.pid})
    first.close()
    assert await known.wait() == 1
    assert not others()


_CLIENT = (
    "from pdkv.host.linux import set_process_name as name; import sys; name('pdkv-client'); print(); sys.stdin.read()"
)
_ENGINE = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {_CLIENT!r}])"


@pytest.mark.usefixtures("subreaper")
async def test_what_an_engine_had_started_is_reaped_when_both_have_ended() -> None:
    """As Mooncake's client, a process of its own, which outlives its engine for a moment. Found by a soak."""
    with subprocess.Popen([sys.executable, "-c", _ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdin is not None
        assert popen.stdout is not None
        engine = children._engine_child("decode-0", popen.pid, popen)
        await asyncio.to_thread(popen.stdout.readline)
        (client,) = psutil.Process(popen.pid).children()
        engine.send_signal(signal.SIGKILL)
        await engine.wait()
        assert client.is_running()
        popen.stdin.close()
        await until(lambda: not psutil.pid_exists(client.pid))


async def until(check: Callable[[], bool]) -> None:
    """Nobody reports what is looked at here."""
    await asyncio.to_thread(wait_until_true, check, "it is so")


@pytest.mark.usefixtures("subreaper")
async def test_a_fork_server_that_is_stopped_when_it_has_imported_is_given_up_soon(lifeline: int) -> None:
    """Finding 15: a restart took as long as the imports may take; another way to start the engine is there."""
    server = ForkServer("pdkv.connectors.memory.connector:MemoryConnector", lifeline)
    ack_socket = AckSocket()
    child = await server.fork_engine(SPEC, ack_socket.child_fd, timeout_s=20)
    ack_socket.close()
    await child.wait()
    server.child.send_signal(signal.SIGSTOP)
    asked = [server.fork_engine(SPEC, lifeline, timeout_s=3600) for _ in range(200)]  # more than its socket holds
    first, *others = await clock().passing(asyncio.gather(*asked, return_exceptions=True))
    assert f"the fork server did not answer within {children.FORK_S:g} s" in str(first)
    assert {repr(other) for other in others} == {repr(StartupError("the fork server died"))}
    assert await server.child.wait() == -signal.SIGKILL


async def test_a_fork_server_that_has_ended_unheard_is_given_up(lifeline: int) -> None:
    """As one that memory ran out for together with its engine, which is to start again: it was not caught."""
    server = ForkServer("pdkv.connectors.memory.connector:MemoryConnector", lifeline)
    server._ready.set_result(b"ready")
    server.child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, server.child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(StartupError, match="the fork server died"):
        await server.fork_engine(SPEC, lifeline, timeout_s=20)
    assert not server.usable
    assert await server.child.wait() == -signal.SIGKILL


async def test_a_fork_server_that_is_stopped_is_killed_at_the_deadline(lifeline: int) -> None:
    server = ForkServer("pdkv.connectors.memory.connector:MemoryConnector", lifeline)
    server.child.send_signal(signal.SIGSTOP)
    with pytest.raises(StartupError, match="the fork server did not answer within 60 s"):
        await clock().passing(server.fork_engine(SPEC, lifeline, timeout_s=60))
    assert not server.usable
    assert await server.child.wait() == -signal.SIGKILL
