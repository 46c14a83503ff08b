"""One running generation, as the HTTP front end reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from pdkv.router.engines.books import Entry, expected_output, kv_tokens
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.failure_record import FailureRecord
from pdkv.router.generations.flow import RequestFlow, Sends
from pdkv.router.generations.timeline import Timeline
from pdkv.router.request import Delta
from pdkv.router.routing.decision import Choice
from pdkv.router.routing.holdings import PromptKV
from pdkv.wire.reports import SourceCounts

MAX_CHOICES = 16
"""The latest choices of engines that are kept for one generation: its engines may die again and again."""


class Generation:
    """One running generation: an asynchronous iterator of deltas, for one reader."""

    def __init__(self, flow: RequestFlow, on_end: Callable[["Generation", Sends], None], began: float = 0.0) -> None:
        """`on_end` gets the messages to send when the reader ends it; `began`: now, by the dispatcher's clock."""
        self.flow = flow
        self.timeline = Timeline(began)
        self.entries: list[Entry] = []  # its entries in the books of the engines that it runs on
        self.num_expected = expected_output(flow.request.params.max_tokens)  # output tokens for which room is kept
        self.num_uncached = 0  # prompt tokens that this attempt computes
        self.reachable = (0, 0)  # of `PromptKV`, at its first choice of engines
        self.choices: list[Choice] | None = None  # why its engines were chosen; None: not asked for
        self.stays = ""  # of `PromptKV`
        self.is_in_room = False  # it counts in the `Capacity`
        self.hindsight: dict[str, Any] | None = None  # once it has ended, what the best choice would have been
        self.has_lossy_store = False  # one of its engines keeps KV in a lossy codec
        self.prompt_run_in = -1  # the latest attempt in which the prompt was run
        self.loan_asked_at = began  # of the last lender asked
        self.asked_at = began  # when an engine was last given a part of it
        self.last_token_at = began
        self.asked_work = 0  # prompt tokens that this engine then had to compute to the end of its prompt
        self.timer: asyncio.TimerHandle | None = None
        self.failures: FailureRecord | None = None  # its failures so far
        self.on_wake: Callable[[], None] | None = None
        """Called, instead of waking a reader, when there is something to take."""
        self._on_end = on_end
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = True
        self._pauses = False  # there is more, for another turn of the event loop
        self._arrivals: list[float] = []

    @property
    def request_id(self) -> str:
        """The router's own id."""
        return self.flow.request_id

    @property
    def choice(self) -> int:
        """Index among the choices of its prompt."""
        return self.flow.request.choice

    @property
    def prefill_engine(self) -> str:
        """Name of the engine that runs the prompt."""
        flow = self.flow
        return flow.prompt_engine or (flow.route.decode if flow.declined else flow.route.prefill)

    @property
    def decode_engine(self) -> str:
        """Name of the engine that runs the rest; empty until one is chosen."""
        return self.flow.route.decode or (self.prefill_engine if self.flow.ended else "")

    @property
    def sources(self) -> SourceCounts:
        """Prompt tokens by source on the side that ran the prompt; all zero before the first token."""
        return self.flow.sources or SourceCounts()

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to take, now or later."""
        return self.flow.ended and not self._has_news

    @property
    def num_attempts(self) -> int:
        """How often the generation was given to engines, including the first time."""
        return self.flow.attempt + 1

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        sources = self.sources
        return sources.local_hit + sources.store + sources.remote

    @property
    def guesses(self) -> tuple[int, int]:
        """Right and wrong guesses at its tokens, by engines that it has ended on."""
        return self.flow.guesses

    @property
    def num_lossy_tokens(self) -> int | None:
        """Prompt tokens whose KV may have gone through a lossy codec; None: none of its engines has one.

        All of them if another engine decodes, since they may have been handed over through the store.
        """
        if not self.has_lossy_store:
            return None
        if self.prefill_engine == self.decode_engine:
            return self.num_cached_tokens
        return len(self.flow.request.prompt_token_ids)

    @property
    def expires_at(self) -> float:
        """When its time is up unless a token comes first, by the dispatcher's clock."""
        return min(self.flow.deadline, self.last_token_at + self.flow.request.stall_timeout_s)

    def is_overdue(self, now: float, least_s: float) -> bool:
        """Whether the engine asked last has sent nothing for this long, and for five usual gaps."""
        first, num_gaps = self.timeline.first_token, len(self.flow.output_token_ids) - 1
        gap_s = (self.last_token_at - first) / num_gaps if first is not None and num_gaps > 0 else 0.0
        return now - max(self.last_token_at, self.asked_at) >= max(least_s, 5 * gap_s)

    def asked(self, engine: EngineState, now: float) -> None:
        """Note that it is this engine's turn from now on."""
        self.asked_at, self.asked_work = now, engine.tokens_left(now) + self.num_uncached

    def chose(self, prompt: PromptKV, num_uncached: int | None = None) -> None:
        """Note what was known when engines were chosen. `num_uncached`: tokens that the prompt's engine computes."""
        if num_uncached is not None:
            self.num_uncached, self.stays = num_uncached, prompt.stays
            self.reachable = self.reachable if self.flow.attempt else prompt.reachable
        if prompt.choices is not None:
            self.choices = [*(self.choices or ()), *prompt.choices][-MAX_CHOICES:]

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that it is expected to need in the end."""
        request = self.flow.request
        return kv_tokens(request) - expected_output(request.params.max_tokens) + self.num_expected

    def expect_more(self) -> int:
        """Expect twice the output, since all that was expected has come; returns how many tokens more these are."""
        most = self.flow.request.params.max_tokens
        more = self.num_expected if most is None else max(min(self.num_expected, most - self.num_expected), 0)
        self.num_expected += more
        return more

    def enter(self, fleet: Fleet) -> None:
        """Enter the generation in the books of the engines that it runs on, and of no others."""
        flow = self.flow
        for entry in self.entries:
            entry.strike()
        self.entries = []
        uncached = 0 if self.prompt_run_in == flow.attempt else self.num_uncached
        for name in flow.engines_in_use:
            if fleet.is_ready(name):
                kv = self.kv_tokens if name == flow.route.decode else 0
                engine = fleet.engines[name]
                self.has_lossy_store |= engine.card is not None and bool(engine.card.layout.codec)
                entry = Entry(engine.books, uncached, kv)
                entry.enter()
                self.entries.append(entry)
            uncached = 0  # the first of them runs the prompt

    def abort(self) -> None:
        """Give the generation up on all engines. Idempotent, and harmless after the end."""
        if not self.flow.ended:
            self._on_end(self, self.flow.abort())

    def finish(self, num_tokens: int = 0) -> None:
        """End the generation because the reader has everything: the engines stop, and their work counts as successful.
        Idempotent, as `abort`. `num_tokens`: what the reader shows, for generations of another process.
        """
        if not self.flow.ended:
            self._on_end(self, self.flow.finish())

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta, with everything since the last one, up to what a delta may hold.

        Raises:
            RequestFailed: and its subclasses; also InvalidRequest where an engine refuses the request.
        """
        while (delta := self.take()) is None:
            if self.ended:
                raise StopAsyncIteration
            await self.news()
        return delta

    def take(self) -> Delta | None:
        """Everything since the last delta; None: nothing for now, or ever if it has `ended`.

        Raises:
            RequestFailed, InvalidRequest: as when iterating.
        """
        if self._pauses:
            return None
        if self._has_news:
            self._has_news = False
            delta = self.flow.take_delta()
            if delta is not None:
                if self.flow.output.piles_up:
                    # between the parts of a long pile, other tasks have their turn
                    self._has_news = True
                    self._pauses = self.on_wake is None
                    if self.on_wake is not None:
                        self.on_wake()
                return delta
        if self.flow.failure is not None:
            raise self.flow.failure
        return None

    def news(self) -> "asyncio.Future[None]":
        """Return when there may be something to take; for one reader, which has just found nothing."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if self._pauses:
            self._pauses = False
            loop.call_soon(self.wake)
        return waiter

    def arrived(self, now: float) -> None:
        """Note that tokens have come from an engine."""
        self._arrivals.append(now)
        self.last_token_at = now

    def take_arrivals(self) -> list[float]:
        """The arrival times of tokens since the last call; they do not depend on when the reader takes the tokens."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def wake(self) -> None:
        """Wake the reader: there is something new."""
        self._has_news = True
        if self.on_wake is not None:
            self.on_wake()
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
