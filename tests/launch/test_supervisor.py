"""The supervisor over stand-in processes: ready when all are, restarts, refusals, a bounded stop."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from coroutines import clock, run

from pdkv.config import EngineConfig, HandoffConfig, ModelFiles
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ConfigError, IncompatiblePeers, StartupError
from pdkv.host.memory_limits import num_oom_kills
from pdkv.launch import starter
from pdkv.launch import supervisor as module
from pdkv.launch.children import Child, OomWatch
from pdkv.launch.keeper import backoff_s
from pdkv.launch.specs import EngineSpec
from pdkv.launch.supervisor import Fleet, Supervisor
from pdkv.router.engines.address import EngineAddress
from pdkv.router.spec import RouterSpec
from pdkv.testing import VirtualLoop

FakeChild = Callable[[str, int, str], Child]


class Deck:
    """A supervisor whose children are stand-ins; `behaviour[name]` is what the next start of `name` does."""

    def __init__(
        self,
        fake_child: FakeChild,
        lifeline: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        store: Path | None = None,
        notes: Path | None = None,
    ) -> None:
        self.behaviour: dict[str, str] = {}
        self.started: list[Child] = []
        self.epochs: list[str] = []
        self.stores: list[Path] = []
        self.rank_fds: list[tuple[int, int]] = []  # of each start: rank, inherited sockets
        self.routers: list[RouterSpec] = []
        self.ready: asyncio.Queue[str] = asyncio.Queue()
        self.ahead_s = 0.0  # of the supervisor's clock
        self.seconds: dict[str, float] = {}  # what each one's last start took
        self.failed: asyncio.Queue[str] = asyncio.Queue()

        def start(name: str, ack_fd: int) -> Child:
            behaviour = self.behaviour.get(name, "serve")
            child = fake_child(name, ack_fd, behaviour)
            self.started.append(child)
            if behaviour in ("die", "model B"):
                self.failed.put_nowait(name)
            return child

        def spawn_engine(spec: EngineSpec, ack_fd: int, lifeline_fd: int, rank_fds: Sequence[int]) -> Child:
            self.epochs.append(spec.epoch)
            if spec.store is not None:
                spec.store.touch()
                self.stores.append(spec.store)
            self.rank_fds.append((spec.rank, len(rank_fds)))
            return start(spec.process_name, ack_fd)

        def spawn_router(name: str, spec: RouterSpec, listen_fd: int, ack_fd: int, lifeline_fd: int) -> Child:
            self.routers.append(spec)
            return start("router", ack_fd)

        monkeypatch.setattr(starter, "_LAST_WORD_S", 20.0)
        monkeypatch.setattr(starter, "spawn_engine", spawn_engine)
        monkeypatch.setattr(module, "spawn_router", spawn_router)
        engines = [
            EngineSpec(
                name=f"decode-{i}", role="decode", epoch="", config=EngineConfig(tp=2 if i and store else 1),
                handoff=HandoffConfig(), connector=NO_PLAN, endpoint=f"ipc://decode-{i}",
                num_engines=2, store=store if i else None,
            )
            for i in range(2)
        ]  # fmt: skip
        addresses = [
            EngineAddress(spec.name, spec.role, spec.endpoint, notes / spec.name if notes is not None else None)
            for spec in engines
        ]
        router = RouterSpec(
            router_id="router",
            engines=addresses,
            model=ModelFiles(model=Path("m")),
            served_model_names=["m"],
            policy="round_robin",
        )
        fleet = Fleet(
            engines=engines, router=router, connector_target="x:Y", start_timeout_s=20.0, use_fork_server=False
        )
        self.supervisor = Supervisor(
            fleet,
            listen_fd=0,
            lifeline_fd=lifeline,
            on_ready=self._on_ready,
            clock=lambda: time.monotonic() + self.ahead_s,
        )

    def _on_ready(self, name: str, seconds: float) -> None:
        self.seconds[name] = seconds
        self.ready.put_nowait(name)

    def newest(self, name: str) -> Child:
        return next(child for child in reversed(self.started) if child.name == name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end none of its processes is left."""
        try:
            yield
        finally:
            await self.supervisor.stop()
        assert not any(child.alive for child in self.started)


@pytest.fixture
def deck(fake_child: FakeChild, lifeline: int, monkeypatch: pytest.MonkeyPatch) -> Deck:
    return Deck(fake_child, lifeline, monkeypatch)


