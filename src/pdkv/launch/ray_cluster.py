"""Engines on the nodes of a Ray cluster. Ray places them; the launch's supervisor alone starts and ends them."""

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pdkv.base.clock import MONOTONIC
from pdkv.config import EngineConfig, TiersConfig
from pdkv.errors import ConfigError, PdkvError, StartupError
from pdkv.launch.children import Child, heed
from pdkv.launch.logs import LineHandler
from pdkv.launch.ray_actor import EngineActor, Exited, LogLines, Order, decode_event
from pdkv.launch.specs import EngineSpec, Started, encode
from pdkv.launch.starter import Children, EngineStarter

CONNECT_S = 20.0
"""Seconds for a cluster to answer."""

_SHUTDOWN_S = 5.0
_SHORTAGE_S = 5.0  # without a place for an engine, before the log says why
_GONE_S = 3.0  # for Ray to say that an actor is gone after it was killed; it may never say so of a lost node's

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def connect(address: str) -> None:
    """Connect this process to a Ray cluster. Raises ConfigError: Ray is not installed, or no cluster answers."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--cluster ray needs the package ray: pip install 'pdkv[ray]'") from None

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of leaving this process's signals alone

    def init() -> None:
        import ray._private.worker as driver

        driver.print_to_stdstream = _log_event  # it would write into stdout, which only has the ready line
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=secrets.token_hex(8))

    try:
        await _within(CONNECT_S, init)
    except TimeoutError:
        raise ConfigError(f"address: no Ray cluster answered at {address} within {CONNECT_S:g} s") from None
    except Exception as error:  # ConnectionError, ValueError, RuntimeError
        raise ConfigError(f"address: cannot join a Ray cluster at {address}: {_last_line(error)}") from None


class RayStarter(EngineStarter):
    """Starts each engine in an actor of its own, in a placement group that stays reserved for the engine's name. Its
    environment is that of its node.
    """

    def __init__(self, children: Children, tiers: TiersConfig, key: str) -> None:
        """`key`: the cluster's secret, which engines get with their orders."""
        self._children = children
        self._tiers = tiers
        self._key = key
        self._groups: dict[str, Any] = {}

    async def start(self, spec: EngineSpec) -> list[Child]:
        """Start an engine, as `EngineStarter` says. ConfigError: no node has had room for it within the time."""
        timeout_s = self._children.start_timeout_s
        try:
            actor, stream = await _within(timeout_s, lambda: self._make_actor(spec))
        except TimeoutError:
            raise StartupError(f"{spec.name}: Ray did not answer within {timeout_s:g} s") from None
        except Exception as error:
            raise StartupError(f"{spec.name}: {_last_line(error)}") from error
        child = RayChild(spec.name, actor)
        self._children.running.add(child)
        child.follow(stream, self._children)
        shortage = asyncio.create_task(self._tell_shortage(spec))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(child.ready)
            return [child]
        except TimeoutError:
            raise await self._why_late(spec) from None
        finally:
            shortage.cancel()
            if not child.ready.done() or child.ready.exception() is not None:
                await self._children.kill([child])

    def _make_actor(self, spec: EngineSpec) -> tuple[Any, AsyncIterator[Awaitable[bytes]]]:
        """An actor, which Ray starts as soon as the engine's group has a place, and its events' stream. Blocks."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = resources(spec.config)
        if spec.name not in self._groups:
            self._groups[spec.name] = placement_group([needs], strategy="SPREAD")
        place = PlacementGroupSchedulingStrategy(self._groups[spec.name], 0)
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(EngineActor).options(**options, scheduling_strategy=place).remote()
        order = encode(Order(spec, self._tiers, self._key))
        return actor, actor.run.options(num_returns="streaming").remote(order)

    async def forget(self, name: str) -> None:
        """Give an engine's resources back to Ray."""
        from ray.util.placement_group import remove_placement_group

        if (group := self._groups.pop(name, None)) is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, and the group with it
                await _within(_SHUTDOWN_S, lambda: remove_placement_group(group))

    async def close(self) -> None:
        """Leave the cluster, which ends what is left of this launch there."""
        import ray

        with contextlib.suppress(TimeoutError):
            await _within(_SHUTDOWN_S, ray.shutdown)

    async def _tell_shortage(self, spec: EngineSpec) -> None:
        await MONOTONIC.pause(_SHORTAGE_S)
        if (shortage := await self._shortage(spec)) is not None:
            logger.warning("%s", shortage)

    async def _why_late(self, spec: EngineSpec) -> PdkvError:
        timeout_s = self._children.start_timeout_s
        shortage = await self._shortage(spec)
        if shortage is not None:
            return ConfigError(f"{shortage} after {timeout_s:g} s")
        return StartupError(f"{spec.name} was not ready after {timeout_s:g} s")

    async def _shortage(self, spec: EngineSpec) -> str | None:
        """What the engine asks for and the nodes have; None: it has its place."""
        import ray
        from ray.util import placement_group_table

        def look() -> tuple[str, list[dict[str, Any]], dict[str, float]]:
            state = placement_group_table(self._groups[spec.name])["state"]
            return state, [node["Resources"] for node in ray.nodes() if node["Alive"]], ray.available_resources()

        try:
            state, nodes, free = await _within(_SHUTDOWN_S, look)
        except Exception as error:
            return f"{spec.name}: Ray does not say why it has no place: {_last_line(error)}"
        if state == "CREATED":
            return None
        have = "; ".join(_amounts(node) for node in nodes)
        return (
            f"{spec.name} asks Ray for a node with {_amounts(resources(spec.config))} free (--threads, --tp), and "
            f"there is none: the nodes have {have}; {_amounts(free)} of all that are free"
        )


