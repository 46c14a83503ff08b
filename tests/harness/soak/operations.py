"""What an operator does to a deployment under chaos: it may be refused or fail, but never leaves it in disorder."""

import asyncio
from collections.abc import Awaitable, Callable

from deployments import Running

from pdkv.errors import ConfigError, PdkvError, StartupError
from pdkv.launch.control import Restart, Scale, give_order
from pdkv.launch.router_admin import Refused, RouterAdmin
from soak.journal import Journal
from soak.schedule import Event

DRAIN_S = 3.0
"""Requests that take longer go on elsewhere; most end within it."""

_ORDER_S = 90.0
"""An order that takes longer hangs: within it engines are drained, started, and tried again where chaos ended them."""

_LOOK_AGAIN_S = 0.2


class Operator:
    """One operator, who does one thing at a time."""

    def __init__(self, deployment: Running, num_each: int, journal: Journal) -> None:
        """`num_each`: engines of each role at rest, prefill-0 and so on."""
        self._deployment = deployment
        self._num_each = num_each
        self._journal = journal
        self._turn = asyncio.Lock()

    @property
    def _router(self) -> RouterAdmin:
        return RouterAdmin(self._deployment.run_dir)

    async def do(self, event: Event) -> bool:
        """Do it and undo it; False where it was refused or failed, which chaos may make it."""
        async with self._turn:
            try:
                async with asyncio.timeout(_ORDER_S):
                    await _HANDLERS[event.kind](self, event)
            except (ConfigError, StartupError, PdkvError) as error:
                self._journal.note(f"not done: {event}: {error}")
                return False
            except TimeoutError:
                self._journal.violation(f"an operator waited for more than {_ORDER_S:g} s: {event}")
                return False
            return True

    async def restore(self) -> None:
        """As many engines as at first, all in their roles and in service. Nothing is broken now: none may fail."""
        async with self._turn:
            try:
                async with asyncio.timeout(_ORDER_S):
                    await self._restore()
            except (PdkvError, TimeoutError) as error:
                self._journal.violation(f"the engines cannot be given back their roles: {error!r}")

    async def _restore(self) -> None:
        for engine in await self._router.engines():
            await self._give_role(engine["name"], engine["name"].partition("-")[0])
        for engine in await self._router.engines():
            await self._router.resume(engine["name"])
        await self._order(Scale(self._num_each, self._num_each, DRAIN_S))
        present = sorted(engine["name"] for engine in await self._router.engines())
        expected = sorted(f"{role}-{i}" for role in ("prefill", "decode") for i in range(self._num_each))
        if present != expected:
            self._journal.violation(f"there are {present} instead of {expected}")

    async def _give_role(self, name: str, role: str) -> None:
        """As soon as somebody else can do what the engine does now: whoever was killed last may still be starting."""
        while True:
            try:
                await self._router.set_role(name, role)
                return
            except Refused:
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _order(self, order: Scale | Restart) -> None:
        text = await give_order(self._deployment.run_dir, order, lambda text: self._journal.note(f"{order}: {text}"))
        self._journal.note(f"{order}: {text}")

    async def _drain(self, event: Event) -> None:
        await self._router.drain(event.target, event.seconds)
        await asyncio.sleep(event.seconds)
        await self._router.resume(event.target)

    async def _flip(self, event: Event) -> None:
        role = event.target.partition("-")[0]
        await self._router.set_role(event.target, "decode" if role == "prefill" else "prefill")
        await asyncio.sleep(event.seconds)
        await self._router.set_role(event.target, role)

    async def _scale(self, event: Event) -> None:
        for count in (self._num_each + 1, self._num_each):
            prefill, decode = (count if event.target == role else None for role in ("prefill", "decode"))
            await self._order(Scale(prefill, decode, DRAIN_S))
            await asyncio.sleep(event.seconds)

    async def _restart(self, event: Event) -> None:
        await self._order(Restart(DRAIN_S))


_HANDLERS: dict[str, Callable[[Operator, Event], Awaitable[None]]] = {
    "drain engine": Operator._drain,
    "flip engine": Operator._flip,
    "scale role": Operator._scale,
    "restart engines": Operator._restart,
}
