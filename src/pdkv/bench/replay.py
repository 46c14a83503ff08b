"""What a recording says of itself, in the form of a run: its report stands beside that of its replay."""

from collections.abc import Sequence
from typing import Any

from pdkv.bench.client import Reply
from pdkv.bench.report import Run, Sent, Slo, summarize
from pdkv.bench.trace import Trace, TraceRequest

_UNKNOWN = ("cached_input_tokens", "unsent", "client_cpu_us_per_token", "client_busy", "p99_late_ms")
"""Figures that no recording has; nor has it times between tokens."""


def recorded_report(trace: Trace, percents: Sequence[float], slo: Slo) -> dict[str, Any]:
    """`summarize` of the requests as they went when they were recorded."""
    requests = [
        Sent(request.session, 0, request.t, 0.0, _reply(request), request.output_tokens) for request in trace.requests
    ]
    begin = min((request.t for request in trace.requests), default=0.0)
    end = max((request.t + request.e2e_s for request in trace.requests), default=0.0)
    report = summarize(Run(requests, end - begin, 0.0), percents, slo)
    return {name: value for name, value in report.items() if name not in _UNKNOWN and "_itl_" not in name}


def _reply(request: TraceRequest) -> Reply:
    reply = Reply(request.t)
    reply.has_usage, reply.num_tokens, reply.num_prompt_tokens = True, request.output_tokens, request.prompt_tokens
    if request.ttft_s is not None:
        reply.stamps = [request.t + request.ttft_s, request.t + request.e2e_s]
    if request.outcome not in ("stop", "length"):
        reply.error = request.outcome
    elif not reply.stamps:
        reply.error = "no token arrived"
    return reply
