"""Starts the child processes of a launch, and all ranks of an engine at once; none is left of one that fails."""

import asyncio
import functools
import logging
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.errors import ConfigError, DiedEarly, OtherRankGone, StartupError
from pdkv.launch.children import AckSocket, Child, ForkServer, OomWatch, RankLinks, describe_exit, spawn_engine
from pdkv.launch.pre_read import pre_read
from pdkv.launch.specs import EngineSpec

ENGINE_GRACE_S = 1.5
"""Seconds for an engine to end in order."""

_OTHER_RANKS_S = 5.0  # between the failure of a rank and that of another one, which caused it
_LAST_WORD_S = 1.0  # between the end of a child's acknowledgements and its own end

logger = logging.getLogger(__name__)

Report = Callable[[str, str], None]
"""Called with a process's name and what it reports."""


class Children:
    """The running processes of a launch, wherever they run."""

    def __init__(self, start_timeout_s: float, on_progress: Report, on_identity: Report) -> None:
        """`on_identity`: called with the identity of the model that a process loads; an error in it ends the start."""
        self.start_timeout_s = start_timeout_s
        self.on_progress, self.on_identity = on_progress, on_identity
        self.running: set[Child] = set()
        self.oom_kills = OomWatch()

    async def start(self, name: str, spawn: Callable[[AckSocket], Awaitable[Child]]) -> Child:
        """Spawn a child and wait for its ack. One that does not become ready is killed."""
        ack = AckSocket()
        on_progress, on_identity = (functools.partial(tell, name) for tell in (self.on_progress, self.on_identity))
        try:
            child = await spawn(ack)
            self.running.add(child)
            ack.handed_over()
            try:
                await ack.wait_ready(name, self.start_timeout_s, on_progress, on_identity)
            except DiedEarly as error:
                raise StartupError(f"{error}: {await self._end_of(child)}") from None
            except Exception:
                await self.kill([child])
                raise
            return child
        finally:
            ack.close()

    async def _end_of(self, child: Child) -> str:
        """How a child ended that has closed its acknowledgements. One that is still running is killed."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                return self.why(await child.wait())
        except TimeoutError:
            return "it closed its socket but kept running"
        finally:
            await self.kill([child])

    def why(self, status: int) -> str:
        """How a child ended without being told to."""
        return describe_exit(status, out_of_memory=self.oom_kills.explains(status))

    async def kill(self, children: Collection[Child]) -> None:
        """Kill children at once, including those that have ended; returns when they are gone."""
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            await child.wait()
        self.running.difference_update(children)

    async def end(self, children: Collection[Child], grace_s: float = ENGINE_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when all are gone."""
        waits = [asyncio.ensure_future(child.wait()) for child in children if child.alive]
        if waits:
            for child in children:
                child.send_signal(signal.SIGTERM)
            _, late = await asyncio.wait(waits, timeout=grace_s)
            for child in children if late else ():
                if child.alive:
                    logger.warning("%s (pid %d) did not stop within %g s and is killed", child.name, child.pid, grace_s)
                    child.send_signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late)
        self.running.difference_update(children)


class EngineStarter(ABC):
    """Starts a supervisor's engines, each once: when, and how often, is the supervisor's decision."""

    @abstractmethod
    async def start(self, spec: EngineSpec) -> list[Child]:
        """Start all ranks of an engine; returns when each is ready. If one fails, none is left. Raises PdkvError."""

    def renew(self) -> None:
        """Pass this process's current environment to engines that start from now on."""

    async def forget(self, name: str) -> None:
        """Give back what is reserved for an engine that has ended for good."""

    @abstractmethod
    async def close(self) -> None:
        """Start nothing any more."""


class LocalStarter(EngineStarter):
    """Starts engines on this host, as children of this process."""

    def __init__(self, children: Children, lifeline_fd: int, connector_target: str, *, use_fork_server: bool) -> None:
        self._children = children
        self._lifeline_fd = lifeline_fd
        self._connector_target = connector_target
        self._forks = self._new_fork_server() if use_fork_server else None  # its imports take longest: it starts first

    def renew(self) -> None:
        """Have the next engine forked from a new fork server."""
        if self._forks is not None:
            self._forks.close()

    async def close(self) -> None:
        """Close the fork server, which is one of the children to end."""
        self.renew()

    async def start(self, spec: EngineSpec) -> list[Child]:
        """Start all ranks of an engine, as `EngineStarter` says."""
        epoch = secrets.token_hex(8)
        store = _fresh_store(spec.store, epoch) if spec.store is not None else None
        links = RankLinks(spec.config.tp)
        spec = msgspec.structs.replace(spec, epoch=epoch, store=store, asked_at=MONOTONIC.now())
        pre_read(spec.config.model)
        ranks: list[Child] = []

        async def start_rank(rank: int) -> Child:
            own = msgspec.structs.replace(spec, rank=rank)

            async def spawn(ack: AckSocket) -> Child:
                ranks.append(await self._make_engine(own, ack, links.fds(rank)))
                links.handed_over(rank)
                return ranks[-1]

            return await self._children.start(own.process_name, spawn)

        starts = [asyncio.ensure_future(start_rank(rank)) for rank in range(spec.config.tp)]
        try:
            return await asyncio.gather(*starts)
        except Exception as error:
            links.close()  # a rank that is being forked finds no launcher
            if isinstance(error, OtherRankGone):
                error = await _own_failure(starts) or error
            await self._children.kill(ranks)
            failures = await asyncio.gather(*starts, return_exceptions=True)
            await self._children.kill(ranks)
            raise next((e for e in failures if isinstance(e, ConfigError)), error) from None
        finally:
            for start in starts:
                start.cancel()  # a rank is only unfinished if this task itself is cancelled
            links.close()

    def _new_fork_server(self) -> ForkServer:
        forks = ForkServer(self._connector_target, self._lifeline_fd)
        self._children.running.add(forks.child)
        forks.child.when_dead(lambda _: self._children.running.discard(forks.child))
        return forks

    async def _make_engine(self, spec: EngineSpec, ack: AckSocket, rank_fds: Sequence[int]) -> Child:
        """Fork a rank of an engine, from a second fork server if the first is gone; spawn it if that fails, too."""
        for _ in range(2):
            if self._forks is None:
                break
            if not self._forks.usable:
                self._forks = self._new_fork_server()
            try:
                timeout_s = self._children.start_timeout_s
                return await self._forks.fork_engine(spec, ack.child_fd, rank_fds, timeout_s=timeout_s)
            except StartupError as error:
                logger.warning("%s: %s", spec.process_name, error)
                ack.start_over()  # it may have forked but not answered
        if self._forks is not None:
            logger.warning("%s is started without the fork server", spec.process_name)
        return spawn_engine(spec, ack.child_fd, self._lifeline_fd, rank_fds)


async def _own_failure(starts: Sequence["asyncio.Future[Child]"]) -> Exception | None:
    """The failure of the rank that failed first among starting ranks, as far as they report it soon."""
    pending = set(starts)
    deadline = MONOTONIC.now() + _OTHER_RANKS_S
    while pending:
        timeout_s = max(deadline - MONOTONIC.now(), 0.0)
        done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for start in done:
            failure = start.exception()
            if isinstance(failure, Exception) and not isinstance(failure, OtherRankGone):
                return failure
        if not done:
            break
    return None


def _fresh_store(path: Path, epoch: str) -> Path:
    """Where the ranks of one incarnation meet; files of earlier ones are deleted."""
    for old in path.parent.glob(f"{path.name}-*"):
        old.unlink(missing_ok=True)
    return path.with_name(f"{path.name}-{epoch}")
