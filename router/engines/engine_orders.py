"""Operators' orders on their way to engines: which were asked, and which have answered."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from pdkv.errors import EngineDied, TransferTimeout
from pdkv.wire.profiles import Profile, Profiled
from pdkv.wire.tiers import CacheAnswer, CacheOrder

SLACK_S = 1.0
"""Extra seconds before an engine counts as not answering; until then it reports late tiers itself."""

OrderT = TypeVar("OrderT", CacheOrder, Profile)
AnswerT = TypeVar("AnswerT", CacheAnswer, Profiled)


class _Asked(Generic[AnswerT]):
    """An order, and the engines that have it. `failed`: an answer of this code and text on behalf of an engine."""

    def __init__(self, names: Sequence[str], failed: Callable[[str, str], AnswerT]) -> None:
        self.answers: dict[str, AnswerT | None] = dict.fromkeys(names)
        self.failed: Callable[[str, str], AnswerT] = failed
        self.is_over = asyncio.Event()

    def answer(self, name: str, answer: AnswerT) -> None:
        if self.answers.get(name, answer) is None:
            self.answers[name] = answer
            if None not in self.answers.values():
                self.is_over.set()

    def gone(self, name: str) -> None:
        self.answer(name, self.failed(EngineDied.code, "the engine is gone"))


class EngineOrders(Generic[OrderT, AnswerT]):
    """Sends orders to engines and gathers their answers. Lives in the dispatcher's event loop.

    Args:
        send: sends a message to an engine that is ready.
        is_ready: whether an engine is.
        failed: the answer to an order, of this code and text, on behalf of an engine that gives none.
    """

    def __init__(
        self,
        send: Callable[[str, OrderT], None],
        is_ready: Callable[[str], bool],
        failed: Callable[[OrderT, str, str], AnswerT],
    ) -> None:
        self._send: Callable[[str, OrderT], None] = send
        self._failed: Callable[[OrderT, str, str], AnswerT] = failed
        self._is_ready = is_ready
        self._asked: dict[str, _Asked[AnswerT]] = {}

    async def ask(self, names: Sequence[str], order: OrderT) -> dict[str, AnswerT]:
        """The answers of these engines; for an engine that does not answer or is gone, one that says so."""
        order = msgspec.structs.replace(order, order_id=secrets.token_hex(8))
        asked = self._asked[order.order_id] = _Asked(names, partial(self._failed, order))
        try:
            for name in names:
                if self._is_ready(name):
                    self._send(name, order)
                else:
                    asked.gone(name)
            async with asyncio.timeout(order.timeout_s + SLACK_S):
                await asked.is_over.wait()
        except TimeoutError:
            for name in names:
                asked.answer(name, asked.failed(TransferTimeout.code, f"no answer within {order.timeout_s:g} s"))
        finally:
            del self._asked[order.order_id]
        return {name: answer for name, answer in asked.answers.items() if answer is not None}

    def answered(self, name: str, answer: AnswerT) -> bool:
        """Take an engine's answer to an order; False: nothing waits for it."""
        asked = self._asked.get(answer.order_id)
        if asked is not None:
            asked.answer(name, answer)
        return asked is not None

    def engine_down(self, name: str) -> None:
        """Note that an engine will not answer any more."""
        for asked in self._asked.values():
            asked.gone(name)
