"""What a recording says of itself, in the form of a run: its report stands beside that of its replay."""

from pdkv.bench.client import Reply
from pdkv.bench.report import Run, Sent
from pdkv.bench.trace import Trace, TraceRequest


def recorded_run(trace: Trace) -> Run:
    """The requests as they went when they were recorded; only the first and the last token of each has a time."""
    requests = [
        Sent(request.session, 0, request.t, 0.0, _reply(request), request.output_tokens) for request in trace.requests
    ]
    ends = [request.t + request.e2e_s for request in trace.requests]
    begin = min((request.t for request in trace.requests), default=0.0)
    return Run(requests, max(ends, default=begin) - begin, 0.0)


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
