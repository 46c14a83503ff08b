"""Queues the input from routers in order; a separate thread hashes long prompts before the engine sees them.

A prompt of 131k tokens has 8,192 block keys. Everything behind a long prompt waits with it: an Abort never overtakes
its Submit, and a router leaves only after its requests have arrived.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from pdkv.base.block_keys import root_key
from pdkv.base.service_thread import ServiceThread
from pdkv.kernels.block_keys import as_tokens, keys_behind
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Submit

logger = logging.getLogger(__name__)

MIN_TOKENS = 4096
"""Shorter prompts are hashed at once, which takes less time than passing them to the thread and back."""


class Prepared(NamedTuple):
    """The block keys of a Submit's prompt and output, and the range of these tokens and of those expected."""

    root: bytes  # parent of the first key
    keys: list[bytes]  # one per full hash block
    lowest: int  # token id
    highest: int


class Arrival(NamedTuple):
    """One message or event of a router."""

    router_id: str
    message: Any
    prepared: Prepared | None = None  # None: not hashed yet


def root_of(card: EngineCard, submit: Submit) -> bytes:
    """The parent of a request's first block key."""
    layout = card.layout.identity
    return root_key(model=card.model, layout=layout, adapter=submit.adapter, cache_salt=submit.cache_salt)


def prepare(card: EngineCard, submit: Submit) -> Prepared:
    """Read all tokens of a Submit once. Raises OverflowError for a token that does not fit into int32."""
    num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
    tokens = as_tokens([*submit.prompt_token_ids, *submit.output_token_ids, *submit.prediction_token_ids])
    root = root_of(card, submit)
    keys = keys_behind(root, tokens[:num_tokens], hash_block_size=card.hash_block_size)
    return Prepared(root, keys, int(tokens.min()), int(tokens.max()))


class Intake:
    """A queue with a thread behind it. `put`, `take` and `close` are called on the step thread.

    Args:
        prepare: called by the thread for a long Submit.
        notify: called by the thread when `take` has something.
    """

    def __init__(self, prepare: Callable[[Submit], Prepared], notify: Callable[[], None]) -> None:
        self._prepare = prepare
        self._notify = notify
        self._arrivals: deque[Arrival] = deque()  # everything before them is ready
        self._under_way = 0
        self._todo: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._thread = ServiceThread(self._run, lambda: self._todo.put(None), "intake")

    @property
    def is_empty(self) -> bool:
        """Whether `take` has returned everything that was put in."""
        return not (self._under_way or self._arrivals)

    def put(self, router_id: str, message: object) -> None:
        """Queue a message or an event."""
        arrival = Arrival(router_id, message)
        if not self._under_way and not _is_long(message):
            self._arrivals.append(arrival)
            return
        self._thread.start()
        self._under_way += 1
        self._todo.put(arrival)

    def take(self) -> list[Arrival]:
        """The items that are ready, in order. Never blocks."""
        taken = list(self._arrivals)
        self._arrivals.clear()
        while self._under_way:
            try:
                taken.append(self._done.get_nowait())
            except queue.Empty:
                break
            self._under_way -= 1
        return taken

    def close(self) -> None:
        """End the thread; unfinished items are dropped. Idempotent."""
        self._thread.stop()

    def _run(self, stopping: threading.Event) -> None:
        while (arrival := self._todo.get()) is not None:
            if _is_long(arrival.message):
                try:
                    arrival = arrival._replace(prepared=self._prepare(arrival.message))
                except Exception:  # the engine meets the same error, and answers with it
                    logger.debug("a prompt cannot be hashed in advance", exc_info=True)
            self._done.put(arrival)
            self._notify()


def _is_long(message: object) -> bool:
    if not isinstance(message, Submit):
        return False
    parts = message.prompt_token_ids, message.output_token_ids, message.prediction_token_ids
    return sum(map(len, parts)) >= MIN_TOKENS
