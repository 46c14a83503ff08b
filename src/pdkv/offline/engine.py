"""One engine in this process, with the loop around it."""

import logging
import os
import queue
import secrets
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdkv.assemble.engine import build_engine
from pdkv.base.clock import MONOTONIC
from pdkv.base.options import from_fields
from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import check_connector
from pdkv.engine.outside.cache_orders import POOL
from pdkv.engine.step_loop import make_step_loop
from pdkv.errors import ConfigError, EngineUnavailable
from pdkv.models.hub import with_local_model
from pdkv.offline.interrupts import HeldInterrupts
from pdkv.wire.messages import EngineToRouter, RouterToEngine
from pdkv.wire.tiers import CacheOrder

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 60.0
"""Seconds that `settle` waits for saves, far more than a store's own deadlines, in case a store keeps none."""

_ROUTER_ID = "local"

FORGET = CacheOrder(order_id="reset_prefix_cache", action="clear", tier=POOL)
"""Drop the cached blocks that no request uses."""


class LocalEngine:
    """One thread uses it, except for `wake`. Its own threads end with it. An error in `send` or `step` leaves a step
    unfinished: the engine is then lost, and every later call raises EngineUnavailable.
    """

    def __init__(self, config: EngineConfig, handoff: HandoffConfig | None, connector: ConnectorPlan | None) -> None:
        """Load the model.

        Raises:
            ConfigError: a wrong value, model directory or connector option.
        """
        self._news = news = queue.SimpleQueue[bool]()  # one per call of `wake`; True: from the connector
        epoch = secrets.token_hex(8)
        self.core = build_engine(
            config, handoff, connector, name=f"llm-{epoch}", epoch=epoch, notify=lambda: news.put(True)
        )
        self.core.router_joined(_ROUTER_ID, self.core.card.epoch)
        self._steps = make_step_loop(
            self.core, config.max_steps_ahead, lambda: news.put(False), config.least_step_ahead_s
        )
        self._pid = os.getpid()
        self._lost = ""  # why it cannot be used any more
        self.interrupts = HeldInterrupts(lambda: news.put(False))
        """To be entered around calls in the main thread; `step` delivers interrupts before it begins."""
        self._end_steps = weakref.finalize(self, self._steps.close)  # a thread would keep all memory

    def wake(self) -> None:
        """End the wait of a waiting `step`. Any thread, and a finalizer, may call it."""
        self._news.put(False)

    def send(self, message: RouterToEngine) -> None:
        """Send a message to the engine; one that it cannot handle comes back as a Failed. Raises what a rank raised."""
        with self._while_usable():
            self.core.handle_guarded(_ROUTER_ID, message, MONOTONIC.now())

    def step(self) -> list[EngineToRouter]:
        """Wait for something to do, and do it. Returns the engine's messages; raises an error that makes it
        unusable.
        """
        self.interrupts.deliver()
        with self._while_usable():
            if self._wait():
                self._steps.wake()
            self._steps.turn()
            return [message for _, messages in self.core.take_messages(MONOTONIC.now()) for message in messages]

    @contextmanager
    def _while_usable(self) -> Iterator[None]:
        lost = self._lost if os.getpid() == self._pid else "the engine belongs to the parent process of this fork"
        if lost:
            raise EngineUnavailable(lost)
        try:
            yield
        except BaseException as error:
            self._lost = f"the engine failed: {type(error).__name__}: {error}"
            raise

    def _wait(self) -> bool:
        """Wait; returns whether the connector had news."""
        wait_s, longest_s = self._steps.wait_s(), self.interrupts.longest_wait_s
        has_news = False
        try:
            if wait_s != 0.0:
                has_news = self._news.get(timeout=longest_s if wait_s is None else min(wait_s, longest_s))
            while True:
                has_news |= self._news.get_nowait()
        except queue.Empty:
            return has_news

    def settle(self) -> None:
        """Wait for saves, at most SAVE_TIMEOUT_S. Only while no request is in flight."""
        deadline = MONOTONIC.now() + SAVE_TIMEOUT_S
        while self.core.has_work or not (self.core.external.is_idle and self._steps.is_idle):
            if MONOTONIC.now() >= deadline:
                logger.warning("the connector's saves have not ended within %g s", SAVE_TIMEOUT_S)
                return
            self.step()

    def close(self) -> None:
        """Stop the engine and release its memory. Idempotent."""
        self._lost = self._lost or "the engine was closed"
        self._end_steps()
        self.core.shutdown()


def read_config(
    owner: str,
    model: str | Path = DEFAULT_MODEL,
    connector: str | None = None,
    connector_config: Mapping[str, str] | None = None,
    *,
    seed: int | None = None,
    tokenizer: str | Path | None = None,
    **fields: Any,
) -> tuple[EngineConfig, HandoffConfig | None, ConnectorPlan | None, int | None]:
    """The input of an LLMEngine from the arguments of `LLM` or `AsyncLLM`, named in errors.

    Raises:
        ConfigError: a wrong field, or a connector that cannot serve a single engine.
    """
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"{owner}: seed: a whole number was expected, got {seed!r}")
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"{owner}: model: a directory or a name on the hub was expected, got {model!r}")
    same_tokenizer = tokenizer is not None and Path(str(tokenizer)) == Path(model)
    given = {"model": Path(model), "tokenizer": None if same_tokenizer else tokenizer, **fields}
    config = with_local_model(from_fields(EngineConfig, given, owner=owner))
    return config, *_plan_connector(connector, connector_config), seed


def _plan_connector(
    connector: str | None, options: Mapping[str, str] | None
) -> tuple[HandoffConfig | None, ConnectorPlan | None]:
    """The configuration of an engine's connector; None and None: there is none.

    Raises:
        ConfigError: an unknown connector, or one that needs a router to connect two engines.
    """
    if connector is None:
        if options:
            raise ConfigError(
                f"connector_config={dict(options)} requires a connector, such as connector='shared_storage'"
            )
        return None, None
    given = dict(options) if isinstance(options, Mapping) else options
    handoff = HandoffConfig(connector=connector, connector_config=given or {})
    plan = check_connector(connector, handoff.connector_config)
    if not plan.content_addressed:
        raise ConfigError(
            f"connector {connector!r} carries KV between two engines that a router brings together (`pd launch`); "
            "an LLM needs one that finds KV by its content, such as 'shared_storage' or 'store'"
        )
    return handoff, plan
