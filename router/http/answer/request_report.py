"""Reports on a request that has ended: its access line, its spans, and its lines in a recording."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from pdkv.base.trace_format import TraceRequest
from pdkv.errors import RequestAborted
from pdkv.router.generations.generation import Generation
from pdkv.router.http.answer.fanout import Fanout
from pdkv.router.http.read.job import Job
from pdkv.router.http.server.access_log import CLIENT_GONE, AccessLine, key_name
from pdkv.router.metrics.recorder import Ended, Recorder, shown_code
from pdkv.router.metrics.requests import RequestMetrics
from pdkv.router.metrics.tracing import Served

_SPAN_NAMES = {
    "request_id": "gen_ai.request.id",
    "choices": "gen_ai.request.n",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "queue_s": "gen_ai.latency.time_in_queue",
    "ttft_s": "gen_ai.latency.time_to_first_token",
}
"""Fields of an access line, by their names in vLLM's spans; others are pdkv's own."""


class RequestReport:
    """The report on one request. Nothing of its prompt, its reply or its key is in it."""

    def __init__(
        self,
        scope: Scope,
        names: dict[str, str],
        status: int,
        outcome: str,
        metrics: RequestMetrics,
        fanout: Fanout | None,
    ) -> None:
        """Gather the facts of a request.

        Args:
            names: request_id, trace_id, and param if a field is at fault.
            status: 0: the client had left.
            fanout: None: the request did not get that far.
        """
        self._scope = scope
        self._status = status or CLIENT_GONE
        self._outcome = outcome
        self._metrics = metrics
        self._fanout = fanout
        self._fields: dict[str, Any] = {**names, "key": key_name(scope)}
        if fanout is not None:
            self._fields |= _work(fanout, metrics)

    def access_line(self) -> AccessLine:
        """The fields of its access line."""
        duration_s = self._metrics.duration_s
        return AccessLine(
            self._scope, status=self._status, outcome=self._outcome, duration_s=duration_s, **self._fields
        )

    def served(self) -> Served:
        """The facts for its spans."""
        metrics, fanout = self._metrics, self._fanout
        attributes: dict[str, Any] = {
            "http.request.method": self._scope["method"],
            "url.path": self._scope["path"],
            "http.response.status_code": self._status,
            "gen_ai.latency.e2e": metrics.duration_s,
            "pdkv.outcome": self._outcome,
        }
        for name, value in self._fields.items():
            if value is not None and name != "trace_id":
                attributes[_SPAN_NAMES.get(name, f"pdkv.{name}")] = value
        return Served(
            began=metrics.began,
            dispatched=metrics.dispatched_at,
            first_token=metrics.first_token_at,
            ended=metrics.ended_at,
            failed=self._status >= 500 or (self._status == 200 and self._outcome not in ("ok", "disconnected")),
            attributes=attributes,
            generations=list(fanout.generations.values()) if fanout is not None else [],
        )


def _work(fanout: Fanout, metrics: RequestMetrics) -> dict[str, Any]:
    """The work done for it; a field whose value is unknown is None."""
    prefill, decode = fanout.engines
    sources, (accepted, rejected) = fanout.sources, fanout.guesses
    return {
        "stream": fanout.job.stream,
        "choices": len(fanout.choices),
        "prefill": prefill or None,
        "decode": decode or None,
        "stays": fanout.stays or None,
        "attempts": fanout.num_attempts,
        "prompt_tokens": fanout.num_prompt_tokens,
        **{name: getattr(sources, name) for name in sources.__struct_fields__},
        "completion_tokens": fanout.num_completion_tokens,
        "accepted_guesses": accepted or None,
        "rejected_guesses": rejected or None,
        "queue_s": metrics.queue_s,
        "ttft_s": metrics.ttft_s,
    }


def record(
    recorder: Recorder,
    job: Job | None,
    begun: Mapping[int, Generation],
    metrics: RequestMetrics,
    outcome: str,
    tenant: str,
) -> None:
    """Record each choice of a request. `job` is None if it was refused before it was read; `begun`: generations by
    choice.
    """
    began = metrics.began
    for index in range(1 if job is None else len(job.prompts) * job.n):
        generation = begun.get(index)
        prompt = () if job is None else job.prompts[index // job.n].token_ids
        first = ended = None
        if generation is not None:
            first, ended = generation.timeline.first_token, generation.timeline.ended
        line = TraceRequest(
            t=round(began - recorder.began, 6),
            session=0,
            key=0,
            prompt_tokens=len(prompt),
            output_tokens=0 if generation is None else len(generation.flow.output_token_ids),
            outcome=_outcome(generation, outcome),
            ttft_s=None if first is None else round(first - began, 6),
            e2e_s=round((metrics.ended_at if ended is None else ended) - began, 6),
            **({} if job is None else _asked(job)),
        )
        salt, affinity = ("", "") if job is None else (job.cache_salt, job.affinity)
        num_held = 0 if job is not None and index % job.n else len(prompt)
        recorder.add(Ended(line, prompt, num_held, salt, affinity, tenant))


def _asked(job: Job) -> dict[str, Any]:
    return {
        "max_tokens": job.params.max_tokens,
        "priority": job.priority,
        "slo_ttft_ms": 1e3 * job.slo_ttft_s or None,
        "slo_tpot_ms": 1e3 * job.slo_tpot_s or None,
        "stream": job.stream,
        "pool": job.pool,
    }


def _outcome(generation: Generation | None, of_request: str) -> str:
    """How a choice ended; one that did not begin ended as its request did."""
    failure = generation.flow.failure if generation is not None else None
    if isinstance(failure, RequestAborted) or (failure is None and of_request == "disconnected"):
        return "abort"
    if failure is None and generation is not None and generation.flow.finish_reason is not None:
        return generation.flow.finish_reason
    return f"error:{shown_code(of_request if failure is None else failure.code)}"