def resources(config: EngineConfig) -> dict[str, float]:
    """What an engine asks of one node: a CPU for each thread, and a GPU for each rank that computes on CUDA."""
    needs = {"CPU": float((config.threads or 1) * config.tp)}
    return needs if config.in_host_memory else {**needs, "GPU": float(config.tp)}


class RayChild(Child):
    """An engine in an actor."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name, 0)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._actor = actor

    def follow(self, stream: AsyncIterator[Awaitable[bytes]], children: Children) -> None:
        """Take in the actor's events until its end, which is the engine's."""
        self._events = asyncio.create_task(self._follow(stream, children))

    async def _follow(self, stream: AsyncIterator[Awaitable[bytes]], children: Children) -> None:
        status = -int(signal.SIGKILL)
        error: PdkvError = StartupError(f"{self.name} died before it was ready")
        lines = LineHandler(2)
        try:
            async for item in stream:
                match decode_event(await item):
                    case LogLines(text=text):
                        lines.write(text)
                    case Exited(status=status):
                        break
                    case Started(pid=pid, endpoint=endpoint):
                        self.pid, self.endpoint = pid, endpoint
                        self._settle(None)
                    case ack:
                        heed(
                            ack, self.name,
                            lambda text: children.on_progress(self.name, text),
                            lambda model: children.on_identity(self.name, model),
                        )  # fmt: skip
        except PdkvError as failure:
            error = failure
        except Exception as failure:  # of Ray: the actor or its node is gone, or the node has no pdkv
            error = StartupError(f"{self.name}: {_last_line(failure)}")
            if self.ready.done():
                logger.warning("%s", error)
        self._settle(error)
        self.send_signal(signal.SIGKILL)
        self._end(status)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank. SIGKILL is for the actor, with which they end."""
        import ray

        if not self.alive:
            return
        if number == signal.SIGKILL:
            ray.kill(self._actor)
            wait_s = _GONE_S if self.pid else 0.0  # before it is ready, it may still wait for its place
            asyncio.get_running_loop().call_later(wait_s, self._end, -int(number))
        else:
            self._actor.signal.remote(int(number))

    def _settle(self, error: PdkvError | None) -> None:
        if not self.ready.done():
            if error is None:
                self.ready.set_result(None)
                return
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved: a start that was cancelled has no waiter

    def _end(self, status: int) -> None:
        if self.alive:
            self._died.set_result(status)


def _amounts(amounts: dict[str, float]) -> str:
    """Resources in words, such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name == "CPU" or name in amounts)


def _log_event(data: dict[str, Any], **_: object) -> None:
    """Log what Ray says about the cluster to its drivers; further lines are dumps of its state."""
    logger.warning("Ray: %s", "".join(data["lines"]).partition("\n")[0])


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


async def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of a call that blocks. Raises its error, or TimeoutError, and leaves it behind then."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, name="ray-call", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(result)
