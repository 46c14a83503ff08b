"""Operators' orders about caches on their way to engines: which were asked, and which have answered."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec

from pdkv.errors import EngineDied, TransferTimeout
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierAnswer

SLACK_S = 1.0
"""Extra seconds before an engine counts as not answering; until then it reports late tiers itself."""


class _Asked:
    """An order, and the engines that have it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.answers: dict[str, CacheAnswer | None] = dict.fromkeys(names)
        self.is_over = asyncio.Event()

    def answer(self, name: str, answer: CacheAnswer) -> None:
        if self.answers.get(name, answer) is None:
            self.answers[name] = answer
            if None not in self.answers.values():
                self.is_over.set()


class CacheOrders:
    """Sends orders to engines and gathers their answers. Lives in the dispatcher's event loop.

    Args:
        send: sends a message to an engine that is ready.
        is_ready: whether an engine is.
    """

    def __init__(self, send: Callable[[str, CacheOrder], None], is_ready: Callable[[str], bool]) -> None:
        self._send = send
        self._is_ready = is_ready
        self._asked: dict[str, _Asked] = {}

    async def ask(self, names: Sequence[str], order: CacheOrder) -> dict[str, CacheAnswer]:
        """The answers of these engines; for an engine that does not answer or is gone, a TierAnswer without a tier's
        name says why.
        """
        order = msgspec.structs.replace(order, order_id=secrets.token_hex(8))
        asked = self._asked[order.order_id] = _Asked(names)
        try:
            for name in names:
                if self._is_ready(name):
                    self._send(name, order)
                else:
                    asked.answer(name, _gone(order.order_id))
            async with asyncio.timeout(order.timeout_s + SLACK_S):
                await asked.is_over.wait()
        except TimeoutError:
            late = TierAnswer("", code=TransferTimeout.code, problem=f"no answer within {order.timeout_s:g} s")
            for name in names:
                asked.answer(name, CacheAnswer(order.order_id, [late]))
        finally:
            del self._asked[order.order_id]
        return {name: answer for name, answer in asked.answers.items() if answer is not None}

    def answered(self, name: str, answer: CacheAnswer) -> bool:
        """Take an engine's answer to an order; False: nothing waits for it."""
        asked = self._asked.get(answer.order_id)
        if asked is not None:
            asked.answer(name, answer)
        return asked is not None

    def engine_down(self, name: str) -> None:
        """Note that an engine will not answer any more."""
        for order_id, asked in self._asked.items():
            asked.answer(name, _gone(order_id))


def _gone(order_id: str) -> CacheAnswer:
    return CacheAnswer(order_id, [TierAnswer("", code=EngineDied.code, problem="the engine is gone")])
