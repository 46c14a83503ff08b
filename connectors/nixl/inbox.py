"""Receives messages of other agents: each goes to the handler of its kind; the others are counted."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.nixl.agent import Message
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import RankBlob, Wire, decode
from pdkv.errors import MalformedMessage, PdkvError

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Wire)

MAX_EARLY_MESSAGES = 1024
_EARLY_S = 5.0
"""Messages of agents whose card has not arrived are kept: this many, for this long."""


class Inbox:
    """Messages to one rank. Used only by its message thread, once handlers are set."""

    def __init__(self, peers: NixlPeers, clock: Clock = MONOTONIC) -> None:
        self.num_bad_messages = 0  # messages without a decoder or handler, or with one that failed
        self.num_unknown_agents = 0  # messages of agents without a known card
        self._peers = peers
        self._clock = clock
        self._handlers: dict[type, Callable[[RankBlob, Any], None]] = {}
        self._early: deque[tuple[float, Message]] = deque(maxlen=MAX_EARLY_MESSAGES)

    def handle(self, kind: type[M], handler: Callable[[RankBlob, M], None]) -> None:
        """Pass messages of that kind to this handler."""
        self._handlers[kind] = handler

    def clear(self) -> None:
        """Release the handlers."""
        self._handlers.clear()

    def take(self, messages: Iterable[Message]) -> None:
        """Pass on messages, and those that arrived before their sender's card."""
        early, now = list(self._early), self._clock.now()
        self._early.clear()
        for since, message in [*early, *((now, message) for message in messages)]:
            blob = self._peers.agent(message.peer)
            if blob is not None:
                self._dispatch(blob, message.data)
            elif now - since < _EARLY_S:
                self._early.append((since, message))
            else:
                self.num_unknown_agents += 1

    def _dispatch(self, blob: RankBlob, data: bytes) -> None:
        try:
            message = decode(data)
        except MalformedMessage as error:
            self.num_bad_messages += 1
            logger.debug("invalid message of %s: %s", blob.agent, error)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            self.num_bad_messages += 1
            return
        try:
            handler(blob, message)
        except (PdkvError, ValueError) as error:
            self.num_bad_messages += 1
            logger.debug("%s of %s: %s", type(message).__name__, blob.agent, error)
        except Exception:  # whatever the error was, the next message is served
            self.num_bad_messages += 1
            logger.exception("%s of %s", type(message).__name__, blob.agent)
