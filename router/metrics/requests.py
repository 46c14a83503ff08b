"""Prometheus metrics of one router's requests, under pdkv's names and, where the meaning is the same, under vLLM's.

`engines.py` has those of its engines; `docs/observability.md` has the table.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from pdkv.base.clock import MONOTONIC
from pdkv.router.generations.timeline import PHASE_S, SHORT_S
from pdkv.router.histogram import Histogram, bounds
from pdkv.router.metrics.engines import engine_metrics
from pdkv.router.metrics.exposition import Exposed, Scraped, counter, counters, gauge, totals
from pdkv.router.metrics.loop_watchdog import LoopWatchdog
from pdkv.router.metrics.tracing import Tracer

if TYPE_CHECKING:
    from pdkv.router.admission.admission_queue import Admission
    from pdkv.router.generations.dispatch import Dispatcher

Endpoint = Literal["completions", "chat_completions", "responses", "embeddings", "rerank"]

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat_completions",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
}
"""Endpoints that fronts serve, by path."""

MAX_OUTCOMES = 64
"""The most different outcomes of requests that are counted separately: an engine may report any error."""

_TURN_BYTES = 8 * 1024
"""Bytes of exposition text formatted at once: half a millisecond."""

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_FIRST_TOKEN_S = bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_INTER_TOKEN_S = bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_N = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
# vLLM's bounds (vllm/v1/metrics/buckets.py), so that its dashboards show ours.

_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def spans(counts: Mapping[str, int]) -> Metric:
    """Spans that were "sent" and "lost"."""
    return counters("pdkv_spans", "Spans by outcome.", "outcome", counts)


class Totals:
    """What `RequestMetrics` count."""

    def __init__(self) -> None:
        self.pools: dict[str, Totals] = {}  # what is counted of requests that pools run
        self.requests: Counter[tuple[str, str]] = Counter()  # by endpoint and outcome
        self.in_flight = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.finished = Counter(dict.fromkeys(_FINISH_REASONS, 0))  # choices
        self.first_token = Histogram(_STEPS + _FIRST_TOKEN_S)
        self.inter_token = Histogram(_STEPS + _INTER_TOKEN_S)
        self.token_time = Histogram(_INTER_TOKEN_S)
        self.duration = Histogram(_STEPS + PHASE_S)
        self.client_stall = Histogram(_STEPS)
        self.preparing = Histogram(SHORT_S)
        self.scheduling = Histogram(SHORT_S)
        self.prompt_size, self.output_size = Histogram(_TOKENS), Histogram(_TOKENS)
        self.num_choices = Histogram(_N)


class Metrics(Totals):
    """The counters of one router. Labels come from fixed sets and names of engines, never from clients."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        model_name: str = "",
        *,
        tracer: Tracer | None = None,
        watchdog: LoopWatchdog | None = None,
        admission: "Admission | None" = None,
    ) -> None:
        """`model_name`: the served name; a label of vLLM's metrics."""
        super().__init__()
        self._admission = admission
        self.queue_wait = Histogram(SHORT_S)
        if admission is not None:
            admission.observe_wait = self.queue_wait.observe
        self._dispatcher = dispatcher
        self._tracer, self._watchdog = tracer, watchdog
        self._labels = {"model_name": model_name, "engine": "router"}
        self._registry = CollectorRegistry()
        self.register(self._with_pools)
        ProcessCollector(registry=self._registry)

    def register(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Export this collector, too."""
        self._registry.register(Scraped(read))

    async def render(self) -> bytes:
        """The exposition text, version 0.0.4, made family by family with other tasks in between: with 1,024 keys it
        takes 24 ms.
        """
        texts: list[bytes] = []
        num_since = 0
        for family in self._registry.collect():
            text = generate_latest(cast(CollectorRegistry, _Only(family)))
            texts.append(text)
            num_since += len(text)
            if num_since > _TURN_BYTES:
                await asyncio.sleep(0)
                num_since = 0
        return b"".join(texts)

    def figures(self) -> dict[str, float]:
        """The metrics without labels, by name."""
        samples = (sample for family in self._registry.collect() for sample in family.samples)
        return {sample.name: sample.value for sample in samples if not sample.labels}

    def now(self) -> dict[str, int]:
        """Requests that have not ended, choices that wait in the router, and whether new requests are refused."""
        queued, draining = (q.num_waiting, q.draining) if (q := self._admission) is not None else (0, False)
        return {"in_flight": self.in_flight, "queued": queued, "draining": bool(draining)}

    def _with_pools(self) -> Iterator[Metric]:
        """All metrics, and in the same families those of pools, with one more label."""
        found: dict[str, Metric] = {}
        for name, metrics in self.pools.items():
            assert isinstance(metrics, Metrics)
            for family in metrics.collect():
                family.samples = [each._replace(labels={**each.labels, "pool": name}) for each in family.samples]
                if (first := found.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        for family in self.collect():
            if (theirs := found.pop(family.name, None)) is not None:
                family.samples += theirs.samples
            yield family
        yield from found.values()

    def collect(self) -> Iterator[Metric]:
        """All metrics with their current values."""
        yield from self._requests()
        yield from self._dispatch()
        if self._admission is not None:
            yield from self._queue(self._admission)
        yield from self._looked_at()
        yield from (exposed.family() for exposed in (*self._own_histograms(), *self._vllm_histograms()))
        yield from engine_metrics(self._dispatcher, self._labels["model_name"])

    def _requests(self) -> Iterator[Metric]:
        text = "Requests by endpoint and outcome."
        yield totals("pdkv_requests", text, ["endpoint", "outcome"], self.requests.items())
        yield gauge("pdkv_requests_in_flight", "Requests that have not ended.", self.in_flight)
        prompts, generated = self.prompt_tokens, self.generated_tokens
        yield counter("pdkv_prompt_tokens", "Prompt tokens of finished requests.", prompts)
        yield counter(
            "pdkv_cached_prompt_tokens",
            "Prompt tokens of finished requests that were not computed.",
            self.cached_tokens,
        )
        yield counter("pdkv_generated_tokens", "Output tokens of finished requests.", generated)
        yield counter("vllm:prompt_tokens", "Number of prefill tokens processed.", prompts, self._labels)
        yield counter("vllm:generation_tokens", "Number of generation tokens processed.", generated, self._labels)
        yield counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", self.cached_tokens, self._labels)
        success = "Count of successfully processed requests."
        yield counters("vllm:request_success", success, "finished_reason", self.finished, self._labels)

    def _dispatch(self) -> Iterator[Metric]:
        dispatched = self._dispatcher.counters
        yield counter("pdkv_retries", "Generations started again elsewhere.", dispatched.retried)
        yield counter("pdkv_migrations", "Generations gone on elsewhere, mid-stream.", dispatched.migrated)
        waiting = "Generations that wait for an engine to come back."
        yield gauge("pdkv_waiting_for_engines", waiting, len(self._dispatcher.recovery.parked))
        yield counter("pdkv_dropped_messages", "Messages about something that had ended.", dispatched.dropped_messages)
        yield counter("pdkv_generations_started", "Choices given to engines.", dispatched.started)
        ended = {"finished": dispatched.finished, "aborted": dispatched.aborted, **dispatched.failed}
        yield counters("pdkv_generations", "Choices by outcome.", "outcome", ended)
        faults = "Attempts that failed, by whose fault it was."
        yield counters("pdkv_failed_attempts", faults, "fault", dispatched.faults)
        yield counter(
            "pdkv_duplicate_tokens", "Tokens computed by two engines and shown once.", dispatched.duplicate_tokens
        )
        loans = "Loans requested from other engines' caches, by outcome."
        yield counters("pdkv_kv_loans", loans, "outcome", dispatched.loans)
        turns = "Choices that a decode engine ran alone because that was sooner than a hand-off."
        yield counter("pdkv_local_turns", turns, self._dispatcher.routes.num_local_turns)
        kept = "Choices that a prefill engine ran alone because decode engines were full."
        yield counter("pdkv_kept_choices", kept, self._dispatcher.routes.num_kept)
        for name, of, hits in (
            ("reachable", "had, or were in a store", dispatched.reachable_hits),
            ("achieved", "of their engine had, or that it loaded", dispatched.achieved_hits),
        ):
            text = f"Prompt tokens that caches {of}."
            yield totals(f"pdkv_{name}_hit_tokens", text, ["role", "tier"], hits.items())
        text = "Choices of engines by the default policy because --policy failed."
        yield counter("pdkv_policy_failures", text, self._dispatcher.routes.num_policy_failures)
        fallback = self._dispatcher.fallback
        if fallback.engine is not None:
            sent = "Choices given to another deployment, by reason."
            yield counters("pdkv_fallback_choices", sent, "reason", fallback.sent)
            yield gauge("pdkv_fallback_share", "Share of the latest choices that were.", fallback.recent)
            yield gauge("pdkv_fallback_active", "Whether a rule sends choices there.", bool(fallback.cause))
        yield counter("pdkv_kv_load_failures", "Failed KV loads from peers.", dispatched.load_failures)

    def _queue(self, admission: "Admission") -> Iterator[Metric]:
        yield gauge("pdkv_queue_choices", "Choices that wait in the router for engines.", admission.num_waiting)
        pending = "Choices of requests that have arrived but not begun."
        yield gauge("pdkv_queue_pending_choices", pending, admission.num_pending)
        yield gauge("pdkv_queue_pending_tokens", "Prompt tokens of waiting choices.", admission.pending_tokens)
        yield counter("pdkv_queue_full", "Requests refused with 429 because the queue was full.", admission.num_full)
        yield gauge("pdkv_draining", "Whether new requests are refused.", bool(admission.draining))
        waits = "Waiting times of choices that did not begin at once."
        yield Exposed("pdkv_queue_wait_seconds", waits, self.queue_wait, SHORT_S).family()

    def _looked_at(self) -> Iterator[Metric]:
        tracer, watchdog = self._tracer, self._watchdog
        if tracer is not None:
            yield spans(tracer.counts)
        if watchdog is not None:
            text = "What held the event loop for longer than allowed."
            yield totals("pdkv_loop_stalls", text, ["where", "kind"], watchdog.stalls.items())
            yield gauge("pdkv_loop_longest_stall_seconds", "The longest such time.", watchdog.longest_s)
            yield Exposed("pdkv_loop_lag_seconds", "Delay of the event loop.", watchdog.lag, SHORT_S).family()

    def _own_histograms(self) -> list[Exposed]:
        delays = self._dispatcher.delays
        arrivals = "Time between two arrivals of one choice's tokens from the engines."
        stalls = "Tokens that waited 50 ms or more for a client that did not read."
        to_engine = "From a request's checked tokens to its first message to an engine."
        sizes = delays.transfer_bytes
        return [
            Exposed("pdkv_time_to_first_token_seconds", "From a request to its first token.", self.first_token, _STEPS),
            Exposed("pdkv_inter_token_seconds", arrivals, self.inter_token, _STEPS),
            Exposed("pdkv_client_stall_seconds", stalls, self.client_stall, _STEPS[5:]),
            Exposed("pdkv_request_seconds", "From a request to its end.", self.duration, _STEPS[1:]),
            Exposed("pdkv_router_prepare_seconds", "From a request to its checked tokens.", self.preparing, SHORT_S),
            Exposed("pdkv_router_scheduling_delay_seconds", to_engine, self.scheduling, SHORT_S),
            Exposed("pdkv_router_balancing_delay_seconds", "Time to choose engines.", delays.balancing, SHORT_S),
            Exposed("pdkv_engine_queue_seconds", "A prompt's wait in its engine's queue.", delays.queue, SHORT_S),
            Exposed("pdkv_kv_transfer_duration_seconds", "Time of a KV load from a peer.", delays.transfer, SHORT_S),
            Exposed("pdkv_kv_transfer_bytes", "Size of a KV load from a peer.", sizes, sizes.bounds),
        ]

    def _vllm_histograms(self) -> list[Exposed]:
        delays, of = self._dispatcher.delays, "Histogram of "
        token_time = "time_per_output_token_seconds per request."
        table: list[tuple[str, str, Histogram, tuple[float, ...]]] = [
            ("time_to_first_token_seconds", "time to first token in seconds.", self.first_token, _FIRST_TOKEN_S),
            ("inter_token_latency_seconds", "inter-token latency in seconds.", self.inter_token, _INTER_TOKEN_S),
            ("request_time_per_output_token_seconds", token_time, self.token_time, _INTER_TOKEN_S),
            ("e2e_request_latency_seconds", "e2e request latency in seconds.", self.duration, PHASE_S),
            ("request_queue_time_seconds", "time spent in WAITING phase for request.", delays.queue, PHASE_S),
            ("request_prefill_time_seconds", "time spent in PREFILL phase for request.", delays.prefill, PHASE_S),
            ("request_decode_time_seconds", "time spent in DECODE phase for request.", delays.decode, PHASE_S),
            ("request_inference_time_seconds", "time spent in RUNNING phase for request.", delays.inference, PHASE_S),
            ("request_prompt_tokens", "number of prefill tokens processed.", self.prompt_size, _TOKENS),
            ("request_generation_tokens", "number of generation tokens processed.", self.output_size, _TOKENS),
            ("request_params_n", "the n request parameter.", self.num_choices, _N),
        ]
        return [
            Exposed(f"vllm:{name}", of + text, histogram, bounds, self._labels)
            for name, text, histogram, bounds in table
        ]


class _Only(NamedTuple):
    """A registry of one family."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        """The family."""
        return (self.family,)


class RequestMetrics:
    """The lifetime events of one request, by the process's clock: latencies are differences of two of them."""

    def __init__(self, metrics: Totals, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.began = MONOTONIC.now()
        self.prepared_at = self.dispatched_at = self.first_token_at = self.ended_at = 0.0
        self._num_choices = self._num_ended = 0
        self._count_in(metrics)

    def _count_in(self, metrics: Totals) -> None:
        self._metrics = metrics
        self.inter_token = metrics.inter_token.observe
        self.client_stall = metrics.client_stall.observe
        metrics.in_flight += 1

    def of_pool(self, name: str) -> None:
        """Note that this pool runs it, before anything else is noted."""
        if (totals := self._metrics.pools.get(name)) is not None:
            self._metrics.in_flight -= 1
            self._count_in(totals)

    @property
    def queue_s(self) -> float | None:
        """Seconds from its checked tokens to its first message to an engine; None: none has been sent."""
        return round(self.dispatched_at - self.prepared_at, 6) if self.dispatched_at else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to its first token; None: it has none."""
        return round(self.first_token_at - self.began, 6) if self.first_token_at else None

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to its end, or to now."""
        return (self.ended_at or MONOTONIC.now()) - self.began

    def prepared(self, num_choices: int) -> None:
        """Note that it has been read, checked and tokenized."""
        self._num_choices = num_choices
        self.prepared_at = MONOTONIC.now()
        self._metrics.preparing.observe(self.prepared_at - self.began)

    def dispatched(self) -> None:
        """Note that a choice was given to engines; the first one counts."""
        if not self.dispatched_at:
            self.dispatched_at = MONOTONIC.now()
            self._metrics.scheduling.observe(self.dispatched_at - self.prepared_at)

    def first_token(self, now: float) -> None:
        """Note that a choice's first tokens came from the engines at `now`; the first choice to get them counts."""
        if not self.first_token_at:
            self.first_token_at = now
            self._metrics.first_token.observe(now - self.began)

    def arrived(self, arrivals: Iterable[float], last_at: float) -> float:
        """Note when a choice's tokens came from the engines, of which the last came at `last_at` (0: none had). Returns
        the time of the last one now.
        """
        for at in arrivals:
            if last_at:
                self.inter_token(at - last_at)
            else:
                self.first_token(at)
            last_at = at
        return last_at

    def choice_ended(self, finish_reason: str) -> None:
        """Note that a choice has all of its tokens."""
        self._num_ended += 1
        self._metrics.finished[finish_reason if finish_reason in _FINISH_REASONS else "stop"] += 1

    def served(self, *, num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int, n: int = 1) -> None:
        """Note that everything requested is generated."""
        metrics = self._metrics
        metrics.prompt_tokens += num_prompt_tokens
        metrics.cached_tokens += num_cached_tokens
        metrics.generated_tokens += num_completion_tokens
        metrics.prompt_size.observe(num_prompt_tokens)
        metrics.output_size.observe(num_completion_tokens)
        metrics.num_choices.observe(n)
        tokens_each = num_completion_tokens / max(self._num_choices, 1)
        if self.first_token_at and tokens_each > 1:
            metrics.token_time.observe((MONOTONIC.now() - self.first_token_at) / (tokens_each - 1))

    def ended(self, outcome: str) -> None:
        """Note that the request is over: "ok", "disconnected" or an error's code."""
        metrics = self._metrics
        self.ended_at = MONOTONIC.now()
        metrics.in_flight -= 1
        assert metrics.in_flight >= 0, "more requests ended than began"
        metrics.duration.observe(self.duration_s)
        if outcome != "ok" and self._num_choices > self._num_ended:
            reason = "abort" if outcome == "disconnected" else "error"
            metrics.finished[reason] += self._num_choices - self._num_ended
        key = (self._endpoint, outcome)
        known = key in metrics.requests or len(metrics.requests) < MAX_OUTCOMES
        metrics.requests[key if known else (self._endpoint, "other")] += 1
