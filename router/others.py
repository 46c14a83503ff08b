"""Runs the sources of engines that a launch does not start, for the life of a router (docs/membership.md)."""

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import AsyncIterator

import zmq

from pdkv.base.limits import MAX_WAIT_S
from pdkv.router.engines.engine_client import EngineClient
from pdkv.router.engines.sources import watch_dns, watch_file
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.join_door import JoinDoor
from pdkv.router.generations.membership import Door, Membership
from pdkv.router.generations.operations import Operations
from pdkv.router.spec import RouterSpec
from pdkv.wire.cluster_key import ClusterKey

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def taking_others(
    spec: RouterSpec,
    dispatcher: Dispatcher,
    operations: Operations,
    key: ClusterKey,
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> AsyncIterator[None]:
    """Take engines in and let them go until the end of the block. They wait until the launch's own are all ready: these
    decide which model is served. Raises StartupError if the router cannot listen.
    """

    def connect(endpoint: str, door: Door) -> EngineClient:
        own = hashlib.blake2b(endpoint.encode(), digest_size=6).hexdigest()  # so that no other connection there ends
        return EngineClient(
            endpoint, endpoint, router_id=f"{spec.router_id}-{own}", context=context, key=key, door=door
        )

    members = Membership(dispatcher, operations, connect, spec.drain_s)
    door = JoinDoor(spec.join_listen, key, members, context) if spec.join_listen is not None else None

    async def watch() -> None:
        while not await dispatcher.changes.wait_for(lambda: dispatcher.fleet.complete_once, MAX_WAIT_S):
            pass
        if door is not None:
            door.start()
        file = [watch_file(path, functools.partial(members.propose, "file"))] if (path := spec.engines_file) else []
        names = [watch_dns(n, functools.partial(members.propose, f"dns:{n}")) for n in spec.engines_dns]
        await asyncio.gather(*file, *names)

    task = asyncio.create_task(watch())
    task.add_done_callback(_report)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if door is not None:
            door.close()
        members.close()


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("no engine is taken in any more: a defect", exc_info=error)