@pytest.fixture
def ranked_deck(fake_child: FakeChild, lifeline: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deck:
    """decode-1 has two ranks."""
    return Deck(fake_child, lifeline, monkeypatch, store=tmp_path / "decode-1.ranks")


async def test_start_returns_when_all_are_ready_and_stop_ends_all(deck: Deck) -> None:
    async with deck.running():
        await deck.supervisor.start()
        assert {deck.ready.get_nowait() for _ in range(3)} == {"router", "decode-0", "decode-1"}
        assert all(child.alive for child in deck.started)


@pytest.mark.parametrize("name", ["decode-1", "router"])
async def test_who_is_killed_comes_back_and_nobody_else_is_touched(deck: Deck, name: str) -> None:
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        others = [child for child in deck.started if child.name != name]
        os.kill(deck.newest(name).pid, signal.SIGKILL)
        assert await deck.ready.get() == name
        assert deck.newest(name).alive
        assert all(child.alive for child in others)
        assert len(deck.started) == 4
    assert len(set(deck.epochs)) == len(deck.epochs), "every incarnation has its own epoch"
    assert [spec.await_all for spec in deck.routers] == [True, False][: len(deck.routers)]


async def test_a_restart_is_told_with_its_own_time(deck: Deck) -> None:
    """Not with the time since the launch."""
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        deck.ahead_s = 1000.0  # it had run for so long when it died
        os.kill(deck.newest("decode-1").pid, signal.SIGKILL)
        assert await deck.ready.get() == "decode-1"
        assert 0 < deck.seconds["decode-1"] < 1000


async def test_a_restart_that_fails_is_tried_again(deck: Deck) -> None:
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        deck.behaviour["decode-0"] = "die"
        os.kill(deck.newest("decode-0").pid, signal.SIGKILL)
        for _ in range(2):
            await deck.failed.get()
        deck.behaviour["decode-0"] = "serve"
        assert await deck.ready.get() == "decode-0"


async def test_a_child_that_refuses_its_configuration_fails_the_start(deck: Deck) -> None:
    deck.behaviour["decode-1"] = "refuse"
    async with deck.running():
        with pytest.raises(ConfigError, match="dtype is wrong"):
            await deck.supervisor.start()


async def test_a_child_that_dies_fails_the_start(deck: Deck) -> None:
    deck.behaviour["router"] = "die"
    async with deck.running():
        with pytest.raises(StartupError, match="router died before it was ready: exited with 3"):
            await deck.supervisor.start()


@pytest.mark.parametrize("name", ["decode-1", "decode-1.1"])
async def test_engines_and_ranks_of_other_models_fail_the_start_with_both_values(ranked_deck: Deck, name: str) -> None:
    behaviour = dict.fromkeys(["decode-0", "decode-1", "decode-1.1"], "model A")
    ranked_deck.behaviour = {**behaviour, name: "model B"}
    async with ranked_deck.running():
        with pytest.raises(IncompatiblePeers, match=r"has model (A, .*started with model B|B, .*started with model A)"):
            await ranked_deck.supervisor.start()


async def test_a_restarted_engine_of_another_model_stays_out_until_it_has_the_first_one_again(
    fake_child: FakeChild, lifeline: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Finding 1b, even when no engine of the first model is left; a restarted router is told which model it was."""
    deck = Deck(fake_child, lifeline, monkeypatch, notes=tmp_path)
    deck.behaviour = {"decode-0": "model A", "decode-1": "model A"}
    reason = "decode-0 has model B, but the deployment started with model A (of decode-"
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        deck.behaviour["decode-0"] = "model B"
        os.kill(deck.newest("decode-0").pid, signal.SIGKILL)
        for _ in range(2):  # the second start begins when the first one has been refused
            await deck.failed.get()
        assert reason in caplog.text
        assert (tmp_path / "decode-0").read_text().startswith(reason)
        assert not (tmp_path / "decode-1").exists()
        os.kill(deck.newest("router").pid, signal.SIGKILL)
        assert await deck.ready.get() == "router"
        deck.behaviour["decode-0"] = "model A"
        assert await deck.ready.get() == "decode-0"
        assert not (tmp_path / "decode-0").exists()
    assert [spec.identity for spec in deck.routers] == ["", "A"]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB, whose processes the kernel kills when they want more."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory").is_dir()
    group = (root / "memory" if v1 else root) / f"pdkv-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


def count_kills_in(group: Path, deck: Deck, proc: Path) -> None:
    """As if the launcher were in this group, as its children are elsewhere."""
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text(f"{'5:memory' if group.parent.name == 'memory' else '0:'}:/{group.name}")
    if num_oom_kills(proc) is None:
        pytest.skip("this kernel does not count its kills")
    deck.supervisor._children.oom_kills = OomWatch(lambda: num_oom_kills(proc))


async def test_an_engine_that_the_kernel_killed_for_want_of_memory_is_named_so(
    deck: Deck, small_cgroup: Path, tmp_path: Path
) -> None:
    """A real kill: a child takes 200 MiB in a cgroup of 64 MiB."""
    async with deck.running():
        count_kills_in(small_cgroup, deck, tmp_path)
        deck.behaviour["decode-0"] = f"eat {small_cgroup}"
        with pytest.raises(StartupError, match="decode-0 died before it was ready: was killed by the kernel"):
            await deck.supervisor.start()


async def test_a_running_engine_that_the_kernel_killed_is_named_so(
    deck: Deck, small_cgroup: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with deck.running():
        count_kills_in(small_cgroup, deck, tmp_path)
        deck.behaviour["decode-0"] = f"serve and eat {small_cgroup}"
        start = asyncio.ensure_future(deck.supervisor.start())
        while await deck.ready.get() != "decode-0":
            pass
        deck.behaviour["decode-0"] = "serve"
        while await deck.ready.get() != "decode-0":
            pass
        await start
    assert "was killed by the kernel because memory ran out" in caplog.text


def test_stop_kills_who_does_not_go(deck: Deck) -> None:
    async def main() -> None:
        async with deck.running():
            await deck.supervisor.start()
            await clock().passing(deck.supervisor.stop())

    deck.behaviour["decode-0"] = "stubborn"
    run(main(), VirtualLoop)
    assert not deck.newest("decode-0").alive


def another(name: str = "decode-2") -> tuple[EngineSpec, EngineAddress]:
    """One more engine."""
    spec = EngineSpec(
        name=name, role="decode", epoch="", config=EngineConfig(), handoff=HandoffConfig(), connector=NO_PLAN, endpoint=f"ipc://{name}",
        num_engines=3,
    )  # fmt: skip
    return spec, EngineAddress(name, "decode", spec.endpoint)


async def test_engines_are_added_and_removed_and_a_restarted_router_is_told_of_those_of_now(deck: Deck) -> None:
    async with deck.running():
        await deck.supervisor.start()
        await deck.supervisor.add_engine(*another())
        assert deck.supervisor.pid_of("decode-2") == deck.newest("decode-2").pid
        os.kill(deck.newest("decode-2").pid, signal.SIGKILL)  # it is kept running like the others
        for _ in range(5):
            name = await deck.ready.get()
        assert name == "decode-2"
        await deck.supervisor.remove_engine("decode-0")
        assert not deck.newest("decode-0").alive
        assert deck.newest("decode-1").alive
        os.kill(deck.newest("router").pid, signal.SIGKILL)
        assert await deck.ready.get() == "router"
        assert [a.name for a in deck.routers[-1].engines] == ["decode-1", "decode-2"] == list(deck.supervisor.engines)
        assert deck.supervisor.pid_of("decode-0") is None


@pytest.mark.parametrize(("behaviour", "error"), [("die", StartupError), ("refuse", ConfigError)])
async def test_of_an_engine_that_cannot_be_added_nothing_is_left(
    deck: Deck, behaviour: str, error: type[Exception]
) -> None:
    async with deck.running():
        await deck.supervisor.start()
        deck.behaviour["decode-2"] = behaviour
        with pytest.raises(error):
            await deck.supervisor.add_engine(*another())
        assert list(deck.supervisor.engines) == ["decode-0", "decode-1"]
        deck.behaviour["decode-2"] = "serve"
        await deck.supervisor.add_engine(*another())
        assert deck.newest("decode-2").alive


async def test_an_engine_that_is_still_starting_can_be_removed(deck: Deck) -> None:
    async with deck.running():
        await deck.supervisor.start()
        deck.behaviour["decode-2"] = "silent"
        adding = asyncio.ensure_future(deck.supervisor.add_engine(*another()))
        while not any(child.name == "decode-2" for child in deck.started):
            await asyncio.sleep(0)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        assert not deck.newest("decode-2").alive
        assert "decode-2" not in deck.supervisor.engines


async def test_a_router_is_not_told_of_an_engine_that_may_never_be_ready(deck: Deck) -> None:
    """Nobody would tell it that there is none, and it would wait for that engine for as long as it lives."""
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        deck.behaviour["decode-2"] = "silent"
        adding = asyncio.ensure_future(deck.supervisor.add_engine(*another()))
        while not any(child.name == "decode-2" for child in deck.started):
            await asyncio.sleep(0)
        os.kill(deck.newest("router").pid, signal.SIGKILL)
        assert await deck.ready.get() == "router"
        os.kill(deck.newest("decode-2").pid, signal.SIGKILL)
        with pytest.raises(StartupError):
            await adding
        assert [a.name for a in deck.routers[-1].engines] == ["decode-0", "decode-1"] == list(deck.supervisor.engines)


async def test_a_restart_that_is_asked_for_is_no_failure_and_takes_all_ranks(
    ranked_deck: Deck, caplog: pytest.LogCaptureFixture
) -> None:
    deck = ranked_deck
    async with deck.running():
        await deck.supervisor.start()
        before = [deck.newest(name) for name in ("decode-1", "decode-1.1")]
        spec = deck.supervisor.engines["decode-1"]
        await asyncio.gather(deck.supervisor.restart_engine(spec), deck.supervisor.restart_engine(spec))
        assert not any(child.alive for child in before)
        assert all(deck.newest(name).alive for name in ("decode-1", "decode-1.1"))
        assert len(deck.started) == 6, "it was asked for twice and done once"
    assert not caplog.records
    assert len(set(deck.epochs)) == 3


async def test_a_restart_that_fails_is_told_and_tried_again(deck: Deck) -> None:
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        deck.behaviour["decode-0"] = "die"
        with pytest.raises(StartupError, match="decode-0 died before it was ready: exited with 3"):
            await deck.supervisor.restart_engine(deck.supervisor.engines["decode-0"])
        deck.behaviour["decode-0"] = "serve"
        assert await deck.ready.get() == "decode-0"
        deck.behaviour["decode-0"] = "die"
        os.kill(deck.newest("decode-0").pid, signal.SIGKILL)
        for _ in range(3):
            await deck.failed.get()
        deck.behaviour["decode-0"] = "serve"
        await deck.supervisor.restart_engine(deck.supervisor.engines["decode-0"])  # it need not wait for the backoff
        assert deck.newest("decode-0").alive


async def test_a_stop_waits_for_the_router_and_keeps_the_engines_for_it(
    deck: Deck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROUTER_GRACE_S", 0.05)
    deck.behaviour["router"] = "stubborn"
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        stop = asyncio.ensure_future(deck.supervisor.stop(drain_s=60.0))
        await asyncio.sleep(0)
        os.kill(deck.newest("decode-0").pid, signal.SIGKILL)
        assert await deck.ready.get() == "decode-0", "requests that are still answered need it"
        assert not stop.done()
        deck.supervisor.hurried.set()
        await stop
        assert not deck.newest("router").alive
        assert [child.name for child in deck.started].count("router") == 1


async def test_stop_in_the_middle_of_a_start(deck: Deck) -> None:
    deck.behaviour["decode-0"] = "silent"
    async with deck.running():
        start = asyncio.ensure_future(deck.supervisor.start())
        await deck.ready.get()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    assert not any(child.alive for child in deck.started)


def test_the_backoff_grows_to_a_bound() -> None:
    assert [backoff_s(n) for n in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert backoff_s(50) == 30.0


async def test_all_ranks_of_an_engine_start_with_one_epoch_and_a_socket_between_them(ranked_deck: Deck) -> None:
    deck = ranked_deck
    async with deck.running():
        await deck.supervisor.start()
        assert {deck.ready.get_nowait() for _ in range(3)} == {"router", "decode-0", "decode-1"}
        assert {child.name for child in deck.started} == {"router", "decode-0", "decode-1", "decode-1.1"}
    assert sorted(deck.rank_fds) == [(0, 0), (0, 2), (1, 2)]
    assert len(set(deck.epochs)) == 2
    assert len(set(deck.stores)) == 1


@pytest.mark.parametrize("victim", ["decode-1", "decode-1.1"])
async def test_with_one_rank_all_ranks_end_and_come_back(ranked_deck: Deck, victim: str) -> None:
    """F5, F24: the other rank waits for nobody, and nothing of the incarnation is left."""
    deck = ranked_deck
    async with deck.running():
        await deck.supervisor.start()
        for _ in range(3):
            deck.ready.get_nowait()
        before = [deck.newest(name) for name in ("decode-1", "decode-1.1")]
        bystanders = [deck.newest(name) for name in ("router", "decode-0")]
        os.kill(deck.newest(victim).pid, signal.SIGKILL)
        assert await deck.ready.get() == "decode-1"
        assert not any(child.alive for child in before)
        assert all(child.alive for child in bystanders)
        assert all(deck.newest(name).alive for name in ("decode-1", "decode-1.1"))
    assert len(set(deck.epochs)) == 3
    assert [store.exists() for store in dict.fromkeys(deck.stores)] == [False, True]


async def test_the_reason_is_that_of_the_rank_that_failed_itself(ranked_deck: Deck, tmp_path: Path) -> None:
    """What missed it may have said so first; the user saw only that."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ranked_deck.behaviour |= {"decode-1": f"fail behind it {fifo}", "decode-1.1": f"miss a rank {fifo}"}
    async with ranked_deck.running():
        with pytest.raises(StartupError, match="decode-1: no room"):
            await ranked_deck.supervisor.start()


@pytest.mark.parametrize("name", ["decode-1", "decode-1.1"])
@pytest.mark.parametrize(("behaviour", "error"), [("die", StartupError), ("refuse", ConfigError)])
async def test_a_rank_that_does_not_start_leaves_none_of_its_engine(
    ranked_deck: Deck, name: str, behaviour: str, error: type[Exception]
) -> None:
    deck = ranked_deck
    deck.behaviour[name] = behaviour
    async with deck.running():
        with pytest.raises(error):
            await deck.supervisor.start()
        assert not any(child.alive for child in deck.started if child.name.startswith("decode-1"))


class _Moving(starter.EngineStarter):
    """Starts engines elsewhere: each time at another address."""

    def __init__(self, deck: Deck, fake_child: FakeChild, children: starter.Children) -> None:
        self._deck, self._fake_child, self._children, self._num_started = deck, fake_child, children, 0

    async def start(self, spec: EngineSpec) -> list[Child]:
        self._num_started += 1
        endpoint = f"tcp://{spec.name}:{self._num_started}"
        child = await self._children.start(spec.name, self._spawn(spec.name))
        child.endpoint = endpoint
        return [child]

    def _spawn(self, name: str) -> Callable[[starter.AckSocket], Awaitable[Child]]:
        async def spawn(ack: starter.AckSocket) -> Child:
            self._deck.started.append(self._fake_child(name, ack.child_fd, "serve"))
            return self._deck.started[-1]

        return spawn

    async def close(self) -> None: ...


async def test_routers_learn_where_engines_are_and_have_moved_to(deck: Deck, fake_child: FakeChild) -> None:
    supervisor = deck.supervisor
    supervisor._make_starter = lambda children: _Moving(deck, fake_child, children)
    moved: asyncio.Queue[EngineAddress] = asyncio.Queue()
    supervisor.on_moved = moved.put
    supervisor.engines = {n: msgspec.structs.replace(e, endpoint="") for n, e in supervisor.engines.items()}
    supervisor._addresses = {n: msgspec.structs.replace(a, endpoint="") for n, a in supervisor._addresses.items()}
    async with deck.running():
        await supervisor.start()
        assert {address.endpoint for address in deck.routers[0].engines} == {"tcp://decode-0:1", "tcp://decode-1:2"}
        os.kill(deck.newest("decode-0").pid, signal.SIGKILL)
        assert (await moved.get()).endpoint == "tcp://decode-0:3"
        os.kill(deck.newest("router").pid, signal.SIGKILL)
        while len(deck.routers) < 2:
            await deck.ready.get()
        assert {address.endpoint for address in deck.routers[1].engines} == {"tcp://decode-0:3", "tcp://decode-1:2"}
