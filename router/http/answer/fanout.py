"""All choices of one request as one stream of deltas, from as many generations."""

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pdkv.base.clock import MONOTONIC
from pdkv.errors import RequestAborted, RequestFailed
from pdkv.router.admission.desk import Stay
from pdkv.router.http.answer.choice import Choice, ChoiceDelta, TokenCounts
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.read.text_pool import TextPool
from pdkv.router.http.server.deadline import Deadline
from pdkv.router.metrics.requests import RequestMetrics
from pdkv.router.request import Delta
from pdkv.wire.reports import SourceCounts

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

_STARTS_IN_A_ROW = 16

STALL_S = 0.05
"""Seconds after which waiting tokens count as delayed by a client that does not read, and not by the engines."""


class Fanout:
    """Runs all choices of a request. The first choice of each prompt starts first, the others after its first delta,
    when the prompt's blocks are hits.

    `abort` may be called at any time; the caller of `begin` must call it in the end, whatever happened.
    """

    def __init__(
        self,
        job: Job,
        model: ServedModel,
        visit: Stay,
        metrics: RequestMetrics,
        *,
        deadline: Deadline,
        serial: str,
        label: str,
        traceparent: str = "",
        pool: TextPool,
    ) -> None:
        """`label`, `traceparent`: the request's names in all processes' logs; `serial`: the random one, from which
        seeds are drawn that its client left open. `pool` runs long computations.
        """
        self.job = job
        self.choices = list(_make_choices(job, model, serial))
        self._visit = visit
        self._metrics = metrics
        self._deadline = deadline
        self._label = label
        self._traceparent = traceparent
        self._pool = pool
        self.generations: dict[int, Generation] = {}  # those that have begun, by choice index
        self.aborted = False  # whether `abort` was called
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unfinished = len(self.choices)
        self._alone: Generation | None = None  # of the only choice
        self._held: Delta | None = None  # of the only choice, until its prompt's echo is made
        self._arrived: list[ChoiceDelta | Exception] = []  # of several choices
        self._waiter: asyncio.Future[None] | None = None

    @property
    def engines(self) -> tuple[str, str]:
        """Names of the prefill and decode engine of the first choice; known with the first delta."""
        generation = self.generations.get(0)
        return (generation.prefill_engine, generation.decode_engine) if generation is not None else ("", "")

    @property
    def stays(self) -> str:
        """How the first choice stays on one engine by cost: "local", "kept" or not (""); or why another deployment runs
        it: "overflow", "disaster" or "hand".
        """
        return next((generation.stays for generation in self.generations.values()), "")

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; each prompt counts once, whatever n is."""
        return sum(len(prompt.token_ids) for prompt in self.job.prompts)

    @property
    def num_given_tokens(self) -> int:
        """Tokens that engines were given: of each prompt once, and of the prediction once for each choice."""
        job, begun = self.job, self.generations
        num_prompt = sum(len(job.prompts[index // job.n].token_ids) for index in begun if index % job.n == 0)
        return num_prompt + len(begun) * len(job.prediction_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first choice of each prompt did not have to compute."""
        return sum(g.num_cached_tokens for index, g in self.generations.items() if index % self.job.n == 0)

    @property
    def num_lossy_tokens(self) -> int | None:
        """Prompt tokens of the first choices whose KV a codec may have changed; None: none of their engines has one."""
        firsts = [g.num_lossy_tokens for index, g in self.generations.items() if index % self.job.n == 0]
        known = [num_tokens for num_tokens in firsts if num_tokens is not None]
        return sum(known) if known else None

    @property
    def sources(self) -> SourceCounts:
        """Prompt tokens by source, of the first choice of each prompt; all zero before its first token."""
        firsts = [g.sources for index, g in self.generations.items() if index % self.job.n == 0]
        if len(firsts) == 1:
            return firsts[0]
        return SourceCounts(*(sum(getattr(s, name) for s in firsts) for name in SourceCounts.__struct_fields__))

    @property
    def num_attempts(self) -> int:
        """The most attempts that one choice took; 0: none has begun."""
        return max((g.num_attempts for g in self.generations.values()), default=0)

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens over all choices; None: reasoning is not separated from answers."""
        if self.job.answer is None or self.job.answer.reasoning_parser is None:
            return None
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def guesses(self) -> tuple[int, int]:
        """Right and wrong guesses that engines verified, over all choices that they have ended."""
        each = [g.guesses for g in self.generations.values()]
        return sum(right for right, _ in each), sum(wrong for _, wrong in each)

    @property
    def counts(self) -> TokenCounts:
        """The token counts of the reply's usage."""
        return TokenCounts(
            self.num_prompt_tokens,
            self.num_completion_tokens,
            self.num_cached_tokens,
            self.num_reasoning_tokens,
            self.num_lossy_tokens,
            self.guesses if any(self.guesses) or self.job.prediction_token_ids else None,
        )

    def abort(self) -> None:
        """Abort every generation that is not over; `take` then raises RequestAborted. Idempotent."""
        self.aborted = True
        self._visit.abort()
        for generation in self.generations.values():
            generation.abort()

    async def begin(self) -> None:
        """Begin the generations. Call it once, then `take` and `news` alternately until it is `finished`.

        Raises:
            EngineUnavailable, RequestFailed: the only choice could not begin.
        """
        if len(self.choices) == 1:
            self._alone = await self._start(self.choices[0])
            return
        for choice in self.choices[:: self.job.n]:
            self._pump(choice)
            await self._take_turns(choice.index // self.job.n)

    @property
    def finished(self) -> bool:
        """Whether everything of every choice has been taken."""
        return not self._num_unfinished

    def take(self) -> Sequence[ChoiceDelta]:
        """All new deltas; empty: none yet, see `news`. Not a coroutine, since it is called for every token.

        Raises:
            EngineUnavailable, RequestFailed: one choice failed, and with it the request.
        """
        if self._alone is not None:
            return self._take_of_one(self._alone)
        arrived, self._arrived = self._arrived, []
        deltas: list[ChoiceDelta] = []
        for item in arrived:
            if isinstance(item, Exception):
                raise item
            deltas.append(item)
        self._num_unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def _take_of_one(self, generation: "Generation") -> Sequence[ChoiceDelta]:
        choice = self.choices[0]
        delta, self._held = self._held or generation.take(), None
        if delta is None:
            if generation.ended:
                raise self._ended_early()
            return ()
        if self.job.echo and choice.echo_work(delta) is not None:
            self._held = delta
            return ()
        shown = self._show(choice, generation, delta)
        if shown.finish_reason is not None:
            self._num_unfinished = 0
        return (shown,)

    def news(self) -> Awaitable[None]:
        """Return when there may be something to take, after `take` has found nothing."""
        if self._held is not None and (work := self.choices[0].echo_work(self._held)) is not None:
            return self._work_on_pool(work)
        if self._alone is not None:
            return self._alone.news()
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def _work_on_pool(self, work: Callable[[], object]) -> None:
        await self._pool.encode(work)

    def _put(self, item: ChoiceDelta | Exception) -> None:
        """Store deltas of one of several choices for `take`."""
        self._arrived.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _start(self, choice: Choice) -> "Generation":
        """Begin a choice at once, or when its turn comes; the deadline is the request's."""
        if self.aborted:
            raise RequestAborted("the client went away", request_id=self._label)
        first = self.generations.get(choice.index - choice.index % self.job.n)
        near = first.prefill_engine if first is not None else ""
        request = choice.request(
            timeout_s=max(self._deadline.whole_left_s, 0.001),
            stall_timeout_s=self._deadline.stall_timeout_s,
            label=self._label,
            traceparent=self._traceparent,
            near=near,
        )
        generation = await self._visit.start(
            request, functools.partial(self.generations.__setitem__, choice.index), choice.index
        )
        self._metrics.dispatched()
        return generation

    async def _take_turns(self, index: int) -> None:
        """Yield between starts: a thousand choices must not hold up other requests."""
        if index % _STARTS_IN_A_ROW == _STARTS_IN_A_ROW - 1:
            await asyncio.sleep(0)

    def _show(self, choice: Choice, generation: "Generation", delta: Delta) -> ChoiceDelta:
        """The part of an engine's delta to show to the client."""
        arrivals = generation.take_arrivals()
        choice.last_token_at = self._metrics.arrived(arrivals, choice.last_token_at)
        if arrivals and (waited_s := MONOTONIC.now() - arrivals[0]) > STALL_S:
            self._metrics.client_stall(waited_s)
        shown = choice.push(delta)
        self._visit.came(len(shown.token_ids))
        if shown.finish_reason is not None:
            self._metrics.choice_ended(shown.finish_reason)
        if choice.finished and (delta.finish_reason is None or len(shown.token_ids) < len(delta.token_ids)):
            # a stop string, or a tool call: the engines do not know about it
            generation.finish(choice.num_tokens)
        return shown

    def _ended_early(self) -> RequestFailed:
        return RequestFailed("the generation ended without a reason", request_id=self._label)

    def _pump(self, choice: Choice) -> None:
        task = asyncio.create_task(self._collect(choice))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self, choice: Choice) -> None:
        """Collect a choice's deltas for `take`; its siblings start after its first delta."""
        siblings = range(choice.index + 1, choice.index + self.job.n) if choice.index % self.job.n == 0 else range(0)
        try:
            generation = await self._start(choice)
            async for delta in generation:
                if (work := choice.echo_work(delta)) is not None:
                    await self._work_on_pool(work)
                self._put(self._show(choice, generation, delta))
                for index in siblings:
                    self._pump(self.choices[index])
                    await self._take_turns(index)
                siblings = range(0)
                if choice.finished:
                    return
            raise self._ended_early()
        except Exception as error:  # raised again by `take`, in the task that serves the request
            self._put(error)


def _make_choices(job: Job, model: ServedModel, serial: str) -> Iterator[Choice]:
    for first in range(0, len(job.prompts) * job.n, job.n):
        seed = job.params.seed
        if seed is None:
            drawn = hashlib.blake2b(f"{serial} {first}".encode(), digest_size=8).digest()
            seed = int.from_bytes(drawn) >> 1  # the same where the answer is taken up again
        sibling = Choice(job, model, index=first, seed=seed)
        yield sibling
        for index in range(first + 1, first + job.n):
            yield Choice(job, model, index=index, seed=seed, sibling=sibling)
