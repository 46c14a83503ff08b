"""A dispatcher without engines: it answers by a function of the request, or as the test says, delta by delta."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

from pdkv.errors import EngineUnavailable, RequestAborted
from pdkv.router.engines.books import Books
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.health import EngineHealth
from pdkv.router.engines.outliers import OutlierScore
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.changes import Changes
from pdkv.router.generations.dispatch import Counters, Dispatcher, Pools
from pdkv.router.generations.fallback import Fallback
from pdkv.router.generations.timeline import Delays, Timeline
from pdkv.router.request import Delta, GenerateRequest
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.messages import BlockStored, CacheCleared, KVEvents, PromptLogprobs, TokenLogprob
from pdkv.wire.reports import BlockCounts, ConnectorStats, LoadReport, SourceCounts, TierHeld

Answer = Callable[[GenerateRequest], Sequence[Delta | Exception]]


class FakeGeneration:
    """A generation that yields what was put into it."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.prefill_engine = "prefill-0"
        self.decode_engine = "decode-1"
        self.num_cached_tokens = 0
        self.guesses = (0, 0)
        self.num_lossy_tokens: int | None = None
        self.num_attempts = 1
        self.choices, self.stays = None, ""
        self.sources = SourceCounts(computed=len(request.prompt_token_ids))
        self.aborted = False
        self.finished = False  # by its reader
        self.ended = False
        self.over = asyncio.Event()  # aborted, or the reader saw the failure
        self.on_end: Callable[[], None] = lambda: None
        self.on_wake: Callable[[], None] | None = None  # of a session for a front
        self.request_id, self.choice, self.timeline = "r", request.choice, Timeline(0.0)
        self.flow = SimpleNamespace(output=SimpleNamespace(token_ids=[]))
        self._items: deque[Delta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._arrivals: list[float] = []

    def put(self, item: Delta | Exception, *, at: float | None = None) -> None:
        """The next delta, or the failure that ends it; `at`: when its tokens came (time.perf_counter)."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_wake is not None:
            self.on_wake()
        if isinstance(item, Delta) and item.token_ids:
            self._arrivals.append(time.perf_counter() if at is None else at)

    def take_arrivals(self) -> list[float]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    @property
    def num_unread(self) -> int:
        """Deltas that nobody has taken yet."""
        return len(self._items)

    def abort(self) -> None:
        if not self.ended and not self.aborted:
            self.aborted = True
            self.over.set()
            self.put(RequestAborted("aborted", request_id="r"))
            self.on_end()

    def finish(self, num_tokens: int = 0) -> None:
        if not self.ended and not self.aborted:
            self.finished = self.ended = True
            self.over.set()
            self.on_end()

    def __aiter__(self) -> "FakeGeneration":
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self.ended:
                raise StopAsyncIteration
            await self.news()
        return delta

    def news(self) -> "asyncio.Future[None]":
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take(self) -> Delta | None:
        if self.ended or not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, Exception):
            self.ended = True
            self.over.set()
            self.on_end()
            raise item
        self.flow.output.token_ids += item.token_ids
        self.ended = item.finish_reason is not None
        if self.ended:
            self.on_end()
        elif self._items and self.on_wake is not None:
            self.on_wake()
        return item


class FakeDispatcher:
    """Without `answer`, tests feed `generations` by hand."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.ready = True
        self.available = True
        self.max_model_len: int | None = None
        self.recovery = SimpleNamespace(parked={})
        self.connector_problems: dict[str, str] = {}
        self.tiers, self.index = TierIndex(), PrefixIndex()
        self.index.add_engine("prefill-0")
        self.index.apply("prefill-0", KVEvents(0, [CacheCleared(), BlockStored([b"key"], None)]))
        self.num_cached_tokens = 0
        self.num_lossy_tokens: int | None = None
        self.generations: list[FakeGeneration] = []
        self.num_slots = 1 << 30  # generations that may run at once
        self.num_seqs = 1 << 30  # beyond these, none of those that have many
        self.large: Collection[str] = ()
        self.changes = Changes()
        self.started = asyncio.Event()  # set by every start
        self.counters = Counters()
        self.routes = SimpleNamespace(num_local_turns=0, num_policy_failures=0, num_kept=0)
        self.fleet, self.mover = SimpleNamespace(pairs=range(4)), SimpleNamespace(num_moved=7)
        self.prober = SimpleNamespace(num_ok=5, num_failed=6)
        self.counters.retried, self.counters.migrated, self.counters.dropped_messages = 2, 1, 3
        self.counters.failed["timeout"] = 4
        self.delays = Delays()
        self.fallback = Fallback(Fleet(), self.is_down, 0.0)
        self.pools = Pools(cast(Dispatcher, self))

    def is_down(self) -> bool:
        return False

    @property
    def fault(self) -> str:
        return "" if self.ready else "no decode engine is live"

    @property
    def requests(self) -> list[GenerateRequest]:
        """All that was started."""
        return [generation.request for generation in self.generations]

    @property
    def num_running(self) -> int:
        """Generations that have not ended."""
        return sum(not (generation.ended or generation.aborted) for generation in self.generations)

    def has_room(self) -> bool:
        return self.num_running < self.num_slots

    def held_back(self) -> Collection[str]:
        return self.large if self.num_running >= self.num_seqs else ()

    def give_room(self, num_slots: int) -> None:
        """So many generations may run now."""
        self.num_slots = num_slots
        self.changes.notify()

    def start(self, request: GenerateRequest) -> FakeGeneration:
        if not self.available:
            raise EngineUnavailable("no decode engine is ready")
        generation = FakeGeneration(request)
        generation.num_cached_tokens = self.num_cached_tokens
        generation.num_lossy_tokens = self.num_lossy_tokens
        generation.on_end = lambda: self.changes.notify()
        self.generations.append(generation)
        for item in self.answer(request) if self.answer is not None else ():
            generation.put(item)
        self.started.set()
        return generation

    async def next_generation(self, number: int) -> FakeGeneration:
        """The generation of this number, once it has started."""
        while len(self.generations) <= number:
            self.started.clear()
            await self.started.wait()
        return self.generations[number]

    def topology(self) -> dict[str, Any]:
        return {"engines": [{"name": "decode-1", "role": "decode", "state": "ready"}]}

    def num_malformed(self, name: str) -> int:
        return 21 if name == "prefill-0" else 0

    def engines(self) -> list[EngineState]:
        load = LoadReport(
            waiting=1,
            running=2,
            blocks=BlockCounts(total=10, free=4, cached=3, active=2, leased=1, quarantined=0),
            sources=SourceCounts(computed=5, local_hit=7),
            preemptions=6,
            bytes_received=4096,
            non_finite_requests=8,
            damaged_values=8,
            partial_loads=9,
            connectors={
                "multi/0-p2p": ConnectorStats(saves=11, loads=12, saved_bytes=13, timeouts=14, fallbacks=15),
                "multi/1-store": ConnectorStats(load_seconds=8.0, hidden_load_seconds=6.0),
                "multi/1-store/0-redis": ConnectorStats(tier_hits=16, tier_failures=17, held=TierHeld()),
                "multi/1-store/0-host": ConnectorStats(tier_hits=22, held=TierHeld(18, 19 << 20, 20 << 20, 21)),
            },
        )
        ejected = OutlierScore()
        ejected.eject(0.0)
        return [
            EngineState("decode-1", "decode", "ready", load=load, health=EngineHealth(silent=True, busy_s=1.5)),
            EngineState("prefill-0", "prefill", "dead", books=Books(requests=3), num_deaths=1, score=ejected),
        ]


def tokens(*token_ids: int, end: str | None = None, **fields: Any) -> Delta:
    """A delta; `end` is its finish reason."""
    values: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, "stop_token_id": None, **fields}
    return Delta(list(token_ids), finish_reason=end, **values)


def logprob(token_id: int, *others: int) -> TokenLogprob:
    """A recognizable logprob: minus a tenth of the id, the token itself being the most likely."""
    top = tuple((i, -i / 10) for i in (token_id, *others))
    return TokenLogprob(token_id, -token_id / 10, 1, top)


def say(token_ids: Sequence[int]) -> Answer:
    """Answer every request with these tokens, one delta each, cut at max_tokens; logprobs where asked for."""

    def answer(request: GenerateRequest) -> Sequence[Delta]:
        params = request.params
        ids = list(token_ids)[: params.max_tokens]
        cut = len(ids) < len(token_ids)
        deltas = []
        for position, token_id in enumerate(ids):
            last = position == len(ids) - 1
            prompt = None
            if position == 0 and params.prompt_logprobs is not None:
                prompt = PromptLogprobs.of([None, *(logprob(i) for i in request.prompt_token_ids[1:])])
            deltas.append(
                tokens(
                    token_id,
                    end=("length" if cut else "stop") if last else None,
                    logprobs=[logprob(token_id, token_id + 1)] if params.logprobs is not None else None,
                    prompt_logprobs=prompt,
                )
            )
        return deltas

    return answer
